"""Rendezvous through torch's store: all-gathers of small values with O(N) requests in all.

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
import os
import secrets
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

from hfreduce import _native
from hfreduce.errors import RendezvousError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hfreduce._native import Membership

__all__ = ["Store", "StoreRendezvous"]

BATCH_KEYS = 256
"""Keys of one request: the answer stays far below the store's limit of 8 MiB a message."""
PART_CHARACTERS = 4 << 20
"""Of a blob in one value, below the same limit."""
GRACE_SECONDS = 2.0
"""Time beyond the collector's deadline for which the other ranks wait for its verdict."""
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


class StoreRendezvous:
    """The part of one rank in the rendezvous of its group; `_native.join` runs the phases."""

    def __init__(self, store: Store, membership: Membership) -> None:
        self._store = store
        self._rank = membership.rank
        self._ranks = membership.global_ranks

    @property
    def host(self) -> str | None:
        """Host of torch's store."""
        store: object = self._store
        while (under := getattr(store, "underlying_store", None)) is not None:
            store = under
        return getattr(store, "host", None) or os.environ.get("MASTER_ADDR")

    def exchange(self, phase: str, value: str, timeout_seconds: float) -> tuple[str, list[bytes]]:
        """Publishes `value`; returns a random name, equal on all ranks, and the ranks' values."""
        deadline = time.monotonic() + timeout_seconds
        self._store.set(f"hfreduce/{phase}/{self._ranks[self._rank]}", value)
        if self._rank == 0:
            return self._collect(phase, deadline)
        return self._decode(phase, self._read_blob(phase, deadline + GRACE_SECONDS))

    def key(self, timeout_seconds: float) -> bytes:
        """A new key from rank 0. Every process that can read torch's store belongs to the job."""
        name = f"hfreduce/key/{self._ranks[0]}"
        if self._rank == 0:
            self._store.set(name, secrets.token_bytes(KEY_BYTES).hex())
        return bytes.fromhex(self._wait("key", name, time.monotonic() + timeout_seconds).decode())

    def _collect(self, phase: str, deadline: float) -> tuple[str, list[bytes]]:
        keys = [f"hfreduce/{phase}/{rank}" for rank in self._ranks]
        values: list[bytes] = []
        try:
            for start in range(0, len(keys), BATCH_KEYS):
                batch = keys[start : start + BATCH_KEYS]
                self._store.wait(batch, _remaining(deadline))
                values += self._multi_get(batch)
        except RuntimeError as error:
            absent = self._absent(phase, keys, error)
            self._publish(phase, {"absent": absent})
            raise self._absence(phase, absent, str(error)) from error
        name = secrets.token_hex(8)
        try:
            self._publish(phase, {"meeting": name, "ranks": len(values)}, values)
        except ValueError as error:
            self._publish(phase, {"trouble": str(error)})
            raise self._error(phase, str(error)) from error
        return name, values

    def _multi_get(self, keys: list[str]) -> list[bytes]:
        """One request where the store has it; torch's FileStore has not."""
        extended = getattr(self._store, "has_extended_api", None)
        multi_get = getattr(self._store, "multi_get", None)
        if extended is not None and multi_get is not None and extended():
            return list(multi_get(keys))
        return [self._store.get(key) for key in keys]

    def _publish(self, phase: str, head: dict[str, object], values: Sequence[bytes] = ()) -> None:
        """One line of JSON, and the values in the form that ranks without torch exchange, too."""
        line = json.dumps(head, separators=(",", ":"))
        text = f"{line}\n{base64.b64encode(_native.pack(values)).decode()}"
        parts = [text[at : at + PART_CHARACTERS] for at in range(0, len(text), PART_CHARACTERS)]
        # The first part is set last: a rank that reads it can read all parts.
        for index, part in reversed(list(enumerate(parts))):
            value = f"{len(parts)} {part}" if index == 0 else part
            self._store.set(self._part(phase, index), value)

    def _part(self, phase: str, index: int) -> str:
        return f"hfreduce/{phase}/all/{self._ranks[0]}/{index}"

    def _read_blob(self, phase: str, deadline: float) -> bytes:
        first = self._wait(phase, self._part(phase, 0), deadline)
        count, _, text = first.partition(b" ")
        most = _parts_max(len(self._ranks))
        # int() raises a different error for thousands of digits.
        if not count.isdigit() or len(count) > len(str(most)) or int(count) > most:
            raise self._error(phase, f"rank 0 published {count[:20]!r} parts; use one release")
        parts = [self._part(phase, index) for index in range(1, int(count))]
        # They are there unless rank 0 is wrong about their number.
        return b"".join([text, *(self._wait(phase, part, deadline) for part in parts)])

    def _decode(self, phase: str, text: bytes) -> tuple[str, list[bytes]]:
        size = len(self._ranks)
        try:
            line, _, packed = text.partition(b"\n")
            head = json.loads(line)
            absent = [int(rank) for rank in head.get("absent", ())]
            ranks = int(head.get("ranks", 0))
            trouble, name = str(head.get("trouble", "")), str(head.get("meeting", ""))
            same = not absent and ranks == size
            values = _native.unpack(base64.b64decode(packed, validate=True), ranks) if same else []
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise self._error(
                phase, f"what rank 0 published cannot be read ({error}); use one release"
            ) from error
        if absent:
            raise self._absence(phase, absent, "")
        if trouble:
            raise self._error(phase, f"rank 0 could not publish: {trouble}")
        if ranks != size:
            raise self._error(phase, f"rank 0 has a group of {ranks}, this rank of {size}")
        return name, values

    def _wait(self, phase: str, key: str, deadline: float) -> bytes:
        """The value of a key of rank 0's."""
        try:
            self._store.wait([key], _remaining(deadline))
            return self._store.get(key)
        except RuntimeError as error:
            raise self._missing(phase, key, error) from error

    def _missing(self, phase: str, key: str, error: RuntimeError) -> RendezvousError:
        """Why a key of rank 0's is not there."""
        try:
            if self._store.check([key]):
                return self._error(phase, f"torch's store failed: {error}")
        except RuntimeError as store_error:
            return self._error(phase, f"torch's store is gone: {store_error}")
        return self._absence(phase, [0], str(error))

    def _absent(self, phase: str, keys: list[str], error: RuntimeError) -> list[int]:
        """The ranks whose keys do not exist."""
        try:
            absent = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
        except RuntimeError as store_error:
            raise self._error(phase, f"torch's store is gone: {store_error}") from error
        if not absent:
            raise self._error(phase, f"torch's store failed: {error}") from error
        return absent

    def _absence(self, phase: str, absent: list[int], cause: str) -> RendezvousError:
        size = len(self._ranks)
        if any(not 0 <= rank < size for rank in absent):
            return self._error(phase, f"rank 0 has another group: {cause or 'use one world size'}")
        ranks = [self._ranks[rank] for rank in absent]
        names = ", ".join(map(str, ranks))
        detail = f"rank {names} did not come in time ({size - len(absent)} of {size} did)"
        if absent == [0] and self._rank != 0:
            detail = f"rank {names}, which collects what the others bring, did not answer in time"
        return self._error(phase, detail, ranks)

    def _error(self, phase: str, detail: str, absent: Sequence[int] = ()) -> RendezvousError:
        return RendezvousError(detail, rank=self._ranks[self._rank], phase=phase, absent=absent)


def _parts_max(ranks: int) -> int:
    """Of a blob in base64, and of a line that names all ranks."""
    return (4 * _native.blob_bytes_max(ranks) // 3 + 8 * ranks) // PART_CHARACTERS + 1


def _remaining(deadline: float) -> timedelta:
    return timedelta(seconds=max(deadline - time.monotonic(), 0.001))
