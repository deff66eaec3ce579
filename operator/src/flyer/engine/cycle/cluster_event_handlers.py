"""Handlers of events about nodes, zones, quotas and teams."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flyer.engine import events
from flyer.engine.state.nodes import NodeState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from flyer.engine.state.cycle_state import CycleState


def handle_node_observed(event: events.NodeObserved, cycle: CycleState) -> None:
    """Record the node. A ready node does not count as lost."""
    node = event.node
    node_state = cycle.nodes.get(node.name) or NodeState(node)
    loss = "" if node.ready else node_state.lost
    cycle.nodes[node.name] = _with_fault(
        cycle, replace(node_state, node=node, lost=loss, removed=False)
    )


def _with_fault(cycle: CycleState, state: NodeState) -> NodeState:
    """The state with its latest hardware fault, which is remembered after it is over."""
    before = cycle.nodes.get(state.node.name)
    if state.node.fault:
        return replace(state, fault=state.node.fault, fault_at=cycle.now)
    if before is not None and before.node.fault:
        return replace(state, fault_at=cycle.now)
    return state


def handle_node_removed(event: events.NodeRemoved, cycle: CycleState) -> None:
    """Record that the node gets no more work, and whether its pods are lost."""
    node_state = cycle.nodes.get(event.node)
    if node_state is None:
        return
    reason = (
        "the Node object was deleted"
        if event.lost
        else "the node has lost its labels for the scheduler"
    )
    loss = node_state.lost or ("NodeDeleted" if event.lost else "")
    node = replace(node_state.node, ready=False, reason=reason)
    cycle.nodes[event.node] = replace(node_state, node=node, lost=loss, removed=True)


def handle_node_lost(event: events.NodeLost, cycle: CycleState) -> None:
    """Record the loss and its cause."""
    node_state = cycle.nodes.get(event.node)
    if node_state is not None and not node_state.lost:
        cause = f"{event.cause} ({event.evidence})" if event.evidence else event.cause
        node = replace(node_state.node, ready=False, reason=cause)
        cycle.nodes[event.node] = replace(node_state, node=node, lost=cause or "lost")


def handle_zones_observed(event: events.ZonesObserved, cycle: CycleState) -> None:
    """Record the topology."""
    cycle.zones = event.zones


def handle_quota_observed(event: events.QuotaObserved, cycle: CycleState) -> None:
    """Record the quota."""
    cycle.quotas[event.quota.name] = event.quota


def handle_quota_removed(event: events.QuotaRemoved, cycle: CycleState) -> None:
    """Remove the quota."""
    cycle.quotas.pop(event.quota, None)


def handle_team_observed(event: events.TeamObserved, cycle: CycleState) -> None:
    """Record the team of the namespace."""
    if event.team:
        cycle.teams[event.namespace] = event.team
    else:
        cycle.teams.pop(event.namespace, None)


CLUSTER_HANDLERS: Mapping[type, Callable[[Any, CycleState], None]] = {
    events.NodeObserved: handle_node_observed,
    events.NodeRemoved: handle_node_removed,
    events.NodeLost: handle_node_lost,
    events.ZonesObserved: handle_zones_observed,
    events.QuotaObserved: handle_quota_observed,
    events.QuotaRemoved: handle_quota_removed,
    events.TeamObserved: handle_team_observed,
}

__all__ = ["CLUSTER_HANDLERS"]
