"""How the ranks of a group find each other: three exchanges of what everybody brings.

1. Every rank says where it runs and what it believes about the others. A rank that was started with
   another topology, world size or job is named here, before any connection is opened.
2. Every rank publishes its endpoint (addresses and ports).
3. The engine connects; every connection proves with the group's key that it belongs here.

Every wait has the same deadline and names the ranks that are absent.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import sys
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

from hfreduce import _native
from hfreduce.errors import RendezvousError
from hfreduce.topology import Place, Topology, load_topology

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hfreduce.settings import Settings

__all__ = ["Meeting", "Membership", "Store", "connect", "join"]

KEY_BYTES = 32


class Store(Protocol):
    """The part of torch's store that is used here."""

    def set(self, key: str, value: str, /) -> object:
        """Publishes a value."""
        ...

    def get(self, key: str, /) -> bytes:
        """The value, once it is there."""
        ...

    def check(self, keys: list[str], /) -> bool:
        """True if all keys are there."""
        ...

    def wait(self, keys: list[str], timeout: timedelta, /) -> object:
        """Returns when all keys are there; raises otherwise."""
        ...


@dataclass(frozen=True, slots=True)
class Membership:
    """Who we are in a group."""

    rank: int
    """Our rank in this group."""
    global_ranks: tuple[int, ...]
    """The job's ranks of all members, in group order."""
    world_size: int
    """Ranks of the whole job."""

    @property
    def size(self) -> int:
        """How many members there are."""
        return len(self.global_ranks)


class Meeting(Protocol):
    """Where ranks bring something and leave with what all have brought."""

    @property
    def host(self) -> str | None:
        """The machine where it is, if that is known: others are on the same network."""
        ...

    def exchange(self, phase: str, value: str, deadline: float) -> list[bytes]:
        """Everybody's value in rank order; `deadline` as of `time.monotonic`."""
        ...

    def key(self, deadline: float) -> bytes:
        """A key for this group, where no file holds one."""
        ...


def connect(
    store: Store, membership: Membership, settings: Settings, timeout_seconds: float
) -> _native.Communicator:
    """Joins the group through torch's store; all members must call this at about the same time."""
    return join(_StoreMeeting(store, membership), membership, settings, timeout_seconds)


def join(
    meeting: Meeting, membership: Membership, settings: Settings, timeout_seconds: float
) -> _native.Communicator:
    """Joins the group that meets there."""
    deadline = time.monotonic() + timeout_seconds
    topology = None if settings.topology_path is None else load_topology(settings.topology_path)
    own, bridge = _own_place(membership, settings, topology)
    places = _agree_on_places(meeting, membership, settings, topology, own, deadline)
    key = settings.key() or meeting.key(deadline)
    endpoint = _native.Endpoint(
        membership.rank,
        membership.size,
        [(place.node, place.zone) for place in places],
        key,
        job=settings.job,
        address=settings.address or own.address,
        towards=meeting.host,
        bridge=bridge,
        chunk_bytes=settings.chunk_bytes,
        liveness_timeout_seconds=settings.liveness_seconds,
        lend=settings.transport == "auto",
        streams=settings.streams,
        determinism=settings.determinism,
        priority=settings.priority,
        daemon=settings.daemon,
    )
    infos = meeting.exchange("endpoint", endpoint.info().hex(), deadline)
    remaining = max(deadline - time.monotonic(), 0.1)
    communicator = endpoint.connect([bytes.fromhex(info.decode()) for info in infos], remaining)
    nodes = [place.node for place in places]
    if nodes.index(own.node) == membership.rank and len(set(nodes)) > 1:
        _say(f"node {own.node} is reached at {communicator.stats()['reached_at'] or 'no address'}")
    return communicator


def _say(line: str) -> None:
    """A line in the job's log, unless the program logs in its own way."""
    log = logging.getLogger("hfreduce")
    if log.hasHandlers():
        log.info(line)
    else:
        sys.stderr.write(f"hfreduce: {line}\n")


class _StoreMeeting:
    """A meeting through torch's store."""

    def __init__(self, store: Store, membership: Membership) -> None:
        self._store = store
        self._membership = membership

    @property
    def host(self) -> str | None:
        """Where torch's store is."""
        store: object = self._store
        while (under := getattr(store, "underlying_store", None)) is not None:
            store = under
        return getattr(store, "host", None) or os.environ.get("MASTER_ADDR")

    def exchange(self, phase: str, value: str, deadline: float) -> list[bytes]:
        """Publishes our value and collects everybody's, in rank order."""
        keys = [f"hfreduce/{phase}/{rank}" for rank in range(self._membership.size)]
        self._store.set(keys[self._membership.rank], value)
        return [
            _await(self._store, phase, self._membership, keys, index, deadline)
            for index in range(len(keys))
        ]

    def key(self, deadline: float) -> bytes:
        """A fresh key of rank 0's. Whoever can read torch's store belongs to the job already."""
        name = "hfreduce/key"
        if self._membership.rank == 0:
            self._store.set(name, secrets.token_bytes(KEY_BYTES).hex())
        value = _await(self._store, "key", self._membership, [name], 0, deadline)
        return bytes.fromhex(value.decode())


def _await(
    store: Store,
    phase: str,
    membership: Membership,
    keys: Sequence[str],
    index: int,
    deadline: float,
) -> bytes:
    remaining = max(deadline - time.monotonic(), 0.001)
    try:
        store.wait([keys[index]], timedelta(seconds=remaining))
        return store.get(keys[index])
    except RuntimeError as error:
        try:
            absent = [i for i, key in enumerate(keys) if not store.check([key])]
        except RuntimeError as lost:
            raise _error(membership, phase, f"torch's store is gone: {lost}") from error
        if not absent:
            raise _error(membership, phase, f"torch's store failed: {error}") from error
        names = ", ".join(str(membership.global_ranks[i]) for i in absent)
        raise RendezvousError(
            f"rank {names} did not come in time ({len(keys) - len(absent)} of {len(keys)} did)",
            rank=membership.global_ranks[membership.rank],
            phase=phase,
            absent=[membership.global_ranks[i] for i in absent],
        ) from error


def _own_place(
    membership: Membership, settings: Settings, topology: Topology | None
) -> tuple[Place, tuple[str, str] | None]:
    """Where we run, and the bridge of the group if it has both of its ends."""
    if topology is None:
        return Place(socket.gethostname(), settings.zone or "default"), None
    places = topology.places(membership.global_ranks, membership.world_size)
    nodes, zones = ({getattr(place, name) for place in places} for name in ("node", "zone"))
    here = [pair for pair in topology.bridges if nodes.issuperset(pair)]
    return places[membership.rank], here[0] if len(here) == 1 and len(zones) == 2 else None


def _agree_on_places(
    meeting: Meeting,
    membership: Membership,
    settings: Settings,
    topology: Topology | None,
    own: Place,
    deadline: float,
) -> list[Place]:
    """Everybody's place as they say it themselves, compared with what our topology file says."""
    said = {
        "place": asdict(own),
        "job": settings.job,
        "ranks": list(membership.global_ranks),
        "bridges": [list(pair) for pair in topology.bridges] if topology else [],
    }
    answers = meeting.exchange("place", json.dumps(said), deadline)
    expected: list[Place] | None = None
    if topology is not None:
        expected = topology.places(membership.global_ranks, membership.world_size)
    places: list[Place] = []
    for index, answer in enumerate(answers):
        other = json.loads(answer)
        place = Place(**other["place"])
        problem = None
        if other["job"] != said["job"]:
            problem = f"belongs to job {other['job']!r}, this rank to {said['job']!r}"
        elif other["ranks"] != said["ranks"]:
            problem = f"takes the group for ranks {other['ranks']}, this rank for {said['ranks']}"
        elif other["bridges"] != said["bridges"]:
            problem = f"has bridges {other['bridges']}, this rank {said['bridges']}"
        elif expected is not None and place != expected[index]:
            problem = f"runs on {place}, but {settings.topology_path} says {expected[index]}"
        if problem is not None:
            raise _error(membership, "place", f"rank {membership.global_ranks[index]} {problem}")
        places.append(place)
    return places


def _error(membership: Membership, phase: str, detail: str) -> RendezvousError:
    return RendezvousError(detail, rank=membership.global_ranks[membership.rank], phase=phase)
