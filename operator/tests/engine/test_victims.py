"""The cheapest set of jobs that frees enough nodes."""

from __future__ import annotations

from itertools import combinations

import hypothesis.strategies as st
from flyer.engine.victim_search import Candidate, cheapest_cover, cheapest_set
from hypothesis import given, settings

CANDIDATES = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 6)), min_size=0, max_size=8).map(
    lambda pairs: [Candidate(f"j{i}", cost, gain) for i, (cost, gain) in enumerate(pairs)]
)


def best_cost(candidates: list[Candidate], need: int) -> int | None:
    costs = [
        sum(victim.cost_node_ms for victim in selection)
        for size in range(len(candidates) + 1)
        for selection in combinations(candidates, size)
        if sum(victim.gain for victim in selection) >= need
    ]
    return min(costs, default=None)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(candidates=CANDIDATES, need=st.integers(0, 20))
def test_no_set_that_frees_enough_is_cheaper(candidates: list[Candidate], need: int) -> None:
    selection = cheapest_cover(candidates, need)
    best = best_cost(candidates, need)
    assert (selection is None) == (best is None)
    if selection is not None:
        assert sum(victim.gain for victim in selection) >= need
        assert sum(victim.cost_node_ms for victim in selection) == best


@settings(max_examples=200, deadline=None, derandomize=True)
@given(candidates=CANDIDATES, need=st.integers(0, 20))
def test_the_greedy_set_has_no_superfluous_member(candidates: list[Candidate], need: int) -> None:
    def enough(selection: object) -> bool:
        return sum(victim.gain for victim in selection) >= need  # type: ignore[attr-defined]

    selection = cheapest_set(candidates, enough)
    assert (selection is None) == (best_cost(candidates, need) is None)
    for victim in selection or ():
        assert not enough([other for other in selection or () if other is not victim])
