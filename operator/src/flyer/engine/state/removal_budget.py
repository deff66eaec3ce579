"""Removal budget: how many nodes of a class may be out at once without hard evidence.

A node whose health cannot be observed (its driver hangs, its agent is silent) may be defective, or
the observer is: a driver update or a broken policy file makes whole classes unobservable at once.
So such nodes are taken out up to a budget for each node class. Beyond it they stay usable, and the
budget names them. Evidence of a defect, a lost node and a drain by a person always take a node out
and spend nothing of the budget.
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
    """One node class now."""

    node_class: str
    budget: int
    out: tuple[str, ...] = ()  # without hard evidence: what is spent
    held: tuple[str, ...] = ()  # usable, because the budget is spent
    defective: tuple[str, ...] = ()  # lost, or with a hardware fault

    @property
    def mass_failure(self) -> bool:
        """Whether more nodes have hard evidence than the budget would take out without."""
        return len(self.defective) > self.budget


def apply_removal_budget(
    nodes: Mapping[str, NodeState], zones: Zones, now: float
) -> dict[str, NodeState]:
    """The nodes with `out` set for those that the budget takes out: the first to be unproven.

    A node that is out stays out until it is observed well or evidence replaces the suspicion, so
    that no node is replaced by another one while the budget lasts.
    """
    suspects: dict[str, list[NodeState]] = {}
    sizes: Counter[str] = Counter()
    found = dict(nodes)
    for name, state in nodes.items():
        if not state.removed:
            sizes[state.node.node_class] += 1
        if _is_unproven(state):
            since = state.unproven_at if state.unproven_at is not None else now
            found[name] = replace(state, unproven_at=since)
            suspects.setdefault(state.node.node_class, []).append(found[name])
        elif state.out or state.unproven_at is not None:
            found[name] = replace(state, out="", unproven_at=None)
    for node_class, states in suspects.items():
        budget = zones.removal_budget(sizes[node_class])
        states.sort(key=lambda one: (not one.out, one.unproven_at, natural_order(one.node.name)))
        for index, state in enumerate(states):
            out = state.node.unproven if index < budget else ""
            if out != state.out:
                found[state.node.name] = replace(state, out=out)
    return found


def removal_budgets(state: EngineState) -> list[RemovalBudget]:
    """Budget, spent and held nodes of each node class."""
    classes: dict[str, list[NodeState]] = {}
    for node in state.nodes.values():
        if not node.removed:
            classes.setdefault(node.node.node_class, []).append(node)
    return [
        RemovalBudget(
            name,
            state.zones.removal_budget(len(nodes)),
            _names(one for one in nodes if one.out),
            _names(one for one in nodes if _is_unproven(one) and not one.out),
            _names(one for one in nodes if one.lost or one.node.fault),
        )
        for name, nodes in sorted(classes.items())
    ]


def _is_unproven(state: NodeState) -> bool:
    """Whether the node would be usable but for the suspicion."""
    hard = state.removed or state.lost or state.node.fault or not state.node.ready
    return bool(state.node.unproven) and not hard


def _names(nodes: Iterable[NodeState]) -> tuple[str, ...]:
    return tuple(sorted((node.node.name for node in nodes), key=natural_order))


__all__ = ["RemovalBudget", "apply_removal_budget", "removal_budgets"]
