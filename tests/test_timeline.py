"""The demo's picture and its counting, without running anything."""

from xml.etree import ElementTree as ET

from demo.report import steps_lost
from demo.timeline import Bar, Mark, Timeline


def test_bars_and_marks_are_on_their_rows() -> None:
    timeline = Timeline(
        groups=[("zone A", ["a0", "a1"]), ("3FS", ["storage-1"])],
        bars=[Bar("a0", "gpt", 1, 0.0, 10.0), Bar("a1", "gpt", 1, 0.0, 5.0)],
        marks=[Mark("storage-1", "kill", 5.0, "killed & gone")],
    )
    root = ET.fromstring(timeline.svg("A <title>", "subtitle"))
    svg = "{http://www.w3.org/2000/svg}"
    bars = [r for r in root.iter(f"{svg}rect") if r.find(f"{svg}title") is not None]
    assert [float(bar.attrib["width"]) for bar in bars] == [1000.0, 500.0]
    titles = [title.text for title in root.iter(f"{svg}title")]
    assert "5.0 s: killed & gone" in titles


def test_repeated_steps_count_as_lost() -> None:
    def steps(first: int, last: int) -> list[tuple[int, float]]:
        return [(step, 0.0) for step in range(first, last + 1)]

    suspended = {1: steps(1, 30), 2: steps(31, 60)}
    assert steps_lost(suspended) == {1: 0}
    failed = {1: steps(1, 34), 2: steps(31, 60)}
    assert steps_lost(failed) == {1: 4}
    killed_before_its_first_step = {1: steps(1, 34), 2: [], 3: steps(31, 60)}
    assert steps_lost(killed_before_its_first_step) == {1: 4}
