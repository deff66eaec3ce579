"""The view of one node of the local cluster: its state, its pod and its processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flyer.views import NodeView

if TYPE_CHECKING:
    from flyer.engine import NodeState
    from flyer.local.pods import Pod

__all__ = ["node_view"]


def node_view(
    state: NodeState,
    pod: Pod | None,
    ranks_per_node: int | None,
    holder: str,
    holder_phase: str,
    returns_at: float | None,
    *,
    with_pids: bool,
) -> NodeView:
    """One node: free, busy, or lost."""
    node = state.node
    if state.lost or not node.ready:
        phase, reason = "Lost", state.lost or node.reason
    elif pod is not None:
        phase, reason = "Busy", holder_phase
    elif holder:
        phase, reason = "Reserved", holder_phase
    else:
        phase, reason = "Ready", ""
    first = pod.spec.first_rank if pod else None
    pids = pod.pids() if pod and with_pids else []
    return NodeView(
        name=node.name,
        zone=node.zone,
        leaf=node.leaf,
        node_class=node.node_class,
        slots=node.slots,
        state=phase,
        reason=reason,
        job=pod.job if pod else holder,
        attempt=pod.attempt if pod else None,
        first_rank=first,
        last_rank=first + (ranks_per_node or 1) - 1 if first is not None else None,
        supervisor_pid=pod.process.pid if pod else None,
        pids=pids,
        returns_at=returns_at,
    )
