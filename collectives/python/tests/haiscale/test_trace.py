"""Traces without ranks: what follows from spans, the format of the files, and the pictures."""

import json
from dataclasses import replace
from itertools import pairwise
from xml.etree import ElementTree as ET

import pytest
from haiscale.__main__ import main
from haiscale.trace import chrome, heatmap, picture, traffic
from haiscale.trace.chrome import TraceError
from haiscale.trace.recorder import SPANS_MAX
from haiscale.trace.spans import (
    Kind,
    Peer,
    RankTrace,
    Span,
    Wait,
    aligned,
    causes,
    exposed_share,
    named,
    overlap,
    rows,
    union,
)
from hfreduce.sizes import size_text
from hypothesis import given
from hypothesis import strategies as st

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = "<script>\x00&\"'\ud800]]>\u202e"

moments = st.integers(0, 60)
intervals = st.lists(st.tuples(moments, moments).map(lambda pair: (min(pair), max(pair))))


def covered(pairs):
    return {moment for start, end in pairs for moment in range(start, end)}


def spans(kind, pairs):
    return [Span(kind, "x", start, end) for start, end in pairs]


def trace(rank=0, *recorded, **fields):
    defaults = {
        "run": "r", "rank": rank, "world_size": 2, "node": f"n{rank}", "machine": "m",
        "origin": 1000, "spans": tuple(recorded),
    }  # fmt: skip
    return RankTrace(**(defaults | fields))


def step_of(milliseconds=10):
    """A step with a pass of each kind, a wait of a fifth of it, and a collective."""
    unit = milliseconds * 100_000
    return (
        Span(Kind.STEP, "step 7", 0, 10 * unit),
        Span(Kind.FORWARD, "blocks.0", 0, 3 * unit),
        Span(Kind.BACKWARD, "blocks.0", 3 * unit, 7 * unit),
        Span(Kind.OPTIMIZER, "step of 2 parameters", 9 * unit, 10 * unit),
        Span(Kind.COLLECTIVE, "allreduce 1 MiB", 4 * unit, 9 * unit, 1 << 20),
        Span(Kind.WAIT, "allreduce 1 MiB", 7 * unit, 9 * unit),
        Span(Kind.SENT, "1 MiB", 5 * unit, 9 * unit, 1 << 20),
    )


@given(intervals, intervals)
def test_the_exposed_share_is_the_part_of_the_steps_that_waits_cover(waits, steps):
    share = exposed_share(spans(Kind.WAIT, waits) + spans(Kind.STEP, steps))
    length = len(covered(steps))
    assert share == (len(covered(waits) & covered(steps)) / length if length else 0)
    assert 0 <= share <= 1


@given(intervals, intervals)
def test_a_union_covers_the_same_times_once(one, other):
    merged = union(one)
    assert covered(merged) == covered(one)
    assert all(a[1] < b[0] for a, b in pairwise(merged))
    assert overlap(merged, union(other)) == len(covered(one) & covered(other))


@given(intervals)
def test_rows_are_as_few_as_possible_and_do_not_overlap(pairs):
    placed = rows(spans(Kind.COLLECTIVE, pairs))
    assert sorted((s.start, s.end) for row in placed for s in row) == sorted(pairs)
    for row in placed:
        assert all(a.end <= b.start for a, b in pairwise(row))
    depth = max((sum(start <= t < end for start, end in pairs) for t in range(61)), default=0)
    if all(start < end for start, end in pairs):
        assert len(placed) == depth


def test_waits_have_the_name_of_the_operation_that_ended_last_before_they_did():
    operations = [
        (4, Span(Kind.COLLECTIVE, "early", 0, 10)),
        (4, Span(Kind.COLLECTIVE, "of another group", 0, 30)),
        (5, Span(Kind.COLLECTIVE, "other", 0, 19)),
    ]
    found = named([Wait(5, 20, 4), Wait(5, 40, 4), Wait(0, 5, 4), Wait(0, 9, 6)], operations)
    assert [each.name for each in found] == [
        "early", "of another group", "early", "unknown operation",
    ]  # fmt: skip
    assert list(causes(found).items()) == [
        ("of another group", 35), ("early", 20), ("unknown operation", 9),
    ]  # fmt: skip


def test_ranks_of_one_machine_share_a_clock_and_others_meet_at_zero():
    first, late, far = aligned(
        [
            trace(2, Span(Kind.STEP, "s", 5, 6), machine="other", origin=77, world_size=3),
            trace(0, Span(Kind.STEP, "s", 5, 6), origin=1000, world_size=3),
            trace(1, Span(Kind.STEP, "s", 5, 6), origin=1400, world_size=3),
        ]
    )
    assert [each.spans[0].start for each in (first, late, far)] == [5, 405, 5]


# Files


def test_a_file_is_read_as_it_was_written(tmp_path):
    peers = (Peer(0, 5, 1 << 61), Peer(1, 0, 7))
    traces = [trace(rank, *step_of(), peers=peers, dropped=2, lost=1) for rank in (0, 1)]
    for each in traces:
        assert chrome.write(tmp_path, each).name == f"rank-0000{each.rank}.json"
    found = chrome.read(tmp_path)
    key = lambda span: (span.start, span.kind)  # noqa: E731
    assert [sorted(each.spans, key=key) for each in found] == [sorted(step_of(), key=key)] * 2
    assert [replace(each, spans=()) for each in found] == [
        replace(each, spans=()) for each in traces
    ]
    assert not list(tmp_path.glob("*.tmp"))


def test_events_are_what_chrome_and_perfetto_draw():
    document = chrome.merged([trace(1, *step_of()), trace(0, *step_of())])
    events = document["traceEvents"]
    named = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert named == {0: "rank 0 on n0", 1: "rank 1 on n1"}
    drawn = [event for event in events if event["ph"] == "X"]
    assert {e["cat"]: e["tid"] for e in drawn}[Kind.COLLECTIVE] == 4
    for lane in {(e["pid"], e["tid"]) for e in drawn}:
        own = sorted((e["ts"], e["ts"] + e["dur"]) for e in drawn if (e["pid"], e["tid"]) == lane)
        assert all(a[1] <= b[0] for a, b in pairwise(own)), lane


def changed(path, value):
    """The text of a valid file with one value changed."""
    body = chrome.document(trace(0, *step_of(), peers=(Peer(1, 5, 7),)))
    place = body
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    return json.dumps(body)


EVENT = ("traceEvents", -1)
PEER = ("otherData", "peers", 0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "expected an object"),
        (changed(("otherData",), None), "otherData"),
        (changed(("otherData", "format"), "other"), "format 'other'"),
        (changed(("otherData", "version"), 1), "version 1"),
        (changed(("otherData", "rank"), 2), "rank is 2: expected an integer from 0 to 1"),
        (changed(("otherData", "rank"), True), "rank is True"),
        (changed(("otherData", "world_size"), 1 << 40), "world_size"),
        (changed(("otherData", "node"), "n" * 201), "node is"),
        (changed(("otherData", "peers"), None), "peers is None: expected a list of at most 2"),
        (changed(("otherData", "peers"), [7]), r"peers\[0\]: 7: expected an object"),
        (changed(PEER, {"rank": 2, "sent": 0, "taken": 0}), r"peers\[0\]: rank is 2"),
        (changed(PEER, {"rank": 1, "sent": -1, "taken": 0}), r"peers\[0\]: sent is -1"),
        (changed(PEER, {"rank": 1, "sent": 0}), r"peers\[0\]: taken is None"),
        (changed(("traceEvents",), {}), "traceEvents"),
        (changed(("traceEvents",), [7]), r"traceEvents\[0\]: 7: expected an object"),
        (changed((*EVENT, "ts"), float("nan")), "ts is nan"),
        (changed((*EVENT, "ts"), "soon"), "ts is 'soon'"),
        (changed((*EVENT, "dur"), 1e300), "dur is 1e\\+300"),
        (changed((*EVENT, "dur"), -1), "dur is -1"),
        (changed((*EVENT, "cat"), "meal"), "cat is 'meal': expected step, "),
        (changed((*EVENT, "name"), 7), "name is 7"),
        (changed((*EVENT, "args"), {"bytes": -1}), "bytes is -1"),
    ],
)
def test_a_damaged_file_is_refused_with_its_name_the_field_and_the_value(text, words):
    with pytest.raises(TraceError, match=words) as raised:
        chrome.parse(text, "a/rank-00000.json")
    assert str(raised.value).startswith("a/rank-00000.json")
    assert len(str(raised.value)) < 400


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda each: st.lists(each, max_size=3) | st.dictionaries(st.text(max_size=5), each),
    max_leaves=5,
)
FIELDS = [("otherData", name) for name in chrome.document(trace())["otherData"]]
FIELDS += [(*EVENT, name) for name in ("ph", "cat", "name", "ts", "dur", "args", "pid")]


@given(st.sampled_from(FIELDS), json_values)
def test_whatever_a_field_has_a_file_is_refused_or_can_be_drawn(path, value):
    try:
        found = chrome.parse(changed(path, value), "file")
    except TraceError:
        return
    ET.fromstring(picture.draw([found]))
    ET.fromstring(heatmap.draw(traffic.by_rank([found]), "a rank"))


def test_files_of_two_recordings_are_not_mixed(tmp_path):
    chrome.write(tmp_path, trace(0, *step_of()))
    chrome.write(tmp_path, trace(1, *step_of(), run="another"))
    with pytest.raises(TraceError, match=r"rank-00001.json: is of another recording than .*00000"):
        chrome.read(tmp_path)


# Pictures


def drawn(document):
    """Rectangles by colour."""
    found = {}
    for each in ET.fromstring(document).iter(f"{SVG}rect"):
        found.setdefault(each.get("fill"), []).append(each)
    return found


def test_exposed_time_is_red_and_as_wide_as_it_lasted():
    document = picture.draw([trace(0, *step_of()), trace(1, *step_of())])
    red = drawn(document)[picture.COLOURS[Kind.WAIT]]
    _legend, *bars = red
    assert len(bars) == 2
    assert {float(each.get("width")) for each in bars} == {0.2 * picture.PLOT_WIDTH - 0.5}
    assert {float(each.get("x")) for each in bars} == {picture.LEFT + 0.7 * picture.PLOT_WIDTH}
    texts = [each.text for each in ET.fromstring(document).iter(f"{SVG}text")]
    assert "1 steps of 2 ranks: 20.0 % of the time is exposed" in texts
    assert texts.count("exposed 20.0 %") == 2


def test_names_are_escaped_in_pictures():
    hostile = trace(0, *(span._replace(name=HOSTILE) for span in step_of()), node=HOSTILE)
    root = ET.fromstring(picture.draw([hostile]).encode())
    assert not list(root.iter(f"{SVG}script"))
    assert any("<script>\ufffd&" in (each.text or "") for each in root.iter())


def test_a_picture_of_many_short_spans_is_bounded():
    many = tuple(Span(Kind.SENT, "x", 10 * n, 10 * n + 5, 1) for n in range(SPANS_MAX // 2))
    waits = tuple(Span(Kind.WAIT, "x", 10 * n, 10 * n + 5) for n in range(SPANS_MAX // 2))
    document = picture.draw([trace(0, Span(Kind.STEP, "s", 0, 10 * len(many)), *many, *waits)])
    assert len(document) < 3_000_000
    # The areas of what became one are added.
    kept = picture.thinned(many, picture.PLOT_WIDTH / (10 * len(many)))
    assert sum(span.bytes for span in kept) == len(many)


def test_an_incomplete_trace_says_so():
    document = picture.draw([trace(0, *step_of(), dropped=5, lost=3)])
    assert "incomplete: 5 spans above the limit and 3 operations are missing" in document


def test_sizes():
    assert [size_text(n) for n in (0, 1023, 1024, 1536 * 1024, 5 << 40)] == [
        "0 B", "1023 B", "1 KiB", "1.5 MiB", "5 TiB",
    ]  # fmt: skip


# The command


def test_the_command_prints_what_each_rank_waited_for_and_draws(tmp_path, capsys):
    for rank in (0, 1):
        chrome.write(tmp_path, trace(rank, *step_of(), dropped=rank))
    outputs = {name: tmp_path / f"{name}.out" for name in ("svg", "chrome")}
    options = [word for name, path in outputs.items() for word in (f"--{name}", str(path))]
    assert main(["trace", str(tmp_path), *options, "--ranks", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == [
        "0", "n0", "10.00", "ms", "20.0", "%", "1", "MiB",
        "allreduce", "1", "MiB", "2.00", "ms",
    ]  # fmt: skip
    assert lines[3].startswith("rank 1 is incomplete: 1 spans")
    assert "rank 0, n0" not in outputs["svg"].read_text()
    assert "rank 1, n1" in outputs["svg"].read_text()
    assert json.loads(outputs["chrome"].read_text())["displayTimeUnit"] == "ms"


def test_the_command_refuses_what_it_cannot_draw(tmp_path, capsys):
    assert main(["trace", str(tmp_path)]) == 2
    assert "no rank-*.json: pass the folder" in capsys.readouterr().err
    chrome.write(tmp_path, trace(0, *step_of()))
    assert main(["trace", str(tmp_path), "--svg", str(tmp_path / "x"), "--ranks", "0,9"]) == 2
    assert "no file of rank 9" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["trace", str(tmp_path), "--ranks", "0;1"])


def test_names_with_control_characters_do_not_reach_the_terminal(tmp_path, capsys):
    chrome.write(tmp_path, trace(0, *step_of(), node="n\x1b[31m"))
    assert main(["trace", str(tmp_path)]) == 0
    assert "\x1b" not in capsys.readouterr().out
