"""Removal budget: it limits nodes of unknown health, not faults and drains."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from flyer.api import FlyerTopology, NodeHealth, Phase
from flyer.engine import (
    Node,
    NodeLost,
    NodeObserved,
    Zones,
    ZonesObserved,
    explain,
    rebuild,
    removal_budgets,
)
from hypothesis import given
from hypothesis import strategies as st

if TYPE_CHECKING:
    from collections.abc import Callable

WHY = "Unknown (DriverHangs)"


def _nodes(count: int, node_class: str = "a100") -> list[Node]:
    return [Node(f"n{index}", "A", node_class=node_class, slots=8) for index in range(count)]


def _unproven(harness: Any, *names: str) -> None:
    by_name = {node.name: node for node in harness.nodes}
    harness.step(*(NodeObserved(replace(by_name[name], unproven=WHY)) for name in names))


def _usable(harness: Any) -> set[str]:
    return {name for name, state in harness.state.nodes.items() if state.eligible}


def test_a_driver_that_hangs_on_all_nodes_removes_only_the_budget(new_harness: Callable) -> None:
    harness = new_harness(_nodes(30))
    _unproven(harness, *(f"n{index}" for index in range(30)))
    assert len(_usable(harness)) == 27
    (budget,) = removal_budgets(harness.state)
    assert (budget.budget, budget.out, len(budget.held)) == (3, ("n0", "n1", "n2"), 27)
    harness.submit("job", 27)
    assert harness.status("job").phase is Phase.STARTING


def test_two_nodes_of_a_small_class_may_be_removed(new_harness: Callable) -> None:
    harness = new_harness(_nodes(4))
    _unproven(harness, "n3")
    harness.now += 1
    _unproven(harness, "n1")
    harness.now += 1
    _unproven(harness, "n0")
    # The first two are out; a later one with a smaller name replaces neither.
    assert _usable(harness) == {"n0", "n2"}
    harness.step(NodeObserved(harness.nodes[3]))
    assert _usable(harness) == {"n2", "n3"}
    harness.submit("job", 3)
    explanation = explain(harness.state, "default/job", harness.now)
    assert f"node n0 is out: {WHY}" in [blocker.message for blocker in explanation.blockers]


def test_proven_faults_and_drains_do_not_count_against_the_budget(new_harness: Callable) -> None:
    harness = new_harness(_nodes(10))
    drained = [
        replace(harness.nodes[index], ready=False, reason="drained by ops") for index in (0, 1, 2)
    ]
    broken = [replace(harness.nodes[index], ready=False, fault="Xid79") for index in (3, 4)]
    harness.step(*(NodeObserved(node) for node in (*drained, *broken)), NodeLost("n5", "PowerLost"))
    _unproven(harness, "n6", "n7", "n8")
    assert _usable(harness) == {"n8", "n9"}
    (budget,) = removal_budgets(harness.state)
    assert budget.defective == ("n3", "n4", "n5")
    assert budget.out == ("n6", "n7")


def test_each_class_has_its_own_budget_and_the_topology_sets_it(new_harness: Callable) -> None:
    nodes = [*_nodes(10), Node("v0", "A", node_class="v100"), Node("v1", "A", node_class="v100")]
    harness = new_harness(nodes)
    _unproven(harness, *(node.name for node in nodes))
    assert len(_usable(harness)) == 8
    spec = {"removalBudget": {"nodes": 0, "percent": 50}}
    topology = FlyerTopology.model_validate({"metadata": {"name": "cluster"}, "spec": spec})
    harness.step(ZonesObserved(Zones.of(topology)))
    assert len(_usable(harness)) == 6


def test_a_gang_stays_on_a_removed_node(new_harness: Callable) -> None:
    harness = new_harness(_nodes(4))
    harness.run("job", 4)
    _unproven(harness, "n0", "n1", "n2", "n3")
    assert harness.status("job").phase is Phase.RUNNING


@pytest.mark.parametrize(
    ("state", "drain", "unproven"),
    [
        ("Unknown", {}, True),
        ("Unknown", {"drain": {"reason": "disk", "by": "ops"}}, False),
        ("Suspect", {}, False),
        ("Healthy", {}, False),
    ],
)
def test_only_unknown_health_is_unproven(state: str, drain: Any, *, unproven: bool) -> None:
    value = {
        "metadata": {"name": "n"},
        "spec": drain,
        "status": {"state": state, "reason": "DriverHangs"},
    }
    assert NodeHealth.model_validate(value).unproven is unproven


_SIGNS = st.sampled_from(("well", "unproven", "broken", "drained", "lost"))


@given(st.lists(st.tuples(st.integers(0, 11), _SIGNS), max_size=60), st.integers(0, 4))
def test_unproven_removals_never_exceed_the_budget(
    signs: list[tuple[int, str]], budget: int
) -> None:
    from flyer.engine import step

    nodes = [Node(f"n{index}", "A", node_class="ab"[index % 2]) for index in range(12)]
    zones = Zones(budget_nodes=budget, budget_percent=10)
    state = rebuild(nodes, (), 0.0, 1, zones=zones)
    latest = dict.fromkeys(range(12), "well")
    for now, (index, sign) in enumerate(signs, 1):
        node = nodes[index]
        latest[index] = sign
        observed = {
            "unproven": replace(node, unproven=WHY),
            "broken": replace(node, ready=False, fault="Xid79"),
            "drained": replace(node, ready=False, reason="drained"),
        }.get(sign, node)
        event = NodeLost(node.name, "PowerLost") if sign == "lost" else NodeObserved(observed)
        out_before = {node for of in removal_budgets(state) for node in of.out}
        state, _ = step(state, [event], float(now))
        for budget_state in removal_budgets(state):
            assert budget_state.budget == max(budget, 0)
            assert len(budget_state.out) <= budget_state.budget
            # A node is held only where the budget is spent.
            assert not budget_state.held or len(budget_state.out) == budget_state.budget
        out = {node for of in removal_budgets(state) for node in of.out}
        # No unproven node is restored because of another one.
        assert out_before - {node.name} <= out
    for index, sign in latest.items():
        node_state = state.nodes[f"n{index}"]
        if sign in ("broken", "drained", "lost"):
            assert not node_state.eligible
        elif sign == "well":
            assert node_state.eligible
