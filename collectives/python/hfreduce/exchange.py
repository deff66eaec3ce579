"""All-gather of small values through torch's store with O(N) requests in all.

Rank 0 of the group is the collector: every rank sets one key, the collector reads all of them in
batches and publishes one compressed blob, and every other rank reads the blob. A rank that does not
come is named in the blob, so that all ranks report the same absentees at the same time.

Keys have the job's ranks, not the group's: torch numbers groups by how many a process has made, and
where ranks make different ones at the same time, groups of other ranks have the same part of the
store.
"""

from __future__ import annotations

import base64
import json
import secrets
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

from hfreduce import _native
from hfreduce.errors import RendezvousError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Gathered", "Member", "Store", "gather", "wait_for"]

BATCH_KEYS = 256
"""Keys of one request: the answer stays far below the store's limit of 8 MiB a message."""
PART_CHARACTERS = 4 << 20
"""Of a blob in one value, below the same limit."""
GRACE_SECONDS = 2.0
"""Time beyond the collector's deadline for which the other ranks wait for its verdict."""


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
class Member:
    """A participant of the exchange."""

    rank: int
    """This rank in its group."""
    global_ranks: Sequence[int]
    """The job's ranks of all members, in group order: for messages."""


@dataclass(frozen=True, slots=True)
class Gathered:
    """What all ranks brought."""

    values: list[bytes]
    """In rank order."""
    meeting: str
    """A random name of this very exchange, equal on all ranks."""


def gather(store: Store, member: Member, phase: str, value: str, deadline: float) -> Gathered:
    """Publishes `value` and returns those of all ranks; `deadline` is one of `time.monotonic`."""
    store.set(_own(phase, member.global_ranks[member.rank]), value)
    if member.rank == 0:
        return _collect(store, member, phase, deadline)
    return _decode(member, phase, _read_blob(store, member, phase, deadline + GRACE_SECONDS))


def wait_for(store: Store, member: Member, phase: str, key: str, deadline: float) -> bytes:
    """The value of a key of rank 0's."""
    try:
        store.wait([key], _left(deadline))
        return store.get(key)
    except RuntimeError as error:
        raise _absence(store, member, phase, key, [0], error) from error


def _collect(store: Store, member: Member, phase: str, deadline: float) -> Gathered:
    keys = [_own(phase, rank) for rank in member.global_ranks]
    values: list[bytes] = []
    try:
        for start in range(0, len(keys), BATCH_KEYS):
            batch = keys[start : start + BATCH_KEYS]
            store.wait(batch, _left(deadline))
            values += _multi_get(store, batch)
    except RuntimeError as error:
        absent = _absent(store, member, phase, keys, error)
        _publish(store, member, phase, {"absent": absent})
        raise _named(member, phase, absent, str(error)) from error
    meeting = secrets.token_hex(8)
    try:
        _publish(store, member, phase, {"meeting": meeting, "ranks": len(values)}, values)
    except ValueError as error:
        _publish(store, member, phase, {"trouble": str(error)})
        raise _error(member, phase, str(error)) from error
    return Gathered(values, meeting)


def _multi_get(store: Store, keys: list[str]) -> list[bytes]:
    """One request where the store has it; torch's FileStore has not."""
    extended = getattr(store, "has_extended_api", None)
    multi_get = getattr(store, "multi_get", None)
    if extended is not None and multi_get is not None and extended():
        return list(multi_get(keys))
    return [store.get(key) for key in keys]


def _publish(
    store: Store,
    member: Member,
    phase: str,
    head: dict[str, object],
    values: Sequence[bytes] = (),
) -> None:
    """One line of JSON, and the values in the form that ranks without torch exchange, too."""
    line = json.dumps(head, separators=(",", ":"))
    text = f"{line}\n{base64.b64encode(_native.pack(values)).decode()}"
    parts = [text[at : at + PART_CHARACTERS] for at in range(0, len(text), PART_CHARACTERS)]
    # The first part is set last: a rank that reads it can read all parts.
    for index, part in reversed(list(enumerate(parts))):
        store.set(_part(member, phase, index), f"{len(parts)} {part}" if index == 0 else part)


def _own(phase: str, global_rank: int) -> str:
    return f"hfreduce/{phase}/{global_rank}"


def _part(member: Member, phase: str, index: int) -> str:
    return f"hfreduce/{phase}/all/{member.global_ranks[0]}/{index}"


def _read_blob(store: Store, member: Member, phase: str, deadline: float) -> bytes:
    first = wait_for(store, member, phase, _part(member, phase, 0), deadline)
    count, _, text = first.partition(b" ")
    most = _parts_max(len(member.global_ranks))
    # int() raises a different error for thousands of digits.
    if not count.isdigit() or len(count) > len(str(most)) or int(count) > most:
        raise _error(member, phase, f"rank 0 published {count[:20]!r} parts; use one release")
    parts = [_part(member, phase, index) for index in range(1, int(count))]
    # They are there unless rank 0 is wrong about their number.
    return b"".join([text, *(wait_for(store, member, phase, part, deadline) for part in parts)])


def _parts_max(ranks: int) -> int:
    """Of a blob in base64, and of a line that names all ranks."""
    return (4 * _native.blob_bytes_max(ranks) // 3 + 8 * ranks) // PART_CHARACTERS + 1


def _decode(member: Member, phase: str, text: bytes) -> Gathered:
    size = len(member.global_ranks)
    try:
        line, _, packed = text.partition(b"\n")
        head = json.loads(line)
        absent = [int(rank) for rank in head.get("absent", ())]
        ranks = int(head.get("ranks", 0))
        trouble, meeting = str(head.get("trouble", "")), str(head.get("meeting", ""))
        same = not absent and ranks == size
        values = _native.unpack(base64.b64decode(packed, validate=True), ranks) if same else []
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise _error(
            member, phase, f"what rank 0 published cannot be read ({error}); use one release"
        ) from error
    if absent:
        raise _named(member, phase, absent, "")
    if trouble:
        raise _error(member, phase, f"rank 0 could not publish: {trouble}")
    if ranks != size:
        raise _error(member, phase, f"rank 0 has a group of {ranks}, this rank of {size}")
    return Gathered(values, meeting)


def _absence(
    store: Store, member: Member, phase: str, key: str, ranks: list[int], error: RuntimeError
) -> RendezvousError:
    """Why a key of rank 0's is not there."""
    try:
        if store.check([key]):
            return _error(member, phase, f"torch's store failed: {error}")
    except RuntimeError as store_error:
        return _error(member, phase, f"torch's store is gone: {store_error}")
    return _named(member, phase, ranks, str(error))


def _absent(
    store: Store, member: Member, phase: str, keys: list[str], error: RuntimeError
) -> list[int]:
    """The ranks whose keys do not exist."""
    try:
        absent = [rank for rank, key in enumerate(keys) if not store.check([key])]
    except RuntimeError as store_error:
        raise _error(member, phase, f"torch's store is gone: {store_error}") from error
    if not absent:
        raise _error(member, phase, f"torch's store failed: {error}") from error
    return absent


def _named(member: Member, phase: str, absent: list[int], cause: str) -> RendezvousError:
    own = member.global_ranks[member.rank]
    size = len(member.global_ranks)
    if any(not 0 <= rank < size for rank in absent):
        return _error(member, phase, f"rank 0 has another group: {cause or 'use one world size'}")
    ranks = [member.global_ranks[rank] for rank in absent]
    names = ", ".join(map(str, ranks))
    detail = f"rank {names} did not come in time ({size - len(absent)} of {size} did)"
    if absent == [0] and member.rank != 0:
        detail = f"rank {names}, which collects what the others bring, did not answer in time"
    return RendezvousError(detail, rank=own, phase=phase, absent=ranks)


def _left(deadline: float) -> timedelta:
    return timedelta(seconds=max(deadline - time.monotonic(), 0.001))


def _error(member: Member, phase: str, detail: str) -> RendezvousError:
    return RendezvousError(detail, rank=member.global_ranks[member.rank], phase=phase)
