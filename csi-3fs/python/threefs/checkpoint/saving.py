"""One save: a snapshot in memory, then parts, manifest and commit in the background.

Ranks synchronize only through files. Each writes its shard, then its part file, to one temporary
folder; rank 0 waits for all parts, writes the manifest next to them and renames the folder. The
rename is the commit: only then the checkpoint exists, and all files that it names are durable.
"""

from __future__ import annotations

import errno
import logging
import mmap
import threading
import time
import uuid
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from threefs.checkpoint import manifest
from threefs.checkpoint.checksum import ALGORITHM, checksum
from threefs.checkpoint.errors import CheckpointError, CheckpointSupersededError
from threefs.checkpoint.files import BATCH_BYTES, REQUEST_BYTES
from threefs.checkpoint.manifest import Part, Piece
from threefs.checkpoint.names import (
    ANNOUNCED_NAME,
    MANIFEST_NAME,
    commit_name,
    final_name,
    parse_name,
    part_name,
    shard_name,
    trash_name,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from threefs.checkpoint.files import Files
    from threefs.checkpoint.tree import Leaf, Tree

__all__ = ["SaveHandle", "SaveJob", "Snapshot", "throw_away"]

POLL_SECONDS_MIN, POLL_SECONDS_MAX = 0.005, 0.1

_log = logging.getLogger(__name__)


class SaveHandle:
    """A save in progress. Complete once every rank's part is durable and the manifest committed."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.path: str | None = None
        """The checkpoint's folder, once durable."""
        self.error: CheckpointError | None = None
        self.bytes_written = 0
        """Bytes written by this rank."""
        self.write_seconds = 0.0
        self._done = threading.Event()

    @property
    def done(self) -> bool:
        """Whether the save has ended, successfully or not."""
        return self._done.is_set()

    @property
    def durable(self) -> bool:
        """Whether the complete checkpoint, of all ranks, is durable and can be loaded."""
        return self.done and self.error is None

    def wait(self, timeout: float | None = None) -> str:
        """Wait until durable; return the folder. Raises `CheckpointError` on failure or timeout."""
        if not self._done.wait(timeout):
            raise CheckpointError(f"step {self.step} is not durable after {timeout:g} s")
        if self.error is not None:
            raise self.error
        return self.path or ""


class Snapshot:
    """A reused memory buffer, and the pieces of the state that it holds."""

    def __init__(self) -> None:
        self._buffer = mmap.mmap(-1, mmap.PAGESIZE)
        self.length = 0

    def take(self, groups: list[tuple[dict[str, Leaf], list[Piece]]]) -> None:
        """Copy every piece to its position in the shard."""
        ends = [piece.offset + piece.length for _, pieces in groups for piece in pieces]
        self.length = max(ends, default=0)
        if len(self._buffer) < self.length:
            self._buffer = mmap.mmap(-1, self.length)
        for leaves, pieces in groups:
            for piece in pieces:
                leaves[piece.name].copy_into(self.view(piece), piece.global_offset)

    def view(self, piece: Piece) -> memoryview:
        """Return the bytes of a piece."""
        return memoryview(self._buffer)[piece.offset : piece.offset + piece.length]

    def range(self, offset: int, length: int) -> memoryview:
        """Return a range of bytes of the shard."""
        return memoryview(self._buffer)[offset : offset + length]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveJob:
    """Input of the background thread, which uses neither the training's state nor the manager."""

    files: Files
    folder: str
    """Folder of all checkpoints."""
    temporary: str
    """Id of this save."""
    save: str
    step: int
    rank: int
    world_size: int
    snapshot: Snapshot
    tree: Tree
    leaves: list[Leaf]
    pieces: list[Piece]
    own_tree: Tree
    own_leaves: list[Leaf]
    own_pieces: list[Piece]
    commit_seconds_max: float
    on_durable: Callable[[str], object] | None
    """Called by rank 0 once every rank's part is durable, before `wait` returns on any rank."""
    next_commit: Callable[[], int]
    """Returns the commit number of a checkpoint that is committed now; called by rank 0."""
    after_commit: Callable[[], None] | None
    """Clean-up by rank 0; its failure does not fail the save."""

    def run(self, handle: SaveHandle) -> None:
        """Run the save to completion; the handle reports the result."""
        started = time.monotonic()
        try:
            self._write_shard()
            handle.bytes_written = self.snapshot.length
            if self.rank == 0:
                handle.path = self._commit()
                self._announce(handle.path)
            else:
                handle.path = self._await_commit()
        except Exception as error:  # noqa: BLE001  every failure is reported in the handle
            kind = type(error) if isinstance(error, CheckpointError) else CheckpointError
            handle.error = kind(
                f"step {self.step} was not saved (rank {self.rank}, {self.temporary}): {error}"
            )
            handle.error.__cause__ = error
            _log.warning("%s", handle.error)
        handle.write_seconds = time.monotonic() - started
        handle._done.set()
        if handle.error is None and self.after_commit is not None:
            try:
                self.after_commit()
            except Exception as error:  # noqa: BLE001  old checkpoints only stay longer
                _log.warning("clean-up after step %d: %s", self.step, error)

    def _announce(self, path: str) -> None:
        """Notify the caller, then the other ranks, which may then release their nodes."""
        if self.on_durable is None:
            return
        try:
            self.on_durable(path)
        except Exception:  # noqa: BLE001  an error of the caller; the checkpoint exists
            _log.exception("step %d is durable, but on_durable failed", self.step)
        self.files.write_file(f"{path}/{ANNOUNCED_NAME}", b"announced\n")

    def _write_shard(self) -> None:
        """Write the shard before its part file, which records that the shard is durable."""
        shard = shard_name(self.rank)
        self.files.mkdir(self.temporary, parents=True, exist_ok=True)
        batch: list[tuple[str, int, Any]] = []
        path = f"{self.temporary}/{shard}"
        for offset in range(0, self.snapshot.length, REQUEST_BYTES):
            length = min(REQUEST_BYTES, self.snapshot.length - offset)
            batch.append((path, offset, self.snapshot.range(offset, length)))
            if len(batch) * REQUEST_BYTES >= BATCH_BYTES:
                self.files.batch_write(batch)
                batch = []
        if batch:
            self.files.batch_write(batch)
        if self.snapshot.length == 0:
            self.files.write_file(path, b"")
        entries = [manifest.entry_of(leaf) for leaf in self.leaves]
        part = Part(
            save=self.save,
            rank=self.rank,
            world_size=self.world_size,
            step=self.step,
            shard=shard,
            shard_bytes=self.snapshot.length,
            layout=manifest.layout_of(entries),
            pieces=[self._signed(piece) for piece in self.pieces],
            own_tree=self.own_tree,
            own_entries=[manifest.entry_of(leaf) for leaf in self.own_leaves],
            own_pieces=[self._signed(piece) for piece in self.own_pieces],
        )
        self.files.write_file(f"{self.temporary}/{part_name(self.rank)}", part.encode())

    def _signed(self, piece: Piece) -> Piece:
        return replace(piece, crc=checksum(ALGORITHM, self.snapshot.view(piece)))

    def _commit(self) -> str:
        parts = self._await_parts()
        for part in parts:
            size = self.files.stat(f"{self.temporary}/{part.shard}").size
            if size != part.shard_bytes:
                raise CheckpointError(
                    f"rank {part.rank} wrote {part.shard_bytes} bytes, the file has {size}"
                )
            if part.layout != parts[0].layout:
                raise CheckpointError(
                    f"rank {part.rank} has other tensors than rank 0: replicated state must have "
                    "the same names, dtypes and shapes on every rank (see `sharded`)"
                )
        entries = [manifest.entry_of(leaf) for leaf in self.leaves]
        whole = manifest.assemble(parts, self.tree, entries, ALGORITHM)
        self.files.write_file(f"{self.temporary}/{MANIFEST_NAME}", whole.encode())
        try:
            commit = self.next_commit()
        except CheckpointSupersededError:
            throw_away(self.files, self.folder, self.temporary)
            raise
        self.files.write_file(f"{self.temporary}/{commit_name(commit)}", b"")
        return self._rename_into_place()

    def _rename_into_place(self) -> str:
        """Commit under the next free name: an older checkpoint of the step is kept until then."""
        names = [parse_name(name) for name in self.files.listdir(self.folder)]
        generation = 1 + max(
            (name.generation for name in names if name and name.step == self.step), default=0
        )
        for attempt in range(generation, generation + 100):
            final = f"{self.folder}/{final_name(self.step, attempt)}"
            try:
                self.files.rename(self.temporary, final)
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    if self._is_own(final):
                        return final  # renamed, and only the answer was lost
                    raise
            else:
                return final
        raise CheckpointError(
            "no free name after 100 attempts: another process saves to this folder"
        )

    def _await_parts(self) -> list[Part]:
        deadline = time.monotonic() + self.commit_seconds_max
        parts: dict[int, Part] = {}
        pause_seconds = POLL_SECONDS_MIN
        while True:
            names = set(self.files.listdir(self.temporary))
            for rank in range(self.world_size):
                if rank not in parts and part_name(rank) in names:
                    data = self.files.read_file(f"{self.temporary}/{part_name(rank)}")
                    part = Part.decode(data)
                    if part is not None and part.save == self.save and part.rank == rank:
                        parts[rank] = part
            if len(parts) == self.world_size:
                return [parts[rank] for rank in range(self.world_size)]
            if time.monotonic() > deadline:
                missing = [str(rank) for rank in range(self.world_size) if rank not in parts]
                throw_away(self.files, self.folder, self.temporary)
                raise CheckpointError(
                    f"no part of rank {', '.join(missing)} after {self.commit_seconds_max:g} s"
                )
            time.sleep(pause_seconds)
            pause_seconds = min(pause_seconds * 1.5, POLL_SECONDS_MAX)

    def _await_commit(self) -> str:
        """On other ranks: wait until rank 0 has renamed or removed the folder."""
        deadline = time.monotonic() + 2 * self.commit_seconds_max
        temporary_name = self.temporary.rpartition("/")[2]
        pause_seconds = POLL_SECONDS_MIN
        while True:
            names = self.files.listdir(self.folder)
            if temporary_name not in names:
                final = self._find_committed(names)
                if self.on_durable is None or self.files.exists(f"{final}/{ANNOUNCED_NAME}"):
                    return final
            if time.monotonic() > deadline:
                raise CheckpointError("rank 0 did not commit it in time")
            time.sleep(pause_seconds)
            pause_seconds = min(pause_seconds * 1.5, POLL_SECONDS_MAX)

    def _find_committed(self, names: list[str]) -> str:
        for name in names:
            parsed = parse_name(name)
            if parsed and parsed.step == self.step and self._is_own(f"{self.folder}/{name}"):
                return f"{self.folder}/{name}"
        raise CheckpointError("rank 0, or a later attempt, gave this save up")

    def _is_own(self, folder: str) -> bool:
        try:
            part = Part.decode(self.files.read_file(f"{folder}/{part_name(self.rank)}"))
        except FileNotFoundError:
            return False
        return part is not None and part.save == self.save


def throw_away(files: Files, folder: str, path: str) -> None:
    """Remove a committed or unfinished checkpoint; its name is removed first, atomically.

    No reader sees a part of it under its name, and a concurrent commit of it fails.
    """
    trash = f"{folder}/{trash_name(uuid.uuid4().hex[:12])}"
    try:
        files.rename(path, trash)
    except FileNotFoundError:
        return  # committed, or removed by another process
    files.rmtree(trash, missing_ok=True)
