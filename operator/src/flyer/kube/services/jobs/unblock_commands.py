"""Unblock commands: the kubectl commands that return unavailable nodes, for a job's status.

The engine knows that a node is unavailable and why. The command that returns it depends on the
driver, so the Kubernetes driver adds it before the status is stored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flyer.kube.views import CORDONED

if TYPE_CHECKING:
    from collections.abc import Callable

    from flyer.api import FlyerJobStatus, NodeHealth, Unblock
    from flyer.engine import NodeState

__all__ = ["unblock_command", "with_unblock_commands"]


def with_unblock_commands(
    status: FlyerJobStatus,
    node_of: Callable[[str], NodeState | None],
    health_of: Callable[[str], NodeHealth | None],
) -> FlyerJobStatus:
    """The status with a command for each node that would let the job start."""
    pending = status.pending
    if pending is None or not any(unblock.node for unblock in pending.unblock):
        return status
    unblock = tuple(
        _with_command(each, node_of(each.node), health_of(each.node)) for each in pending.unblock
    )
    return status.replace(pending=pending.replace(unblock=unblock))


def _with_command(unblock: Unblock, state: NodeState | None, health: NodeHealth | None) -> Unblock:
    if not unblock.node or state is None:
        return unblock
    command, effect = unblock_command(state, health)
    return unblock.replace(command=command, effect=effect)


def unblock_command(state: NodeState, health: NodeHealth | None) -> tuple[str, str]:
    """The command for a node that gets no new work, and its effect."""
    name = state.node.name
    why = state.lost or state.node.reason or state.out or state.node.unproven
    if why == CORDONED:
        return f"kubectl uncordon {name}", f"makes {name} schedulable again"
    if health is None or health.unfit != why:
        return f"kubectl describe node {name}", f"shows details of {name}: {why}"
    if health.spec.drain is None:
        return f"kubectl describe nodehealth {name}", f"shows details of {name}: {why}"
    patch = '{"spec":{"drain":null}}'
    return (
        f"kubectl patch nodehealth {name} --type=merge -p '{patch}'",
        f"makes {name} schedulable again: {why}",
    )
