"""Starts a cluster."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from e2e.cluster import binaries, control_plane
from e2e.cluster.down import remove
from e2e.cluster.state import State, free_ports, locked

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Options", "programs", "up"]

PORTS = (
    "etcd",
    "etcd-peer",
    control_plane.API_SERVER,
    control_plane.CONTROLLER_MANAGER,
    control_plane.SCHEDULER,
)


@dataclass(frozen=True)
class Options:
    """What the cluster is made of."""

    light: bool = False  # the control plane alone
    controllers: bool = False  # in a light cluster: the controller manager too


def programs(options: Options) -> tuple[str, ...]:
    """The programs of our Go modules that such a cluster runs."""
    names = [control_plane.API_SERVER, "kubectl"]
    if options.controllers or not options.light:
        names.append(control_plane.CONTROLLER_MANAGER)
    return tuple(names)


def up(folder: Path, options: Options) -> State:
    """Starts a cluster in this folder, in place of any that is there; ready on return."""
    folder = folder.resolve()
    binaries.require(*programs(options))
    with locked(folder):
        remove(folder)
        started = time.monotonic()
        state = State(folder, light=options.light, ports=free_ports(PORTS))
        state.save()
        control_plane.start(
            state, controllers=options.controllers or not options.light, scheduler=False
        )
        print(f"cluster: control plane ready in {time.monotonic() - started:.1f} s", flush=True)
    return state
