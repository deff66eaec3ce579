"""Which machine and zone every rank runs in.

The scheduler writes a topology file and names it in FLYER_TOPOLOGY. Without one, ranks that report
the same host name share a machine, and all machines are in the zone FLYER_ZONE, or in one zone.
Nodes with different names count as different machines, even on one host.

This module reads and checks; it opens no connection and looks at no environment variable.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard

from hfreduce.errors import TopologyError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["VERSION", "Place", "Topology", "load_topology", "parse_topology"]

VERSION = 1
"""The one version of the file that there is so far."""

_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Place:
    """Where one rank runs."""

    node: str
    zone: str
    address: str | None = None
    """The IP address at which other nodes reach it, if the file gives one."""


@dataclass(frozen=True, slots=True)
class Topology:
    """The machines of a job in rank order."""

    nodes: tuple[Place, ...]
    ranks_per_node: int
    bridges: tuple[tuple[str, str], ...]
    """One pair of nodes for every border between two zones."""
    source: str

    @property
    def world_size(self) -> int:
        """How many ranks the file describes."""
        return len(self.nodes) * self.ranks_per_node

    def place(self, rank: int) -> Place:
        """The place of a global rank: ranks fill one node after the other."""
        return self.nodes[rank // self.ranks_per_node]

    def places(self, ranks: Sequence[int], world_size: int) -> list[Place]:
        """The places of `ranks` in a job of `world_size` ranks, which must be the file's own."""
        if world_size != self.world_size:
            raise TopologyError(
                self.source,
                "ranks_per_node",
                f"{len(self.nodes)} nodes of {self.ranks_per_node} ranks are {self.world_size}, "
                f"but the job has {world_size} (WORLD_SIZE); start as many or correct the file",
            )
        return [self.place(rank) for rank in ranks]


def load_topology(path: str | Path) -> Topology:
    """Reads and checks the file at `path`."""
    source = str(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TopologyError(source, "file", f"cannot be read: {error}") from error
    return parse_topology(text, source)


def parse_topology(text: str, source: str) -> Topology:
    """Checks the text of a topology file; `source` names it in errors."""
    try:
        document: object = json.loads(text)
    except (ValueError, RecursionError) as error:  # the latter for thousands of brackets
        raise TopologyError(source, "file", f"is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise TopologyError(source, "file", f"is a {type(document).__name__}, not an object")
    fields: Mapping[str, object] = document
    version = fields.get("version")
    if type(version) is not int or version != VERSION:
        raise _wrong(source, "version", version, f"{VERSION}")
    ranks_per_node = fields.get("ranks_per_node")
    if type(ranks_per_node) is not int or ranks_per_node < 1:
        raise _wrong(source, "ranks_per_node", ranks_per_node, "a whole number above 0")
    nodes = _nodes(fields.get("nodes"), source)
    bridges = _bridges(fields.get("bridge"), nodes, source)
    return Topology(nodes, ranks_per_node, bridges, source)


def _nodes(value: object, source: str) -> tuple[Place, ...]:
    if not isinstance(value, list) or not value:
        raise _wrong(source, "nodes", value, "a list of at least one node")
    places: list[Place] = []
    seen: dict[str, int] = {}
    for index, node in enumerate(value):
        field = f"nodes[{index}]"
        if not isinstance(node, dict):
            raise _wrong(source, field, node, "an object with name and zone")
        name, zone, address = (node.get(key) for key in ("name", "zone", "address"))
        if not _is_text(name):
            raise _wrong(source, f"{field}.name", name, "a name")
        if not _is_text(zone):
            raise _wrong(source, f"{field}.zone", zone, "a name")
        if address is not None and not _is_text(address):
            raise _wrong(source, f"{field}.address", address, "an IP address")
        if name in seen:
            raise _wrong(source, f"{field}.name", name, f"a name other than nodes[{seen[name]}]'s")
        seen[name] = index
        places.append(Place(name, zone, address))
    return tuple(places)


def _bridges(value: object, nodes: Sequence[Place], source: str) -> tuple[tuple[str, str], ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) % 2:
        raise _wrong(source, "bridge", value, "a list of node names, two for each bridge")
    zones = {place.node: place.zone for place in nodes}
    for name in value:
        if not isinstance(name, str) or name not in zones:
            raise _wrong(source, "bridge", name, "the name of a node in `nodes`")
    pairs = tuple(zip(value[::2], value[1::2], strict=True))
    for pair in pairs:
        if zones[pair[0]] == zones[pair[1]]:
            raise _wrong(source, "bridge", pair, f"nodes of two zones, but of {zones[pair[0]]}")
    return pairs


def _is_text(value: object) -> TypeGuard[str]:
    """A word that other processes can be told: JSON can spell half of a surrogate pair."""
    return isinstance(value, str) and bool(value) and not _SURROGATE.search(value)


def _wrong(source: str, field: str, value: object, expected: str) -> TopologyError:
    return TopologyError(source, field, f"{value!r} is not {expected}")
