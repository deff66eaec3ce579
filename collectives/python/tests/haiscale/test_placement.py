"""Placement by rule: what every layout keeps, and what is refused. No torch."""

from collections import Counter
from itertools import pairwise, permutations

import pytest
from haiscale.placement import (
    AXES,
    EXPERT_AXES,
    LayoutError,
    Nodes,
    Rule,
    Sizes,
    check,
    place,
    violations,
)
from hypothesis import assume, given, settings
from hypothesis import strategies as st


def nodes_of(zones, ranks_per_node, nvlink=None):
    names = [f"{zone.lower()}{index}" for index, zone in enumerate(zones)]
    return Nodes(tuple(names), tuple(zones), ranks_per_node, nvlink)


def divisors(number):
    return [n for n in range(1, number + 1) if number % n == 0]


@st.composite
def jobs(draw):
    """Nodes in up to three zones, and sizes that multiply to their ranks."""
    zones = [zone for zone in "ABC" for _ in range(draw(st.integers(0, 6)))]
    assume(zones)
    if draw(st.booleans()):
        zones = draw(st.permutations(zones))  # a list that is not sorted by zone
    ranks_per_node = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    nvlink = draw(st.sampled_from([None, (tuple(range(ranks_per_node)),)]))
    world = len(zones) * ranks_per_node
    tp = draw(st.sampled_from(divisors(ranks_per_node)))
    pp = draw(st.sampled_from(divisors(world // tp)))
    shard = draw(st.sampled_from(divisors(world // tp // pp)))
    sizes = Sizes(
        dp=world // tp // pp // shard,
        shard=shard,
        pp=pp,
        tp=tp,
        ep=draw(st.sampled_from(divisors(world // tp // pp))),
        ep_nodes=draw(st.sampled_from([1, 1, 2, 4])),
        stages_per_node=draw(st.sampled_from([None, None, 1, 2])),
    )
    return nodes_of(zones, ranks_per_node, nvlink), sizes


def placed(job):
    try:
        return place(*job)
    except LayoutError:
        return None


@settings(max_examples=400, deadline=None, derandomize=True)
@given(jobs())
def test_a_layout_keeps_every_rule(job):
    """The rules in other words than those of the checks, from rank lists and node numbers alone."""
    nodes, sizes = job
    layout = placed(job)
    assume(layout is not None)
    per_node = nodes.ranks_per_node
    for axis in dict.fromkeys(AXES + EXPERT_AXES):
        axes = AXES if axis in AXES else EXPERT_AXES
        groups = layout.groups(axis)
        assert sorted(rank for ranks in groups for rank in ranks) == list(range(nodes.world_size))
        assert {len(ranks) for ranks in groups} == {layout.shape(axes)[axes.index(axis)]}
    for ranks in layout.groups("tp"):
        assert len({rank // per_node for rank in ranks}) == 1
        if nodes.nvlink is None and len(ranks) > 1:
            assert [rank % 2 for rank in ranks] == [0, 1]
    stage_of = {rank: stage for ranks in layout.groups("pp") for stage, rank in enumerate(ranks)}
    if len(nodes.names) > 1:
        for node in range(len(nodes.names)):
            own = {stage_of[node * per_node + local] for local in range(per_node)}
            assert len(own) <= (sizes.stages_per_node or 1)
    for ranks in layout.groups("shard"):
        assert len({nodes.zones[rank // per_node] for rank in ranks}) == 1
    for ranks in layout.groups("ep"):
        own = {rank // per_node for rank in ranks}
        assert len(own) <= sizes.ep_nodes
        assert len({nodes.zones[node] for node in own}) == 1
    for axis in ("shard", "ep"):
        spread = {
            count
            for ranks in layout.groups(axis)
            for count in Counter(rank // per_node for rank in ranks).values()
        }
        assert len(spread) == 1
    crossings = {
        (sender // per_node, receiver // per_node)
        for ranks in layout.groups("pp")
        for sender, receiver in pairwise(ranks)
        if nodes.zones[sender // per_node] != nodes.zones[receiver // per_node]
    }
    assert len(crossings) <= len(set(nodes.zones)) - 1
    in_order = nodes.by_zone()
    borders = {(a, b) for a, b in pairwise(in_order) if nodes.zones[a] != nodes.zones[b]}
    assert crossings <= borders, "the last node of a zone and the first one of the next"


@settings(max_examples=400, deadline=None, derandomize=True)
@given(jobs())
def test_a_refusal_names_its_rule_nodes_and_a_remedy(job):
    try:
        place(*job)
    except LayoutError as raised:
        error = raised
    else:
        return
    assert error.remedy
    assert str(error) == f"rule {error.rule}: {error.problem}: {error.remedy}"
    if error.rule is not Rule.SIZES:
        assert error.nodes
        assert set(error.nodes) <= set(job[0].names)


def any_order_exists(nodes, sizes):
    """Whether any assignment of whole nodes to pipelines and stages keeps the rules."""
    per_stage = len(nodes.names) // sizes.pp
    slots = range(nodes.ranks_per_node)
    for order in permutations(range(len(nodes.names))):
        by_chain = [
            [order[chain * sizes.pp + stage] for chain in range(per_stage)]
            for stage in range(sizes.pp)
        ]
        data = [
            [node * nodes.ranks_per_node + slot for node in stage for slot in slots]
            for stage in by_chain
        ]
        groups = {
            "pp": [list(ranks) for ranks in zip(*data, strict=True)],
            "shard": [
                stage[start : start + sizes.shard]
                for stage in data
                for start in range(0, len(stage), sizes.shard)
            ],
        }
        if not violations(nodes, groups):
            return True
    return False


@pytest.mark.parametrize(
    ("count", "in_a"), [(count, in_a) for count in range(2, 7) for in_a in range(1, count)]
)
def test_a_layout_is_refused_only_where_no_order_of_the_nodes_helps(count, in_a):
    nodes = nodes_of("A" * in_a + "B" * (count - in_a), 2)
    for pp in divisors(count):
        for shard in divisors(2 * count // pp):
            sizes = Sizes(dp=2 * count // pp // shard, shard=shard, pp=pp)
            assert (placed((nodes, sizes)) is not None) == any_order_exists(nodes, sizes), sizes


PAPER = nodes_of("AAAABBBB", 8)


def test_the_ranks_of_a_node_are_replicas_of_one_stage():
    layout = place(PAPER, Sizes(dp=16, pp=4))
    assert layout.groups("pp")[:2] == [(0, 8, 16, 24), (1, 9, 17, 25)]
    assert layout.groups("dp")[0] == (*range(8), *range(32, 40))


def test_tensor_parallel_groups_are_consecutive_pairs_unless_nvlink_joins_others():
    assert place(nodes_of("A", 4), Sizes(dp=2, tp=2)).groups("tp") == [(0, 1), (2, 3)]
    crossed = nodes_of("A", 4, ((0, 2), (1, 3)))
    assert place(crossed, Sizes(dp=2, tp=2)).groups("tp") == [(0, 2), (1, 3)]


def test_shards_are_inside_a_zone_and_replicas_across():
    layout = place(PAPER, Sizes(dp=2, shard=32))
    assert layout.groups("shard") == [tuple(range(32)), tuple(range(32, 64))]
    assert layout.groups("dp")[0] == (0, 32)


def test_expert_groups_span_as_many_nodes_as_the_caller_allows():
    assert place(PAPER, Sizes(dp=64, ep=8)).groups("ep")[1] == tuple(range(8, 16))
    wide = Sizes(dp=64, ep=16, ep_nodes=2)
    assert place(PAPER, wide).groups("ep")[0] == tuple(range(16))
    assert place(PAPER, wide).groups("expert_dp")[0] == (0, 16, 32, 48)


def test_stages_share_a_node_only_when_asked_for():
    sizes = Sizes(dp=32, pp=2, stages_per_node=2)
    assert place(PAPER, sizes).groups("pp")[0] == (0, 4)
    assert place(Nodes.one(4), Sizes(dp=2, pp=2)).groups("pp") == [(0, 2), (1, 3)]


REFUSED = {
    "sizes": (PAPER, {"dp": 3, "pp": 4}, Rule.SIZES, "have 64: set dp to 16"),
    "no dp fits": (PAPER, {"pp": 3}, Rule.SIZES, "choose sizes whose product is 64"),
    "experts": (PAPER, {"dp": 64, "ep": 3}, Rule.SIZES, "choose a divisor of 64"),
    "tp": (PAPER, {"dp": 16, "tp": 4}, Rule.TENSOR, "NVLink joins 2 accelerators"),
    "half a pair": (nodes_of("AB", 3), {"dp": 3, "tp": 2}, Rule.TENSOR, "local ranks 2 of every"),
    "no pairs": (nodes_of("A", 4, ()), {"dp": 2, "tp": 2}, Rule.TENSOR, "NVLink joins 0"),
    "deep": (PAPER, {"pp": 16, "dp": 4}, Rule.STAGE, "choose pp from 1, 2, 4, 8"),
    "odd stages": (PAPER, {"pp": 2, "dp": 32, "stages_per_node": 3}, Rule.STAGE, "do not divide"),
    "zone": (PAPER, {"shard": 64}, Rule.SHARD, "A: 4 nodes, B: 4 nodes"),
    "uneven zones": (nodes_of("AAABBBBB", 2), {"dp": 4, "shard": 4}, Rule.SHARD, "a2, b3"),
    "experts leave": (PAPER, {"dp": 64, "ep": 16}, Rule.EXPERT, "set ep_nodes to 2"),
    "experts cross": (
        nodes_of("AB", 2), {"dp": 4, "ep": 4, "ep_nodes": 2}, Rule.EXPERT, "in the zones A, B",
    ),
    "uneven shard": (nodes_of("AA", 3), {"dp": 3, "shard": 2}, Rule.EVEN, "a0: 1, a1: 1"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_a_layout_that_breaks_a_rule_is_refused(case):
    nodes, sizes, rule, text = case
    with pytest.raises(LayoutError) as raised:
        place(nodes, Sizes(**sizes))
    assert raised.value.rule is rule
    assert text in str(raised.value)


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "2"])
def test_a_size_is_a_whole_number(value):
    with pytest.raises(LayoutError, match=f"invalid pp {value!r}: pass a whole number above 0"):
        Sizes(pp=value)


TWO_ZONES = nodes_of("AB", 2)
BROKEN = {
    "pair split over nodes": ({"tp": [[0, 2], [1, 3]]}, Rule.TENSOR, (0, 2)),
    "other accelerators": (
        {"tp": [[0, 1], [2, 3]]}, Rule.TENSOR, (0, 1),
    ),
    "stages mixed": ({"pp": [[0, 1], [2, 3]]}, Rule.STAGE, (0, 1)),
    "shards in two zones": ({"shard": [[0, 2], [1, 3]]}, Rule.SHARD, (0, 2)),
    "experts on two nodes": ({"ep": [[0, 2], [1, 3]]}, Rule.EXPERT, (0, 2)),
    "a rank twice": ({"dp": [[0, 1], [1, 2, 3]]}, Rule.SIZES, (1,)),
    "a rank missing": ({"dp": [[0, 1], [2]]}, Rule.SIZES, (3,)),
    "a rank of no node": ({"dp": [[0, 1], [2, 3], [4]]}, Rule.SIZES, (4,)),
    "sizes differ": ({"dp": [[0, 1, 2], [3]]}, Rule.SIZES, ()),
    "axes overlap": ({"dp": [[0, 1], [2, 3]], "shard": [[0, 1], [2, 3]]}, Rule.SIZES, (0, 1)),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN.values(), ids=BROKEN)
def test_an_assignment_that_breaks_a_rule_is_refused(case):
    groups, rule, ranks = case
    single = Nodes(TWO_ZONES.names, TWO_ZONES.zones, 2, ())
    with pytest.raises(LayoutError) as raised:
        check(single if ranks == (0, 1) and "tp" in groups else TWO_ZONES, groups)
    assert (raised.value.rule, raised.value.ranks) == (rule, ranks)


def test_pipelines_that_cross_zones_over_two_pairs_of_nodes_are_refused():
    nodes = nodes_of("AABB", 1)
    assert not violations(nodes, {"pp": [[0, 1], [2, 3]]})
    assert not violations(nodes, {"pp": [[0, 1, 2, 3]]})
    [error] = violations(nodes, {"pp": [[0, 2], [1, 3]]})
    assert error.rule is Rule.CROSSING
    assert error.nodes == ("a0", "a1", "b2", "b3")
    assert "a0-b2, a1-b3" in str(error)


def test_every_broken_rule_is_listed():
    groups = {"shard": [[0, 2], [1, 3]], "ep": [[0, 2], [1, 3]]}
    assert {error.rule for error in violations(TWO_ZONES, groups)} == {Rule.SHARD, Rule.EXPERT}


def test_an_unknown_axis_is_refused():
    with pytest.raises(ValueError, match="unknown axis 'cp': expected some of pp, dp"):
        check(TWO_ZONES, {"cp": [[0, 1, 2, 3]]})


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (((), (), 1), "0 names"),
        ((("a", "b"), ("A",), 1), "2 names and 1 zones"),
        ((("a", "a"), ("A", "A"), 1), "'a' is there 2 times"),
        ((("a",), ("A",), 0), "invalid ranks_per_node 0"),
        ((("a",), ("A",), 2, ((0, 2),)), "local ranks below 2"),
        ((("a",), ("A",), 4, ((0, 1), (1, 2))), "each in at most one group"),
    ],
)
def test_nodes_that_cannot_be_are_refused(arguments, text):
    with pytest.raises(ValueError, match=text):
        Nodes(*arguments)
