"""Settings of the sidecar, from the environment of its container."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["SettingError", "SidecarSettings"]

TOKEN_FILE = "/var/run/secrets/fireflyer.dev/token"  # noqa: S105  a path


class SettingError(ValueError):
    """A missing or invalid variable: its name, its value and the expected one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SidecarSettings:
    """Times in seconds; tests shorten them."""

    host: str
    port: int
    authority: str
    """PEM."""
    server_name: str = ""
    token_file: Path = Path(TOKEN_FILE)
    run_folder: Path = Path("/run/flyer")
    connect_seconds: float = 10.0
    retry_seconds: float = 0.1
    """First delay; doubles up to `retry_seconds_max`, reset by a successful stream."""
    retry_seconds_max: float = 2.0
    report_seconds: float = 0.1
    """Shortest interval of progress reports; everything else is reported immediately."""
    flush_seconds: float = 30.0
    """Time at the end for the gateway to acknowledge the last report. Longer than the Lease of a
    killed leader, so that a checkpoint saved at that moment is still reported."""

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> SidecarSettings:
        """Read FLYER_GATEWAY, FLYER_GATEWAY_CA, _NAME, _TOKEN_FILE and FLYER_RUN_FOLDER."""
        endpoint = environment.get("FLYER_GATEWAY", "")
        host, _, port = endpoint.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise SettingError(
                f"FLYER_GATEWAY is {endpoint!r}: it must be the gateway's HOST:PORT, such as "
                "flyer-gateway.fireflyer-system.svc:7443"
            )
        authority = environment.get("FLYER_GATEWAY_CA", "")
        if "BEGIN CERTIFICATE" not in authority:
            raise SettingError("FLYER_GATEWAY_CA must contain the operator's certificates as PEM")
        host = host.strip("[]")
        return cls(
            host=host,
            port=int(port),
            authority=authority,
            server_name=environment.get("FLYER_GATEWAY_NAME") or host,
            token_file=Path(environment.get("FLYER_GATEWAY_TOKEN_FILE") or TOKEN_FILE),
            run_folder=Path(environment.get("FLYER_RUN_FOLDER") or "/run/flyer"),
        )
