"""`threefs-csi controller|node|mount-manager|fd-store`: command line of the driver's processes."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from threefs.csi.errors import CsiError, InvalidArgument
from threefs.csi.mount_manager.launch import mount_manager_command
from threefs.csi.settings import DRIVER, ISSUER, ControllerSettings, NodeSettings
from threefs.csi.volumes.parameters import quantity_bytes
from threefs.errors import ThreeFSError
from threefs.exit_status import report_error

__all__ = ["main"]


def main() -> None:
    """Run a process; an expected failure is one line and an exit status."""
    if sys.argv[1:2] == ["mount-manager"]:
        command = mount_manager_command(sys.argv[2:])
        os.execv(command[0], command)  # noqa: S606
    if sys.argv[1:2] == ["fd-store"]:
        command = mount_manager_command(sys.argv[2:], "fd_store")
        os.execv(command[0], command)  # noqa: S606
    args = _parser().parse_args()
    try:
        _run(args)
    except CsiError as error:
        sys.exit(f"threefs-csi: error: {error}")
    except (ThreeFSError, OSError) as error:
        sys.exit(report_error(error))


def _run(args: argparse.Namespace) -> None:
    from threefs.csi.logs import configure
    from threefs.csi.server import run_controller, run_node

    configure(args.log_level)
    common: dict[str, Any] = {
        "endpoint": args.endpoint,
        "clusters": args.clusters,
        "metrics_port": args.metrics_port,
        "workers": args.workers,
        "timeout_seconds": args.timeout,
        "default_size_bytes": quantity_bytes("--default-size", args.default_size),
        "ticket_seconds": _ticket_seconds(args.ticket_seconds),
        "log_level": args.log_level,
        "driver_name": args.driver_name,
        "topology": args.topology,
    }
    if args.process == "controller":
        run_controller(
            ControllerSettings(
                issuer_listen=args.issuer_listen,
                issuer_tls=args.issuer_tls,
                namespace=args.namespace,
                node_account=args.node_account,
                copy_workers=_copy_workers(args.copy_workers),
                **common,
            )
        )
        return
    run_node(
        NodeSettings(
            node_id=args.node_id,
            mount_manager=args.mount_manager,
            inline_size_max_bytes=_inline_size_max(args.inline_size_max),
            issuer=args.issuer,
            issuer_ca=args.issuer_ca,
            issuer_token=args.issuer_token,
            **common,
        )
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="threefs-csi", description="The CSI driver 3fs.csi.fireflyer.dev."
    )
    commands = parser.add_subparsers(dest="process", required=True)
    controller = commands.add_parser(
        "controller", help="create and remove volumes; one or more replicas"
    )
    node = commands.add_parser(
        "node", help="mount volumes; one per node, next to the mount manager"
    )
    commands.add_parser("mount-manager", help="manage FUSE mounts; one per node, privileged")
    commands.add_parser("fd-store", help="keep copies of the mounts' descriptors; one per node")
    for command, port in ((controller, "9180"), (node, "9181")):
        _common(command, port)
    node.add_argument(
        "--mount-manager", type=Path, default=_env("THREEFS_MOUNT_MANAGER", MOUNT_MANAGER_SOCKET)
    )
    node.add_argument("--node-id", default=_env("NODE_NAME", os.uname().nodename))
    node.add_argument("--inline-size-max", default=_env("THREEFS_INLINE_SIZE_MAX", "0"))
    node.add_argument("--issuer", default=_env("THREEFS_ISSUER", ""))
    ca, token = str(ISSUER / "ca.crt"), str(ISSUER / "token")
    node.add_argument("--issuer-ca", type=Path, default=_env("THREEFS_ISSUER_CA", ca))
    node.add_argument("--issuer-token", type=Path, default=_env("THREEFS_ISSUER_TOKEN", token))
    add = controller.add_argument
    add("--copy-workers", type=int, default=_env("THREEFS_COPY_WORKERS", "4"))
    add("--issuer-listen", default=_env("THREEFS_ISSUER_LISTEN", ""))
    add("--issuer-tls", type=Path, default=_env("THREEFS_ISSUER_TLS", str(ISSUER)))
    add("--namespace", default=_env("POD_NAMESPACE", "fireflyer-system"))
    add("--node-account", default=_env("THREEFS_NODE_ACCOUNT", "threefs-csi-node"))
    return parser


def _ticket_seconds(seconds: float) -> float:
    if not TICKET_SECONDS_MIN <= seconds <= TICKET_SECONDS_MAX:
        raise InvalidArgument(
            f"--ticket-seconds is {seconds:g}; it must be {TICKET_SECONDS_MIN:g} to "
            f"{TICKET_SECONDS_MAX:g}"
        )
    return seconds


def _copy_workers(workers: int) -> int:
    if not 1 <= workers <= COPY_WORKERS_MAX:
        raise InvalidArgument(
            f"--copy-workers is {workers}; it must be 1 to {COPY_WORKERS_MAX}, and each needs "
            "16 MiB of memory"
        )
    return workers


def _inline_size_max(text: str) -> int:
    return 0 if text == "0" else quantity_bytes("--inline-size-max", text)


TICKET_SECONDS_MIN, TICKET_SECONDS_MAX = 600.0, 7 * 86_400.0
"""Tickets are checked every 30 s, and renewed after half of their lifetime."""
COPY_WORKERS_MAX = 64
MOUNT_MANAGER_SOCKET = "/run/threefs-mount-manager/mount-manager.sock"


def _common(command: argparse.ArgumentParser, metrics_port: str) -> None:
    add = command.add_argument
    add("--endpoint", default=_env("CSI_ENDPOINT", "unix:///csi/csi.sock"))
    add("--clusters", type=Path, default=_env("THREEFS_CLUSTERS", "/etc/threefs/clusters"))
    add("--metrics-port", type=int, default=_env("THREEFS_METRICS_PORT", metrics_port))
    add("--workers", type=int, default=_env("THREEFS_WORKERS", "16"))
    add("--timeout", type=float, default=_env("THREEFS_TIMEOUT", "10"))
    add("--default-size", default=_env("THREEFS_DEFAULT_SIZE", "1Gi"))
    add("--ticket-seconds", type=float, default=_env("THREEFS_TICKET_SECONDS", "7200"))
    add("--driver-name", default=_env("THREEFS_CSI_DRIVER", DRIVER))
    add("--topology", default=_env("THREEFS_TOPOLOGY", ""))
    add("--log-level", default=_env("THREEFS_LOG_LEVEL", "info"))


def _env(name: str, default: str) -> str:
    return os.environ.get(name, default)
