"""Rendezvous of the ranks of a group: allgathers of their placement and endpoints.

1. Every rank publishes its place and its view of the group. A rank that was started with another
   topology, world size or job is reported here, before any connection is opened. A group of ranks
   whose places are known from the exchange of the world skips this step.
2. Every rank publishes its endpoint (addresses and ports).
3. The engine connects; every connection is authenticated with the group's key.

An exchange costs O(N) requests in all and, for each rank, its own value and one shared blob
(`exchange.py`); lists of ranks are compared by digest.

Every wait has the same deadline and names the ranks that are absent.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from hfreduce import _native
from hfreduce.errors import RendezvousError
from hfreduce.exchange import Member, Store, gather, wait_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hfreduce._native import Place, Settings, Topology

__all__ = ["Meeting", "Membership", "Store", "connect", "join"]

KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class Membership:
    """This rank's membership in a group."""

    rank: int
    """The rank in this group."""
    global_ranks: tuple[int, ...]
    """The job's ranks of all members, in group order."""
    world_size: int
    """Ranks of the whole job."""

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.global_ranks)

    @property
    def digest(self) -> str:
        """Digest of the list of ranks; equal lists have equal digests."""
        text = ",".join(map(str, self.global_ranks))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


class Meeting(Protocol):
    """Allgather of small values between the ranks of a group before they are connected."""

    @property
    def host(self) -> str | None:
        """The host of the meeting, if it is known; peers are on the same network."""
        ...

    def exchange(self, phase: str, value: str, deadline: float) -> list[bytes]:
        """Returns the values of all ranks in rank order; `deadline` is one of `time.monotonic`."""
        ...

    def key(self, deadline: float) -> bytes:
        """Returns a key for this group if no key file is set."""
        ...


@dataclass(frozen=True, slots=True)
class _World:
    """The places of the job's ranks, known after the exchange of the world group."""

    meeting: str
    places: tuple[Place, ...]


_worlds: dict[tuple[str, int, int], _World] = {}
"""By job, world size and rank: a later world of the same name replaces the one before."""


def connect(
    store: Store, membership: Membership, settings: Settings, timeout_seconds: float
) -> _native.Communicator:
    """Joins the group through torch's store; all members must call this at about the same time."""
    return join(_StoreMeeting(store, membership), membership, settings, timeout_seconds)


def join(
    meeting: Meeting, membership: Membership, settings: Settings, timeout_seconds: float
) -> _native.Communicator:
    """Joins the group through this meeting."""
    deadline = time.monotonic() + timeout_seconds
    topology = (
        None if settings.topology_path is None else _native.load_topology(settings.topology_path)
    )
    own, bridge = _own_place(membership, settings, topology)
    if settings.daemon is None:
        # Before anything is published: peers would wait for the endpoint of a rank that has none.
        _native.check_descriptors(
            membership.rank, membership.size, own.node, job=settings.job, streams=settings.streams
        )
    world = _world_of(meeting, membership, settings)
    if world is None:
        places = _agree_on_places(meeting, membership, settings, topology, own, deadline)
        _remember(meeting, membership, settings, places)
    else:
        places = [world.places[rank] for rank in membership.global_ranks]
        own = places[membership.rank]
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
        lend=settings.peer_memory,
        streams=settings.streams,
        determinism=settings.determinism,
        priority=settings.priority,
        daemon=settings.daemon,
    )
    infos = _exchange_infos(meeting, membership, world, endpoint.info(), deadline)
    remaining = max(deadline - time.monotonic(), 0.1)
    communicator = endpoint.connect(infos, remaining)
    nodes = [place.node for place in places]
    if nodes.index(own.node) == membership.rank and len(set(nodes)) > 1:
        _say(f"node {own.node} is reached at {communicator.stats()['reached_at'] or 'no address'}")
    return communicator


def _world_of(meeting: Meeting, membership: Membership, settings: Settings) -> _World | None:
    """The world in which the places of this group's ranks are known, if it has met."""
    if not isinstance(meeting, _StoreMeeting) or _is_world(membership):
        return None
    own = membership.global_ranks[membership.rank]
    return _worlds.get((settings.job, membership.world_size, own))


def _remember(
    meeting: Meeting, membership: Membership, settings: Settings, places: Sequence[Place]
) -> None:
    if isinstance(meeting, _StoreMeeting) and _is_world(membership):
        name = (settings.job, membership.world_size, membership.rank)
        _worlds[name] = _World(meeting.latest, tuple(places))


def _is_world(membership: Membership) -> bool:
    return membership.global_ranks == tuple(range(membership.world_size))


def _exchange_infos(
    meeting: Meeting,
    membership: Membership,
    world: _World | None,
    info: bytes,
    deadline: float,
) -> list[bytes]:
    """Endpoints of all ranks; in a group of a known world also checks what step 1 would."""
    if world is None:
        return meeting.exchange("endpoint", info.decode(), deadline)
    message = {"world": world.meeting, "ranks": membership.digest, "info": info.decode()}
    infos: list[bytes] = []
    for index, answer in enumerate(meeting.exchange("endpoint", json.dumps(message), deadline)):
        other = json.loads(answer)
        problem = None
        if other["world"] != message["world"]:
            problem = "comes from another start of the job: start all ranks anew"
        elif other["ranks"] != message["ranks"]:
            problem = "has a different list of ranks: pass the same list on all ranks"
        if problem is not None:
            rank = membership.global_ranks[index]
            raise _error(membership, "endpoint", f"rank {rank} {problem}")
        infos.append(str(other["info"]).encode())
    return infos


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
        self._member = Member(membership.rank, membership.global_ranks)
        self.latest = ""
        """The name of the latest exchange."""

    @property
    def host(self) -> str | None:
        """Address of torch's store."""
        store: object = self._store
        while (under := getattr(store, "underlying_store", None)) is not None:
            store = under
        return getattr(store, "host", None) or os.environ.get("MASTER_ADDR")

    def exchange(self, phase: str, value: str, deadline: float) -> list[bytes]:
        """Publishes this rank's value and returns the values of all ranks in rank order."""
        gathered = gather(self._store, self._member, phase, value, deadline)
        self.latest = gathered.meeting
        return gathered.values

    def key(self, deadline: float) -> bytes:
        """A fresh key from rank 0. Every process that can read torch's store belongs to the job."""
        name = f"hfreduce/key/{self._member.global_ranks[0]}"
        if self._member.rank == 0:
            self._store.set(name, secrets.token_bytes(KEY_BYTES).hex())
        value = wait_for(self._store, self._member, "key", name, deadline)
        return bytes.fromhex(value.decode())


def _own_place(
    membership: Membership, settings: Settings, topology: Topology | None
) -> tuple[Place, tuple[str, str] | None]:
    """Place of this rank, and the cross-zone pair if both of its nodes are in the group."""
    if topology is None:
        return _native.Place(settings.node, settings.zone), None
    places = topology.places(membership.global_ranks, membership.world_size)
    nodes, zones = ({getattr(place, name) for place in places} for name in ("node", "zone"))
    own_bridges = [pair for pair in topology.bridges if nodes.issuperset(pair)]
    return places[membership.rank], own_bridges[0] if len(own_bridges) == 1 and len(
        zones
    ) == 2 else None


def _agree_on_places(
    meeting: Meeting,
    membership: Membership,
    settings: Settings,
    topology: Topology | None,
    own: Place,
    deadline: float,
) -> list[Place]:
    """The places that the ranks report, checked against the topology file of this rank."""
    message = {
        "place": {"node": own.node, "zone": own.zone, "address": own.address},
        "job": settings.job,
        "ranks": membership.digest,
        "size": membership.size,
        "bridges": [list(pair) for pair in topology.bridges] if topology else [],
    }
    answers = meeting.exchange("place", json.dumps(message), deadline)
    expected: list[Place] | None = None
    if topology is not None:
        expected = topology.places(membership.global_ranks, membership.world_size)
    places: list[Place] = []
    # Ranks of one node have equal answers.
    parsed = {answer: json.loads(answer) for answer in set(answers)}
    for index, answer in enumerate(answers):
        other = parsed[answer]
        place = _native.Place(**other["place"])
        problem = None
        if other["job"] != message["job"]:
            problem = f"belongs to job {other['job']!r}, this rank to {message['job']!r}"
        elif other["ranks"] != message["ranks"]:
            sizes = f"{other['size']} ranks, this rank in one of {message['size']}"
            problem = f"is in a group of {sizes}, or their lists of ranks differ"
        elif other["bridges"] != message["bridges"]:
            problem = f"has bridges {other['bridges']}, this rank {message['bridges']}"
        elif expected is not None and place != expected[index]:
            problem = f"runs on {place}, but {settings.topology_path} says {expected[index]}"
        if problem is not None:
            raise _error(membership, "place", f"rank {membership.global_ranks[index]} {problem}")
        places.append(place)
    return places


def _error(membership: Membership, phase: str, detail: str) -> RendezvousError:
    return RendezvousError(detail, rank=membership.global_ranks[membership.rank], phase=phase)
