"""The operator's settings: flags, and environment variables of the same names (FLYER_…)."""

from __future__ import annotations

import argparse
import os
import socket
from dataclasses import dataclass, fields
from typing import Any, Final

__all__ = ["Settings", "parse_settings"]

_PREFIX: Final = "FLYER_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Times in seconds. Each field is a flag: `--lease-seconds`, FLYER_LEASE_SECONDS."""

    namespace: str = "fireflyer-system"
    """Where the operator itself lives: its Lease, its Secret, its pod."""
    pod_name: str = ""
    """Our own pod, which is marked as the leader's; empty: nothing is marked."""
    pod_ip: str = ""
    kubeconfig: str = ""
    """Empty: the service account in a pod, else $KUBECONFIG."""
    context: str = ""
    log_level: str = "info"
    identity: str = ""
    """Who holds the Lease; empty: the pod's or the machine's name, made unique."""

    gateway_host: str = "0.0.0.0"  # noqa: S104 - pods of all nodes connect
    gateway_port: int = 7443
    gateway_endpoint: str = ""
    """`host:port` told to pods; empty: the Service flyer-gateway of our namespace."""
    metrics_port: int = 8080
    injection: bool = False
    """Serve the webhook that adds collectives to foreign training pods."""
    injection_port: int = 9443
    handlers: bool = True
    """Run the kopf handlers of the small kinds (quotas, topology) while leading."""

    sidecar_image: str = "fireflyer/controller"
    collectives_image: str = "fireflyer/collectives"
    image_pull_policy: str = "IfNotPresent"
    image_pull_secrets: str = ""
    """Names, separated by commas."""
    job_priority_class: str = ""
    """Kubernetes priority class of pods whose template names none."""

    lease_seconds: int = 3
    """What a leader's death costs; a renewal that takes four fifths of it is too late."""
    start_deadline_seconds: float = 600.0
    stop_deadline_seconds: float = 120.0
    failure_window_seconds: float = 5.0
    same_split_seconds: float = 60.0
    restart_cost_seconds: float = 60.0
    progress_commit_seconds: float = 15.0
    """Progress of a running job is written into its status at most so often."""
    api_concurrency: int = 32
    """Calls to the API server at once."""

    @property
    def endpoint(self) -> str:
        """Where pods reach the gateway."""
        return self.gateway_endpoint or f"flyer-gateway.{self.namespace}.svc:{self.gateway_port}"

    @property
    def names(self) -> tuple[str, ...]:
        """What stands in our certificates."""
        services = [
            f"{service}.{self.namespace}.svc{suffix}"
            for service in ("flyer-gateway", "flyer-webhook")
            for suffix in ("", ".cluster.local")
        ]
        return tuple(dict.fromkeys([*services, self.endpoint.rpartition(":")[0].strip("[]")]))

    @property
    def holder(self) -> str:
        """Our name in the Lease, used by no other process."""
        return self.identity or f"{self.pod_name or socket.gethostname()}-{os.urandom(4).hex()}"


def parse_settings(
    arguments: list[str] | None = None, env: dict[str, str] | None = None
) -> Settings:
    """From the command line; what it leaves out from the environment."""
    environment = dict(os.environ) if env is None else env
    parser = argparse.ArgumentParser(
        prog="flyer-operator",
        description="Schedules FlyerJobs on a Kubernetes cluster. Each flag can also be given as "
        "an environment variable: --lease-seconds as FLYER_LEASE_SECONDS.",
    )
    for one in fields(Settings):
        flag = "--" + one.name.replace("_", "-")
        variable = _PREFIX + one.name.upper()
        text = environment.get(variable)
        default = one.default
        if text is not None:
            try:
                default = _reader(one.default)(text)
            except ValueError as error:
                parser.error(f"{variable}={text!r}: {error}")
        kind: dict[str, Any] = {"type": _reader(one.default), "default": default}
        if isinstance(one.default, bool):
            kind["metavar"] = "true|false"
        parser.add_argument(flag, dest=one.name, help=f"default {one.default!r}", **kind)
    found = Settings(**vars(parser.parse_args(arguments)))
    if found.lease_seconds < 2:
        parser.error(f"--lease-seconds {found.lease_seconds}: needs 2 or more, to renew within it")
    if found.log_level.upper() not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        parser.error(f"--log-level {found.log_level}: is debug, info, warning or error")
    return found


def _reader(default: Any) -> Any:
    if isinstance(default, bool):
        return _truth
    return type(default)


def _truth(text: str) -> bool:
    if text.lower() in ("true", "1", "yes"):
        return True
    if text.lower() in ("false", "0", "no", ""):
        return False
    raise ValueError(f"{text!r} is neither true nor false")
