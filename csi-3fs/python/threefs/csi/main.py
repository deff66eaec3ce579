"""`threefs-csi controller|node|holder|keeper`: the driver's processes, as `settings` lists them."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from threefs.cli.output import report
from threefs.csi.errors import CsiError
from threefs.csi.parameters import quantity_bytes
from threefs.csi.settings import DRIVER, ControllerSettings, NodeSettings
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
    return parser


def _inline_size_max(text: str) -> int:
    return 0 if text == "0" else quantity_bytes("--inline-size-max", text)


HOLDER_SOCKET = "/run/threefs-holder/holder.sock"


def _common(command: argparse.ArgumentParser, metrics_port: str) -> None:
    add = command.add_argument
    add("--endpoint", default=_env("CSI_ENDPOINT", "unix:///csi/csi.sock"))
    add("--clusters", type=Path, default=_env("THREEFS_CLUSTERS", "/etc/threefs/clusters"))
    add("--metrics-port", type=int, default=_env("THREEFS_METRICS_PORT", metrics_port))
    add("--workers", type=int, default=_env("THREEFS_WORKERS", "16"))
    add("--timeout", type=float, default=_env("THREEFS_TIMEOUT", "10"))
    add("--default-size", default=_env("THREEFS_DEFAULT_SIZE", "1Gi"))
    add("--driver-name", default=_env("THREEFS_CSI_DRIVER", DRIVER))
    add("--log-level", default=_env("THREEFS_LOG_LEVEL", "info"))


def _env(name: str, default: str) -> str:
    return os.environ.get(name, default)
