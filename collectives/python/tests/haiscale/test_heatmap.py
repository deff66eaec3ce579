"""Bytes between ranks without ranks: the matrix, the table, the picture and the command."""

import json
import re
from xml.etree import ElementTree as ET

import pytest
from haiscale.__main__ import main
from haiscale.trace import chrome, heatmap
from haiscale.trace.spans import Kind, Peer, RankTrace, Span
from haiscale.trace.traffic import Traffic, Unit, by_node, by_rank, document, summary, table

SVG = "{http://www.w3.org/2000/svg}"
MEBIBYTE = 1 << 20
HOSTILE = "<script>\x1b[31m&"


def trace(rank, peers, world_size=4, node=None):
    step = Span(Kind.STEP, "step 2", 0, 1000)
    return RankTrace(
        run="r", rank=rank, world_size=world_size, node=node or f"n{rank // 2}", machine="m",
        origin=0, spans=(step,), peers=tuple(peers),
    )  # fmt: skip


def exchange():
    """Two nodes of two ranks: rank 0 sends 8 MiB to rank 2, which returns 2, and takes 1 from 1."""
    return [
        trace(0, [Peer(2, sent=8 * MEBIBYTE), Peer(1, taken=MEBIBYTE)]),
        trace(1, [Peer(0, sent=3 * MEBIBYTE)]),
        trace(2, [Peer(0, sent=2 * MEBIBYTE)]),
        trace(3, []),
    ]


def many(nodes, locals_):
    """Every rank sends 1 MiB to every other one."""
    world = nodes * locals_
    return [
        trace(
            rank,
            [Peer(peer, sent=MEBIBYTE) for peer in range(world) if peer != rank],
            world,
            f"n{rank // locals_}",
        )
        for rank in range(world)
    ]


# The matrix


def test_bytes_sent_and_bytes_taken_are_of_the_source():
    traffic = by_rank(exchange())
    assert traffic.cells == {
        (0, 2): 8 * MEBIBYTE, (1, 0): 4 * MEBIBYTE, (2, 0): 2 * MEBIBYTE,
    }  # fmt: skip
    assert traffic.total(inside=True) == 4 * MEBIBYTE
    assert traffic.total(inside=False) == 10 * MEBIBYTE
    assert summary(traffic) == "10 MiB between nodes, 4 MiB inside nodes"


def test_ranks_of_a_node_follow_each_other():
    traffic = by_rank(
        [
            trace(rank, [Peer(3, sent=7)] if rank == 1 else [], node="ab"[rank % 2])
            for rank in range(4)
        ]
    )
    assert traffic.names == ("0", "2", "1", "3")
    assert traffic.cells == {(2, 3): 7}
    assert traffic.is_inside(2, 3)


def test_nodes_have_the_bytes_of_their_ranks():
    traffic = by_node(by_rank(exchange()))
    assert traffic.names == traffic.nodes == ("n0", "n1")
    assert traffic.cells == {
        (0, 0): 4 * MEBIBYTE, (0, 1): 8 * MEBIBYTE, (1, 0): 2 * MEBIBYTE,
    }  # fmt: skip
    assert summary(traffic) == summary(by_rank(exchange()))


def test_absent_ranks_and_absent_bytes_are_reported():
    assert summary(by_rank(exchange()[1:])) == (
        "no bytes were counted: ranks of other backends and of hfreduced count none; "
        "without bytes from and to 1 ranks that are not included"
    )


# The table


def test_a_table_of_ranks_marks_the_bytes_inside_a_node():
    assert table(by_rank(exchange()), 80).splitlines() == [
        "MiB from each rank to each rank; [inside a node]",
        "from \\ to    0  1  2  3",
        "        0    -  -  8  -",
        "        1  [4]  -  -  -",
        "        2    2  -  -  -",
        "        3    -  -  -  -",
        "10 MiB between nodes, 4 MiB inside nodes",
    ]


@pytest.mark.parametrize(
    ("nodes", "locals_", "first"),
    [
        (2, 2, "MiB from each rank to each rank; [inside a node]"),
        (4, 32, "GiB from each node to each node; [inside a node]"),
        (32, 2, "the 20 pairs of nodes with the most bytes"),
    ],
)
def test_a_table_fits_the_terminal(nodes, locals_, first):
    traffic = by_rank(many(nodes, locals_))
    lines = table(traffic, 80).splitlines()
    assert lines[0] == first
    assert lines[-1] == summary(traffic)
    assert max(map(len, lines)) <= 80


def test_numbers_have_one_unit_and_few_characters():
    unit = Unit([5 * MEBIBYTE, 1023 * MEBIBYTE, 1])
    assert unit.name == "MiB"
    sizes = [1, MEBIBYTE // 3, 12.345 * MEBIBYTE, 1023.7 * MEBIBYTE]
    assert [unit.text(size) for size in sizes] == ["<0.01", "0.333", "12.3", "1024"]
    assert Unit([]).text(0) == "0"


# The picture


def parsed(traffic):
    return ET.fromstring(heatmap.draw(traffic, "4 ranks in 3 steps"))


def cells(root):
    """By title: the cell's place in the matrix, its size and its step of the scale."""
    found = {}
    for each in root.iter(f"{SVG}rect"):
        title = each.find(f"{SVG}title")
        if title is not None:
            x, y, width = (float(each.get(name)) for name in ("x", "y", "width"))
            step = heatmap.SCALE.index(each.get("fill"))
            found[title.text] = ((y - heatmap.TOP), (x - heatmap.LEFT), width, step)
    return found


def test_a_cell_is_in_the_row_of_its_source_and_dark_with_its_bytes():
    root = parsed(by_rank(exchange()))
    side = heatmap.CELL
    assert cells(root) == {
        "rank 0 on n0 to rank 2 on n1: 8 MiB between nodes": (0, 2 * side, side - 1, 7),
        "rank 1 on n0 to rank 0 on n0: 4 MiB inside the node": (side, 0, side - 1, 3),
        "rank 2 on n1 to rank 0 on n0: 2 MiB between nodes": (2 * side, 0, side - 1, 1),
    }
    texts = [each.text for each in root.iter(f"{SVG}text")]
    assert "bytes between 4 ranks in 3 steps" in texts
    assert texts.count("0 B") == texts.count("4 MiB") == texts.count("8 MiB") == 1
    assert any(text.endswith("numbers in MiB") for text in texts)
    assert [texts.count(number) for number in ("8", "4")] == [1, 1]
    assert texts.count("n0") == texts.count("n1") == 2


def frames(root, colour):
    """Upper edges of frames in the matrix: top and width."""
    return [
        (float(each.get("y")) - heatmap.TOP, float(each.get("width")))
        for each in root.iter(f"{SVG}rect")
        if each.get("fill") == colour
        and each.get("height") == "2.0"
        and float(each.get("width")) > 20
    ]


def test_lines_separate_nodes_and_frames_surround_their_cells():
    root = parsed(by_rank(exchange()))
    length = 2 * heatmap.CELL + 1
    tops = {top for top, width in frames(root, heatmap.FRAME) if width == length}
    assert tops == {-1, 2 * heatmap.CELL - 1}
    lines = [each for each in root.iter(f"{SVG}rect") if each.get("fill") == heatmap.LINE]
    assert len(lines) == 2


def test_many_ranks_have_no_numbers_and_one_colour_for_equal_bytes():
    root = parsed(by_rank(many(3, 8)))
    found = cells(root)
    assert len(found) == 24 * 23
    assert {step for *_, step in found.values()} == {heatmap.STEPS - 1}
    texts = [each.text for each in root.iter(f"{SVG}text")]
    assert not any("numbers" in text for text in texts)
    assert texts.count("1") == 2  # the rank's, at both edges


def test_names_are_escaped():
    traffic = Traffic(("0",), (HOSTILE,), {(0, 0): 5}, 0)
    root = parsed(traffic)
    assert not list(root.iter(f"{SVG}script"))
    assert any(
        each.text.startswith("rank 0 on <script>\ufffd[31m&") for each in root.iter(f"{SVG}title")
    )


def luminance(colour):
    """As WCAG defines it."""
    shares = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def themes():
    """The colours of each theme, by the colour in the document."""
    style = parsed(by_rank(exchange())).find(f"{SVG}style").text
    dark = dict(re.findall(r'\[fill="(#\w{6})"\] {fill: (#\w{6})}', style))
    return {"light": {colour: colour for colour in dark}, "dark": dark}


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_numbers_and_words_are_readable_in_both_themes(theme):
    colours = themes()[theme]
    for step, ink in zip(heatmap.SCALE, heatmap.INKS, strict=True):
        assert contrast(colours[step], colours[ink]) >= 4.5
    for words in (heatmap.TITLE, heatmap.WORDS):
        assert contrast(colours[words], colours[heatmap.BACKGROUND]) >= 7
    assert contrast(colours[heatmap.FRAME], colours[heatmap.EMPTY]) >= 3


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_more_bytes_are_further_from_the_background(theme):
    colours = themes()[theme]
    distances = [contrast(colours[step], colours[heatmap.EMPTY]) for step in heatmap.SCALE]
    assert distances == sorted(distances)
    assert all(used in colours for used in {*heatmap.SCALE, *heatmap.INKS})


# The command


def written(folder, traces):
    for each in traces:
        chrome.write(folder, each)
    return str(folder)


def test_the_command_prints_the_bytes_and_draws_them(tmp_path, capsys):
    folder, picture = written(tmp_path, exchange()), tmp_path / "heat.svg"
    assert main(["trace", folder, "--bytes", "--heatmap", str(picture)]) == 0
    assert capsys.readouterr().out == table(by_rank(exchange()), 100)
    assert len(cells(ET.parse(picture).getroot())) == 3
    assert main(["trace", folder, "--heatmap", str(picture), "--ranks", "0,2"]) == 0
    assert "without bytes from and to 2 ranks" in picture.read_text()
    assert len(cells(ET.parse(picture).getroot())) == 2


def test_json_has_the_pairs_of_ranks_and_the_figures_of_the_table(tmp_path, capsys):
    assert main(["trace", written(tmp_path, exchange()), "-o", "json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["traffic"] == document(by_rank(exchange()))
    assert body["traffic"]["pairs"][1] == {
        "source": 1, "destination": 0, "bytes": 4 * MEBIBYTE, "inside_node": True,
    }  # fmt: skip
    assert body["traffic"]["between_nodes_bytes"] == 10 * MEBIBYTE
    assert [rank["node"] for rank in body["ranks"]] == ["n0", "n0", "n1", "n1"]
    assert body["ranks"][0]["step_seconds"] == 1e-6
    assert (body["version"], body["world_size"]) == (1, 4)


def test_a_picture_of_many_ranks_is_of_nodes_and_bounded(tmp_path, capsys):
    picture = tmp_path / "heat.svg"
    ranks = [trace(rank, [Peer(0, sent=5)], 260) for rank in range(130)]
    assert main(["trace", written(tmp_path, ranks), "--heatmap", str(picture)]) == 0
    assert "bytes between 65 nodes in 1 steps" in picture.read_text()
    more = [trace(rank, [], 260) for rank in range(130, 260)]
    assert main(["trace", written(tmp_path, more), "--heatmap", str(picture)]) == 2
    assert "--heatmap: 130 nodes: choose ranks" in capsys.readouterr().err


def test_names_with_control_characters_do_not_reach_the_terminal(tmp_path, capsys):
    traces = [trace(rank, [], 60, HOSTILE) for rank in range(60)]
    assert main(["trace", written(tmp_path, traces), "--bytes"]) == 0
    assert "\x1b" not in capsys.readouterr().out
