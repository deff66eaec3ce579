"""Settings of the agent: flags, each with an environment variable of the same name."""

from __future__ import annotations

import argparse
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flyer_node.errors import SettingError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Settings", "add_flags", "read_settings", "settings_from"]

PREFIX = "FLYER_NODE_"
SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"

_FLAGS: tuple[tuple[str, str, str], ...] = (
    ("name", "", "name of this node (default: the host name)"),
    ("plugin-folder", "/var/lib/kubelet/device-plugins", "the kubelet's device plugin folder"),
    ("sysfs-root", "/sys", "mount point of sysfs in the agent's container"),
    ("device-root", "/dev", "folder of device nodes on the host, as the container runtime sees it"),
    (
        "device-view",
        "",
        "folder of the host's device nodes in the agent's container (default: --device-root)",
    ),
    ("device-mode", "cdi", "cdi: return CDI device names; nodes: return character devices"),
    ("cdi-folder", "/var/run/cdi", "folder of the runtime for generated CDI specifications"),
    (
        "cdi-static-folder",
        "/etc/cdi",
        "additional folder with NVIDIA's CDI specification; read only",
    ),
    (
        "state-folder",
        "/var/lib/fire-flyer/node",
        "folder on the host's disk for state that survives restarts",
    ),
    ("kernel-log", "/dev/kmsg", "kernel log device; empty disables it"),
    ("policy", "", "Xid policy and timers (TOML; default: built in)"),
    ("slots", "64", "maximum containers per port and traffic class, 1 to 1000"),
    ("poll", "0.5", "interval of hardware polls in seconds, 0.1 to 60"),
    ("metrics-address", "0.0.0.0", "address of /metrics, /healthz and /readyz"),  # noqa: S104
    ("metrics-port", "9400", "port of /metrics; 0 selects a free port"),
    ("api-server", "", "URL of the API server (default: the cluster of the pod, if any)"),
    ("api-token-file", f"{SERVICE_ACCOUNT}/token", "file with the token for the API server"),
    ("api-ca-file", f"{SERVICE_ACCOUNT}/ca.crt", "CA certificates of the API server"),
    ("log-level", "info", "debug, info, warning or error"),
)


@dataclass(frozen=True, slots=True)
class Settings:
    """Validated settings."""

    name: str
    plugin_folder: Path
    sysfs_root: Path
    device_root: str
    device_view: Path
    device_mode: str
    cdi_folder: Path
    cdi_static_folder: Path
    state_folder: Path
    kernel_log: Path | None
    policy: Path | None
    slots: int
    poll_seconds: float
    metrics_address: str
    metrics_port: int
    api_server: str
    api_token_file: Path
    api_ca_file: Path
    log_level: str


def add_flags(parser: argparse.ArgumentParser, environment: Mapping[str, str]) -> None:
    """Adds all flags; the environment variables are their defaults."""
    for name, default, text in _FLAGS:
        variable = _variable(name)
        parser.add_argument(
            f"--{name}",
            default=environment.get(variable) or default,
            metavar="VALUE",
            help=f"{text} [{variable}{f', default {default}' if default else ''}]",
        )


def read_settings(values: argparse.Namespace, environment: Mapping[str, str]) -> Settings:
    """Validates the values; SettingError names the flag, the value and the allowed values."""
    arguments: dict[str, Any] = vars(values)

    def text(name: str) -> str:
        return str(arguments[name.replace("-", "_")])

    name = text("name") or socket.gethostname()
    return Settings(
        name=name,
        plugin_folder=_absolute("plugin-folder", text("plugin-folder")),
        sysfs_root=_absolute("sysfs-root", text("sysfs-root")),
        device_root=str(_absolute("device-root", text("device-root"))),
        device_view=_absolute("device-view", text("device-view") or text("device-root")),
        device_mode=_one_of("device-mode", text("device-mode"), ("cdi", "nodes")),
        cdi_folder=_absolute("cdi-folder", text("cdi-folder")),
        cdi_static_folder=_absolute("cdi-static-folder", text("cdi-static-folder")),
        state_folder=_absolute("state-folder", text("state-folder")),
        kernel_log=Path(text("kernel-log")) if text("kernel-log") else None,
        policy=Path(text("policy")) if text("policy") else None,
        slots=int(_number("slots", text("slots"), 1, 1000, whole=True)),
        poll_seconds=_number("poll", text("poll"), 0.1, 60),
        metrics_address=text("metrics-address"),
        metrics_port=int(_number("metrics-port", text("metrics-port"), 0, 65535, whole=True)),
        api_server=text("api-server") or _in_cluster_url(environment),
        api_token_file=Path(text("api-token-file")),
        api_ca_file=Path(text("api-ca-file")),
        log_level=_one_of("log-level", text("log-level"), ("debug", "info", "warning", "error")),
    )


def settings_from(
    arguments: Sequence[str], environment: Mapping[str, str] | None = None
) -> Settings:
    """Parses settings from a command line; for tests and for embedding."""
    variables = os.environ if environment is None else environment
    parser = argparse.ArgumentParser()
    add_flags(parser, variables)
    return read_settings(parser.parse_args(arguments), variables)


def _variable(flag: str) -> str:
    return PREFIX + flag.replace("-", "_").upper()


def _in_cluster_url(environment: Mapping[str, str]) -> str:
    host = environment.get("KUBERNETES_SERVICE_HOST", "")
    port = environment.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        return ""
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


def _absolute(name: str, value: str) -> Path:
    if not value.startswith("/") or "\0" in value:
        raise SettingError(f"--{name}", value, "an absolute path")
    return Path(value)


def _one_of(name: str, value: str, allowed: Sequence[str]) -> str:
    if value not in allowed:
        raise SettingError(f"--{name}", value, " or ".join(allowed))
    return value


def _number(name: str, value: str, low: float, high: float, *, whole: bool = False) -> float:
    expected = f"{'an integer' if whole else 'a number'} from {low:g} to {high:g}"
    try:
        number: float = int(value) if whole else float(value)
    except ValueError:
        raise SettingError(f"--{name}", value, expected) from None
    if not low <= number <= high:
        raise SettingError(f"--{name}", value, expected)
    return number
