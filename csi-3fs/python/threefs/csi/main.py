"""`threefs-csi controller|node|holder|keeper`: the driver's processes, as `settings` lists them."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from threefs.cli.output import report
from threefs.csi.errors import CsiError, InvalidArgument
from threefs.csi.parameters import quantity_bytes
from threefs.csi.settings import DRIVER, ISSUER, ControllerSettings, NodeSettings
from threefs.errors import ThreeFSError

__all__ = ["holder_command", "main"]

PROGRAM = (
    "import sys; sys.path.append(sys.argv[1]); from holder.{module} import main; "
    "sys.exit(main(sys.argv[2:]))"
)


def holder_command(arguments: list[str], module: str = "server") -> list[str]:
    """The holder, or its keeper: loads the standard library and itself, nothing else."""
    # -I: what the environment says of Python does not matter. -S: nor does what is installed.
    folder = str(Path(__file__).parent)
    return [sys.executable, "-I", "-S", "-c", PROGRAM.format(module=module), folder, *arguments]


def main() -> None:
    """Entry point: an expected failure is one line and an exit status."""
    if sys.argv[1:2] == ["holder"]:
        command = holder_command(sys.argv[2:])
        os.execv(command[0], command)  # noqa: S606
    if sys.argv[1:2] == ["keeper"]:
        command = holder_command(sys.argv[2:], "keeper")
        os.execv(command[0], command)  # noqa: S606
    options = _parser().parse_args()
    try:
        _run(options)
    except CsiError as error:
        sys.exit(f"threefs-csi: error: {error}")
    except (ThreeFSError, OSError) as error:
        sys.exit(report(error))


def _run(options: argparse.Namespace) -> None:
    from threefs.csi.logs import configure
    from threefs.csi.server import run_controller, run_node

    configure(options.log_level)
    if options.what == "controller":
        run_controller(
            ControllerSettings(
                endpoint=options.endpoint,
                clusters=options.clusters,
                metrics_port=options.metrics_port,
                workers=options.workers,
                timeout_seconds=options.timeout,
                default_size_bytes=quantity_bytes("--default-size", options.default_size),
                ticket_seconds=_ticket_seconds(options.ticket_seconds),
                issuer_listen=options.issuer_listen,
                issuer_tls=options.issuer_tls,
                namespace=options.namespace,
                node_account=options.node_account,
                log_level=options.log_level,
                driver_name=options.driver_name,
            )
        )
        return
    run_node(
        NodeSettings(
            node_id=options.node_id,
            endpoint=options.endpoint,
            clusters=options.clusters,
            holder=options.holder,
            metrics_port=options.metrics_port,
            workers=options.workers,
            timeout_seconds=options.timeout,
            default_size_bytes=quantity_bytes("--default-size", options.default_size),
            inline_size_max_bytes=_inline_size_max(options.inline_size_max),
            ticket_seconds=_ticket_seconds(options.ticket_seconds),
            issuer=options.issuer,
            issuer_ca=options.issuer_ca,
            issuer_token=options.issuer_token,
            log_level=options.log_level,
            driver_name=options.driver_name,
        )
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="threefs-csi", description="The CSI driver 3fs.csi.fireflyer.dev."
    )
    commands = parser.add_subparsers(dest="what", required=True)
    controller = commands.add_parser("controller", help="make and remove volumes; one or more")
    node = commands.add_parser("node", help="mount volumes; one a node, beside the holder")
    commands.add_parser("holder", help="keep mounts alive; one a node, privileged")
    commands.add_parser("keeper", help="keep the holder's mounts if it is killed; one a node")
    for command, port in ((controller, "9180"), (node, "9181")):
        _common(command, port)
    node.add_argument("--holder", type=Path, default=_env("THREEFS_HOLDER", HOLDER_SOCKET))
    node.add_argument("--node-id", default=_env("NODE_NAME", os.uname().nodename))
    node.add_argument("--inline-size-max", default=_env("THREEFS_INLINE_SIZE_MAX", "0"))
    node.add_argument("--issuer", default=_env("THREEFS_ISSUER", ""))
    ca, token = str(ISSUER / "ca.crt"), str(ISSUER / "token")
    node.add_argument("--issuer-ca", type=Path, default=_env("THREEFS_ISSUER_CA", ca))
    node.add_argument("--issuer-token", type=Path, default=_env("THREEFS_ISSUER_TOKEN", token))
    add = controller.add_argument
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


def _inline_size_max(text: str) -> int:
    return 0 if text == "0" else quantity_bytes("--inline-size-max", text)


TICKET_SECONDS_MIN, TICKET_SECONDS_MAX = 600.0, 7 * 86_400.0
"""Tickets are looked at every half minute, and renewed at half of their time."""
HOLDER_SOCKET = "/run/threefs-holder/holder.sock"


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
    add("--log-level", default=_env("THREEFS_LOG_LEVEL", "info"))


def _env(name: str, default: str) -> str:
    return os.environ.get(name, default)
