"""Removal budget: the number of nodes of a class that may be out without a known fault.

If the health of a node is unknown (its driver hangs, its agent reports nothing), either the node or
the observation is defective: a driver update or an invalid policy file makes the health of whole
classes unknown at once. Such nodes are therefore excluded only up to a budget for each node class.
Further ones stay usable and are reported as held. Nodes with a known fault, lost nodes and drained
nodes are always excluded and do not count.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from flyer.engine.state.nodes import NodeState, Zones, natural_order

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from flyer.engine.state.engine_state import EngineState


@dataclass(frozen=True, slots=True)
class RemovalBudget:
    """Removal budget of one node class and its use."""

    node_class: str
    budget: int
    out: tuple[str, ...] = ()  # without a known fault: the budget that is used
    held: tuple[str, ...] = ()  # usable, because the budget is used up
    defective: tuple[str, ...] = ()  # lost, or with a hardware fault


def apply_removal_budget(
    nodes: Mapping[str, NodeState], zones: Zones, now: float
) -> dict[str, NodeState]:
    """The nodes, with `out` set for the first ones whose health is unknown, up to the budget.

    An excluded node stays excluded until its health is known, so that no other node takes its
    place in the budget.
    """
    suspects: dict[str, list[NodeState]] = {}
    sizes: Counter[str] = Counter()
    states_after = dict(nodes)
    for name, state in nodes.items():
        if not state.removed:
            sizes[state.node.node_class] += 1
        if _is_unproven(state):
            since = state.unproven_at if state.unproven_at is not None else now
            states_after[name] = replace(state, unproven_at=since)
            suspects.setdefault(state.node.node_class, []).append(states_after[name])
        elif state.out or state.unproven_at is not None:
            states_after[name] = replace(state, out="", unproven_at=None)
    for node_class, states in suspects.items():
        budget = zones.removal_budget(sizes[node_class])
        states.sort(
            key=lambda state: (not state.out, state.unproven_at, natural_order(state.node.name))
        )
        for index, state in enumerate(states):
            out = state.node.unproven if index < budget else ""
            if out != state.out:
                states_after[state.node.name] = replace(state, out=out)
    return states_after


def removal_budgets(state: EngineState) -> list[RemovalBudget]:
    """The removal budget of each node class and its use."""
    classes: dict[str, list[NodeState]] = {}
    for node in state.nodes.values():
        if not node.removed:
            classes.setdefault(node.node.node_class, []).append(node)
    return [
        RemovalBudget(
            name,
            state.zones.removal_budget(len(nodes)),
            _names(entry for entry in nodes if entry.out),
            _names(entry for entry in nodes if _is_unproven(entry) and not entry.out),
            _names(entry for entry in nodes if entry.lost or entry.node.fault),
        )
        for name, nodes in sorted(classes.items())
    ]


def _is_unproven(state: NodeState) -> bool:
    """Whether only the unknown health makes the node unusable."""
    hard = state.removed or state.lost or state.node.fault or not state.node.ready
    return bool(state.node.unproven) and not hard


def _names(nodes: Iterable[NodeState]) -> tuple[str, ...]:
    return tuple(sorted((node.node.name for node in nodes), key=natural_order))


__all__ = ["RemovalBudget", "apply_removal_budget", "removal_budgets"]
