"""The topology file: what is read from it, and what is refused with file, field and value."""

import json

import pytest
from hfreduce import Place, TopologyError, load_topology
from hfreduce.topology import parse_topology

GOOD = {
    "version": 1,
    "job": "default/gpt",
    "ranks_per_node": 2,
    "nodes": [
        {"name": "a0", "zone": "A", "address": "127.0.0.1"},
        {"name": "b0", "zone": "B"},
    ],
    "bridge": ["a0", "b0"],
    "traffic_classes": {"hfreduce": {"dscp": 18}},
}


def test_ranks_fill_one_node_after_the_other():
    topology = parse_topology(json.dumps(GOOD), "t.json")
    assert topology.world_size == 4
    assert topology.bridges == (("a0", "b0"),)
    places = topology.places([1, 2], 4)
    assert places == [Place("a0", "A", "127.0.0.1"), Place("b0", "B")]


def test_the_file_must_describe_as_many_ranks_as_the_job_has():
    topology = parse_topology(json.dumps(GOOD), "t.json")
    with pytest.raises(
        TopologyError, match=r"t\.json: ranks_per_node: 2 nodes of 2 ranks are 4.*5"
    ):
        topology.places([0], 5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version: 2 is not 1"),
        ({"ranks_per_node": 0}, "ranks_per_node: 0 is not a whole number above 0"),
        ({"ranks_per_node": True}, "ranks_per_node: True is not"),
        ({"nodes": []}, r"nodes: \[\] is not a list of at least one node"),
        ({"nodes": ["a0"]}, r"nodes\[0\]: 'a0' is not an object"),
        ({"nodes": [{"zone": "A"}]}, r"nodes\[0\]\.name: None is not a name"),
        ({"nodes": [{"name": "a0", "zone": 7}]}, r"nodes\[0\]\.zone: 7 is not a name"),
        ({"nodes": [{"name": "a", "zone": "A"}] * 2}, r"nodes\[1\]\.name: 'a' is not a name other"),
        ({"bridge": "a0"}, "bridge: 'a0' is not a list of node names"),
        ({"bridge": ["a0", "z9"]}, "bridge: 'z9' is not the name of a node"),
        ({"bridge": ["a0", "a0"]}, "bridge: .*nodes of two zones"),
        ({"bridge": ["a0"]}, "bridge: .*two for each bridge"),
    ],
)
def test_a_bad_field_is_named_with_its_value(change, message):
    with pytest.raises(TopologyError, match=r"t\.json: " + message):
        parse_topology(json.dumps(GOOD | change), "t.json")


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", '"x"'])
def test_what_is_no_object_is_refused(text):
    with pytest.raises(TopologyError, match=r"t\.json: file: "):
        parse_topology(text, "t.json")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(TopologyError, match=r"absent\.json: file: cannot be read"):
        load_topology(tmp_path / "absent.json")
