"""Selection of nodes for a gang, in the order of ranks."""

from __future__ import annotations

from itertools import pairwise

import hypothesis.strategies as st
import pytest
from flyer.engine import Node
from flyer.engine.placement.node_selection import (
    PlacementHistory,
    best,
    by_zone,
    choose,
    cross_zone_options,
    same_zone_layout_options,
    single_zone_options,
)
from hypothesis import given, settings


def nodes(*names: str, leaf: dict[str, str] | None = None) -> list[Node]:
    return [Node(name, name[0].upper(), (leaf or {}).get(name, "")) for name in names]


def lay(
    count: int, free: list[Node], memory: PlacementHistory | None = None
) -> tuple[str, ...] | None:
    """As in the scheduler: one zone if it fits, else two."""
    zones = {node.zone for node in free}
    for kind in (single_zone_options(count, zones), cross_zone_options(count, zones)):
        selection = best(kind, by_zone(free), memory or PlacementHistory())
        if selection is not None:
            return tuple(node.name for node in selection[1])
    return None


@pytest.mark.parametrize(
    ("count", "free", "expected"),
    [
        # The zone that fits tightest, even if the other one is first.
        (2, "a0 a1 a2 b0 b1", "b0 b1"),
        (3, "a0 a1 a2 b0 b1", "a0 a1 a2"),
        # Two zones only if no zone fits; what is left is even, so that both keep a spare.
        (4, "a0 a1 a2 b0 b1 b2", "a0 a1 b0 b1"),
        (5, "a0 a1 a2 a3 b0 b1", "a0 a1 a2 a3 b0"),
        (6, "a0 a1 a2 b0 b1 b2", "a0 a1 a2 b0 b1 b2"),
        # Numbers sort as numbers.
        (2, "a10 a9", "a9 a10"),
        (3, "a0 a1", None),
        (1, "", None),
    ],
)
def test_a_gang_gets_the_tightest_fit(count: int, free: str, expected: str | None) -> None:
    assert lay(count, nodes(*free.split())) == (tuple(expected.split()) if expected else None)


def test_a_gang_gets_nodes_of_the_fewest_leaves() -> None:
    leaf = {"a0": "l0", "a1": "l1", "a2": "l1", "a3": "l2", "a4": "l2", "a5": "l2"}
    free = nodes("a0", "a1", "a2", "a3", "a4", "a5", leaf=leaf)
    assert lay(2, free) == ("a1", "a2")  # the leaf that fits, not the larger one
    assert lay(3, free) == ("a3", "a4", "a5")
    assert lay(4, free) == ("a3", "a4", "a5", "a0")  # and the rest from the tightest


def test_three_zones_are_never_spanned() -> None:
    free = nodes("a0", "b0", "c0")
    assert lay(2, free) is not None
    assert lay(3, free) is None


def test_nodes_of_the_previous_attempt_keep_their_ranks() -> None:
    memory = PlacementHistory((("a0", "A"), ("a1", "A"), ("b0", "B"), ("b1", "B")))
    free = nodes("a0", "a2", "b0", "b1", "b2")
    option = same_zone_layout_options(memory, {"A", "B"})[0]
    laid = choose(option, by_zone(free), memory)
    assert laid is not None
    assert [node.name for node in laid] == ["a0", "a2", "b0", "b1"]


def test_a_node_on_which_the_job_failed_is_used_last() -> None:
    memory = PlacementHistory((("a0", "A"), ("a1", "A")), frozenset({"a1"}))
    option = same_zone_layout_options(memory, {"A"})[0]
    with_spare = choose(option, by_zone(nodes("a0", "a1", "a2")), memory)
    without = choose(option, by_zone(nodes("a0", "a1")), memory)
    assert with_spare is not None
    assert without is not None
    assert [node.name for node in with_spare] == ["a0", "a2"]
    assert [node.name for node in without] == ["a0", "a1"]


def test_the_same_zone_layout_may_be_found_in_other_zones() -> None:
    memory = PlacementHistory((("a0", "A"), ("a1", "A")))
    options = same_zone_layout_options(memory, {"A", "B"})
    selection = best(options, by_zone(nodes("a0", "b0", "b1")), memory)
    assert selection is not None
    assert [node.name for node in selection[1]] == ["b0", "b1"]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    count=st.integers(1, 14),
    leaves=st.integers(1, 4),
)
def test_every_gang_is_contiguous_over_at_most_two_zones(
    sizes: list[int], count: int, leaves: int
) -> None:
    free = [
        Node(f"{zone}{index}", zone.upper(), f"{zone}{index % leaves}")
        for zone, size in zip("abc", sizes, strict=False)
        for index in range(size)
    ]
    laid = lay(count, free)
    largest = sorted(sizes, reverse=True)
    assert (laid is not None) == (count <= largest[0] or count <= sum(largest[:2]))
    if laid is not None:
        zones = [name[0] for name in laid]
        assert len(laid) == count == len(set(laid))
        changes = sum(a != b for a, b in pairwise(zones))
        assert changes == len(set(zones)) - 1 <= 1
        assert (changes == 0) == (count <= largest[0])
