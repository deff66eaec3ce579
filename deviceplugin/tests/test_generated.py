"""Generated files, and values that are copied from other parts, equal their sources."""

from __future__ import annotations

import re
from pathlib import Path

import flyer_node.proto
from flyer_node.plugin.traffic import MARKS, TrafficClass
from flyer_node.proto.generate import SOURCES, generate

ROOT = Path(__file__).resolve().parents[2]


def test_the_stubs_are_up_to_date(tmp_path: Path) -> None:
    folder = Path(flyer_node.proto.__file__).parent
    fresh = {path.name: path.read_text() for path in generate(tmp_path)}
    assert len(fresh) == 2 * len(SOURCES)
    for name, text in fresh.items():
        assert (folder / name).read_text() == text, (
            f"run python -m flyer_node.proto.generate: {name}"
        )


def test_the_traffic_classes_equal_those_of_the_fabric_crate() -> None:
    source = (ROOT / "fabric/src/class.rs").read_text()
    rows = re.findall(
        r"Self::(\w+) => Marks \{ service_level: (\d+), roce_traffic_class: (\d+), dscp: (\d+) \}",
        source,
    )
    fabric_marks = {name.lower(): tuple(int(value) for value in values) for name, *values in rows}
    own_marks = {
        traffic.value: (marks.service_level, marks.roce_traffic_class, marks.dscp)
        for traffic, marks in MARKS.items()
    }
    assert own_marks == fabric_marks
    assert set(own_marks) == {traffic_class.value for traffic_class in TrafficClass}
