"""How nodes that are out come back, in a job's status: the command that a person gives.

The engine knows that a node is out and why; which command brings it back depends on how the
cluster is run, so the driver of a real cluster adds it before the status is stored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flyer.kube.services.views import CORDONED

if TYPE_CHECKING:
    from collections.abc import Callable

    from flyer.api import FlyerJobStatus, NodeHealth, Unblock
    from flyer.engine import NodeState

__all__ = ["way_back", "with_ways_back"]


def with_ways_back(
    status: FlyerJobStatus,
    node_of: Callable[[str], NodeState | None],
    health_of: Callable[[str], NodeHealth | None],
) -> FlyerJobStatus:
    """The status with a command for each node that would let the job start."""
    pending = status.pending
    if pending is None or not any(one.node for one in pending.unblock):
        return status
    found = tuple(_filled(one, node_of(one.node), health_of(one.node)) for one in pending.unblock)
    return status.replace(pending=pending.replace(unblock=found))


def _filled(one: Unblock, state: NodeState | None, health: NodeHealth | None) -> Unblock:
    if not one.node or state is None:
        return one
    command, effect = way_back(state, health)
    return one.replace(command=command, effect=effect)


def way_back(state: NodeState, health: NodeHealth | None) -> tuple[str, str]:
    """What a person does about a node that gets no new work, and what that does."""
    name = state.node.name
    why = state.lost or state.node.reason or state.out or state.node.unproven
    if why == CORDONED:
        return f"kubectl uncordon {name}", f"gives {name} new work again"
    if health is None or health.unfit != why:
        return f"kubectl describe node {name}", f"tells more of {name}: {why}"
    if health.spec.drain is None:
        return f"kubectl describe nodehealth {name}", f"tells more of {name}: {why}"
    patch = '{"spec":{"drain":null}}'
    return (
        f"kubectl patch nodehealth {name} --type=merge -p '{patch}'",
        f"gives {name} new work again: {why}",
    )
