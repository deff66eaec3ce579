"""Command line `python -m testcluster`: start, inspect and remove test clusters."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from charts import helm
from images.commands import ImageError
from images.contents import IMAGES
from programs import binaries
from testcluster.down import down
from testcluster.errors import ClusterError
from testcluster.handle import Cluster
from testcluster.prune import prune
from testcluster.state import DEFAULT, State
from testcluster.up import Options, programs, up


def main() -> int:
    """Runs one command; returns 0 on success."""
    arguments = _parser().parse_args()
    try:
        return int(arguments.run(arguments))
    except (ClusterError, ImageError, binaries.BinaryError) as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m testcluster", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    folder = argparse.ArgumentParser(add_help=False)
    folder.add_argument("--state", type=Path, default=DEFAULT, help="the cluster's folder")

    command = commands.add_parser("up", parents=[folder], help="start a cluster, ready on return")
    command.add_argument("--light", action="store_true", help="the control plane alone, no nodes")
    command.add_argument(
        "--controllers", action="store_true", help="with --light: the controller manager too"
    )
    command.add_argument("--kwok", type=int, default=0, metavar="N", help="N fake nodes on top")
    command.set_defaults(run=_up)

    command = commands.add_parser("down", parents=[folder], help="remove it without a trace")
    command.set_defaults(run=_down)

    command = commands.add_parser(
        "env", parents=[folder], help="shell lines: KUBECONFIG, and PATH with kubectl and Helm"
    )
    command.set_defaults(run=_env)

    command = commands.add_parser("load", parents=[folder], help="load images into every node")
    command.add_argument("image", nargs="*", help="e.g. controller; default: all")
    command.set_defaults(run=_load)

    command = commands.add_parser("build", help="build programs (all of them by default)")
    command.add_argument("program", nargs="*", help="e.g. kubelet; default: what `up` needs")
    command.add_argument("--all", action="store_true", help="every program of every module")
    command.add_argument("--quiet", action="store_true", help="do not list where they are")
    command.set_defaults(run=_build)

    command = commands.add_parser("prune", help="remove old builds of other versions, show sizes")
    command.add_argument(
        "--days",
        type=float,
        default=14,
        help="keep builds used within this number of days (%(default)g)",
    )
    command.add_argument("--dry-run", action="store_true", help="only show what would go")
    command.add_argument("--quiet", action="store_true", help="say nothing when nothing is old")
    command.set_defaults(run=_prune)
    return parser


def _up(arguments: argparse.Namespace) -> int:
    state = up(
        arguments.state,
        Options(
            light=arguments.light,
            controllers=arguments.controllers or arguments.kwok > 0,
            kwok=arguments.kwok,
        ),
    )
    print(f"KUBECONFIG={state.kubeconfig}")
    if not state.light:
        print(_next_commands(arguments.state))
    return 0


def _next_commands(folder: Path) -> str:
    option = "" if folder == DEFAULT else f" --state {folder}"
    program = f"{Path(sys.executable)} -m testcluster".replace(f"{Path.cwd()}/", "")
    return f"""
Next:
  eval "$({program} env{option})"       # kubectl and Helm
  {program} load{option}                # build the images, load them into every node
  helm install fire-flyer charts/fire-flyer --namespace fireflyer-system --create-namespace \\
    --values testcluster/values.yaml --wait"""


def _down(arguments: argparse.Namespace) -> int:
    down(arguments.state)
    return 0


def _env(arguments: argparse.Namespace) -> int:
    state = State.load(arguments.state)
    programs = (binaries.require("kubectl")["kubectl"], Path(helm.find()))
    print(f"export KUBECONFIG={state.kubeconfig}")
    print(f"export PATH={os.pathsep.join(str(path.parent) for path in programs)}{os.pathsep}$PATH")
    return 0


def _load(arguments: argparse.Namespace) -> int:
    names = arguments.image or [image.name for image in IMAGES]
    for number, name in enumerate(names, 1):
        print(f"cluster: loading image {number} of {len(names)}: {name}", flush=True)
        Cluster(State.load(arguments.state)).load_images(name)
    return 0


def _build(arguments: argparse.Namespace) -> int:
    everything = tuple(name for module in binaries.MODULES for name in module.programs)
    names = everything if arguments.all else tuple(arguments.program) or programs(Options())
    for name, path in binaries.require(*names).items():
        if not arguments.quiet:
            print(f"{name}={path}")
    return 0


def _prune(arguments: argparse.Namespace) -> int:
    builds = prune(arguments.days, time.time(), dry_run=arguments.dry_run)
    total = sum(build.bytes for build in builds)
    for build in builds:
        print(f"{build.bytes / 2**20:8.1f} MiB  {build.path}")
    if builds or not arguments.quiet:
        verb = "would be" if arguments.dry_run else "were"
        print(f"cluster: {len(builds)} old builds {verb} removed, {total / 2**20:.1f} MiB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
