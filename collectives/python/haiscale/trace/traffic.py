"""Bytes between the ranks of a recording, and between their nodes. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from hfreduce.sizes import STEP, size_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from haiscale.trace.spans import RankTrace

__all__ = ["Traffic", "Unit", "by_node", "by_rank", "document", "summary", "table"]

UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")
TINY: Final = 0.01
PAIRS_SHOWN: Final = 20


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes by source and destination. Those of one node follow each other."""

    names: tuple[str, ...]
    """Of the sources, which are the destinations too: numbers of ranks, or names of nodes."""
    nodes: tuple[str, ...]
    """The node of each."""
    cells: Mapping[tuple[int, int], int]
    """Bytes by the positions of source and destination; those without bytes are left out."""
    absent: int
    """Ranks of the job that are not included."""

    def is_inside(self, source: int, destination: int) -> bool:
        """Whether both are on one node: the bytes use its memory or its local sockets."""
        return self.nodes[source] == self.nodes[destination]

    def total(self, *, inside: bool) -> int:
        """Bytes inside nodes, or between them."""
        return sum(size for pair, size in self.cells.items() if self.is_inside(*pair) is inside)


def by_rank(traces: Sequence[RankTrace]) -> Traffic:
    """The bytes between ranks whose traces these are."""
    first: dict[str, int] = {}
    for trace in traces:
        first[trace.node] = min(trace.rank, first.get(trace.node, trace.rank))
    placed = sorted(traces, key=lambda each: (first[each.node], each.rank))
    position = {trace.rank: index for index, trace in enumerate(placed)}
    moved: list[tuple[tuple[int, int], int]] = []
    for own, trace in enumerate(placed):
        for peer in trace.peers:
            other = position.get(peer.rank)
            if other is not None:
                moved += [((own, other), peer.sent), ((other, own), peer.taken)]
    return Traffic(
        names=tuple(str(trace.rank) for trace in placed),
        nodes=tuple(trace.node for trace in placed),
        cells=_totals(moved),
        absent=traces[0].world_size - len(traces),
    )


def by_node(traffic: Traffic) -> Traffic:
    """The same bytes between nodes; those inside a node are in its own cell."""
    nodes = tuple(dict.fromkeys(traffic.nodes))
    position = {node: index for index, node in enumerate(nodes)}
    of = [position[node] for node in traffic.nodes]
    cells = _totals(((of[a], of[b]), size) for (a, b), size in traffic.cells.items())
    return Traffic(nodes, nodes, cells, traffic.absent)


def _totals(moved: Iterable[tuple[tuple[int, int], int]]) -> dict[tuple[int, int], int]:
    cells: dict[tuple[int, int], int] = {}
    for pair, size in moved:
        if size:
            cells[pair] = cells.get(pair, 0) + size
    return cells


class Unit:
    """One unit for all numbers of a picture or table: the one of the largest."""

    def __init__(self, sizes: Iterable[int]) -> None:
        largest, power = max(sizes, default=0), 0
        while largest >= STEP ** (power + 1) and power < len(UNITS) - 1:
            power += 1
        self.name, self._size = UNITS[power], STEP**power

    def text(self, size: float) -> str:
        """The number alone."""
        number = size / self._size
        if 0 < number < TINY:
            return f"<{TINY:g}"
        return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def summary(traffic: Traffic) -> str:
    """Totals of the two ways, and what is missing."""
    between, inside = traffic.total(inside=False), traffic.total(inside=True)
    words = f"{size_text(between)} between nodes, {size_text(inside)} inside nodes"
    if not traffic.cells:
        words = "no bytes were counted: ranks of other backends and of hfreduced count none"
    if traffic.absent:
        words += f"; without bytes from and to {traffic.absent} ranks that are not included"
    return words


def table(ranks: Traffic, width: int) -> str:
    """Sources as lines and destinations as columns: ranks, or nodes if ranks do not fit.

    If nodes do not fit either: the pairs of nodes with the most bytes.
    """
    for traffic, what in ((ranks, "rank"), (by_node(ranks), "node")):
        lines = _matrix(traffic, what)
        if max(map(len, lines)) <= width:
            return "\n".join([*lines, summary(traffic), ""])
    return "\n".join([*_pairs(by_node(ranks)), summary(ranks), ""])


def _matrix(traffic: Traffic, what: str) -> list[str]:
    unit = Unit(traffic.cells.values())
    places = range(len(traffic.names))
    rows = [["from \\ to", *traffic.names]]
    rows += [[traffic.names[a], *(_cell(traffic, unit, (a, b)) for b in places)] for a in places]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    title = f"{unit.name} from each {what} to each {what}; [inside a node]"
    lines = ["  ".join(map(str.rjust, row, widths)) for row in rows]
    return [title, *lines]


def _cell(traffic: Traffic, unit: Unit, pair: tuple[int, int]) -> str:
    size = traffic.cells.get(pair)
    if size is None:
        return "-"
    return f"[{unit.text(size)}]" if traffic.is_inside(*pair) else unit.text(size)


def _pairs(traffic: Traffic) -> list[str]:
    largest = sorted(traffic.cells.items(), key=lambda item: (-item[1], item[0]))[:PAIRS_SHOWN]
    lines = [f"the {len(largest)} pairs of nodes with the most bytes"]
    for (source, destination), size in largest:
        names = f"{traffic.names[source]} to {traffic.names[destination]}"
        inside = " [inside]" if traffic.is_inside(source, destination) else ""
        lines.append(f"{size_text(size):>10}  {names}{inside}")
    return lines


def document(traffic: Traffic) -> dict[str, Any]:
    """For machines: the totals, and the pairs of ranks between which bytes were moved."""
    return {
        "between_nodes_bytes": traffic.total(inside=False),
        "inside_nodes_bytes": traffic.total(inside=True),
        "absent_ranks": traffic.absent,
        "pairs": [
            {
                "source": int(traffic.names[source]),
                "destination": int(traffic.names[destination]),
                "bytes": size,
                "inside_node": traffic.is_inside(source, destination),
            }
            for (source, destination), size in sorted(traffic.cells.items())
        ],
    }
