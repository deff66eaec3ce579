"""The topology file. Errors of every field are tested in the crate hfreduce-bootstrap."""

import copy
import json

import pytest
from hfreduce import Place, Topology, TopologyError, load_topology
from hypothesis import given, settings
from hypothesis import strategies as st

GOOD = {
    "version": 1,
    "job": "default/gpt",
    "ranks_per_node": 2,
    "nodes": [
        {"name": "a0", "zone": "A", "address": "127.0.0.1"},
        {"name": "b0", "zone": "B"},
    ],
    "bridge": ["a0", "b0"],
}


def test_ranks_are_assigned_to_one_node_after_the_other():
    topology = Topology.parse(json.dumps(GOOD), "t.json")
    assert topology.world_size == 4
    assert topology.bridges == [("a0", "b0")]
    places = topology.places([1, 2], 4)
    assert places == [Place("a0", "A", "127.0.0.1"), Place("b0", "B")]


def test_the_number_of_ranks_must_match_the_world_size():
    topology = Topology.parse(json.dumps(GOOD), "t.json")
    with pytest.raises(
        TopologyError, match=r"t\.json: ranks_per_node: 2 nodes of 2 ranks are 4.*5"
    ):
        topology.places([0], 5)


def test_an_invalid_field_is_named_with_its_value():
    with pytest.raises(TopologyError, match=r"t\.json: ranks_per_node: 0 is not") as excinfo:
        Topology.parse(json.dumps(GOOD | {"ranks_per_node": 0}), "t.json")
    assert (excinfo.value.source, excinfo.value.field) == ("t.json", "ranks_per_node")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(TopologyError, match=r"absent\.json: file: cannot be read"):
        load_topology(tmp_path / "absent.json")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
PLACES = [
    [key] for key in GOOD
] + [["nodes", 0], ["nodes", 1, "name"], ["nodes", 1, "zone"], ["nodes", 0, "address"],
     ["bridge", 0]]  # fmt: skip


def accepted_or_refused(text):
    """Every text gives a usable topology or a TopologyError."""
    try:
        topology = Topology.parse(text, "t.json")
    except TopologyError as error:
        assert str(error).startswith("t.json: ")  # noqa: PT017  # not every text raises
        return
    assert topology.world_size == len(topology.nodes) * topology.ranks_per_node > 0
    for place in topology.nodes:
        assert f"{place.node}{place.zone}{place.address}".encode()
    assert {name for pair in topology.bridges for name in pair} <= {p.node for p in topology.nodes}


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.sampled_from(PLACES), JSON)
def test_any_value_in_any_field_is_accepted_or_refused_by_name(path, value):
    document = copy.deepcopy(GOOD)
    *parents, last = path
    at = document
    for step in parents:
        at = at[step]
    at[last] = value
    accepted_or_refused(json.dumps(document))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(0, 400), st.integers(0, 40), st.text(max_size=8))
def test_a_file_with_a_replaced_part_is_accepted_or_refused(start, length, piece):
    text = json.dumps(GOOD)
    accepted_or_refused(text[:start] + piece + text[start + length :])
