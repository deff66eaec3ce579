"""Loading of a checkpoint; every byte is verified against the manifest."""

from __future__ import annotations

import errno
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from threefs.checkpoint.checksum import checksum
from threefs.checkpoint.errors import CheckpointDamagedError, CheckpointError
from threefs.checkpoint.files import BATCH_BYTES, REQUEST_BYTES
from threefs.checkpoint.manifest import Manifest
from threefs.checkpoint.names import MANIFEST_NAME
from threefs.checkpoint.tree import rebuild, unflatten

if TYPE_CHECKING:
    from threefs.checkpoint.files import Files
    from threefs.checkpoint.manifest import Entry, Piece

__all__ = [
    "LoadReport",
    "Loaded",
    "Skipped",
    "is_damage",
    "read_checkpoint",
    "read_manifest",
    "verify_others",
]


@dataclass(frozen=True, slots=True)
class Skipped:
    """A checkpoint that was not used, with the reason."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Newer checkpoints that were skipped as damaged."""

    skipped: list[Skipped] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A checkpoint in memory."""

    step: int
    path: str
    state: dict[str, Any]
    sharded: Any
    """State that this rank saved with `sharded`."""
    report: LoadReport


def is_damage(error: BaseException) -> bool:
    """Whether the data is damaged, as opposed to unavailable: only then an older one may be used.

    If one rank fell back because a server was slow, ranks would continue from different steps.
    """
    if isinstance(error, CheckpointDamagedError | FileNotFoundError):
        return True
    return isinstance(error, OSError) and error.errno == errno.EIO


def read_manifest(files: Files, path: str) -> Manifest:
    """Return the manifest of a checkpoint's folder."""
    try:
        return Manifest.decode(files.read_file(f"{path}/{MANIFEST_NAME}"))
    except FileNotFoundError as error:
        raise CheckpointDamagedError("it has no manifest") from error


def read_checkpoint(
    files: Files, path: str, manifest: Manifest, rank: int, world_size: int
) -> tuple[Any, Any]:
    """Read the replicated state, for any number of ranks, and the rank's sharded state."""
    for shard, size in manifest.shards.items():
        try:
            actual = files.stat(f"{path}/{shard}").size
        except FileNotFoundError as error:
            raise CheckpointDamagedError(f"`{shard}` is missing") from error
        if actual != size:
            raise CheckpointDamagedError(f"`{shard}` has {actual} bytes instead of {size}")
    reader = _Reader(files, path, manifest.algorithm)
    state = reader.state(manifest.tree, manifest.entries, manifest.pieces)
    if world_size != manifest.world_size:
        if any(own["entries"] for own in manifest.own):
            raise CheckpointError(
                f"{path} holds sharded state of {manifest.world_size} ranks, not of {world_size}: "
                "load it on as many"
            )
        return state, {}
    return state, reader.state(*manifest.own_of(rank))


def verify_others(files: Files, path: str, manifest: Manifest, rank: int) -> None:
    """Verify the sharded state of the other ranks; `read_checkpoint` has verified the rest."""
    reader = _Reader(files, path, manifest.algorithm)
    for other in range(manifest.world_size):
        if other != rank:
            reader.verify(manifest.own_of(other)[2])


class _Reader:
    def __init__(self, files: Files, path: str, algorithm: str) -> None:
        self._files = files
        self._path = path
        self._algorithm = algorithm

    def state(self, tree: Any, entries: list[Entry], pieces: list[Piece]) -> Any:
        for entry in entries:
            if entry.length < 0 or any(extent < 0 for extent in entry.shape):
                raise CheckpointDamagedError(f"`{entry.name}` has no such size")
        buffers = {entry.name: bytearray(entry.length) for entry in entries}
        batch: list[Piece] = []
        batch_bytes = 0
        for piece in pieces:
            batch.append(piece)
            batch_bytes += piece.length
            if batch_bytes >= BATCH_BYTES:
                self._fill(buffers, batch)
                batch, batch_bytes = [], 0
        self._fill(buffers, batch)
        kinds = {entry.name: entry for entry in entries}

        def load(name: str) -> Any:
            entry = kinds.get(name)
            if entry is None:
                raise CheckpointDamagedError(f"the index lacks `{name}`")
            return rebuild(entry.kind, entry.dtype, tuple(entry.shape), buffers[name])

        return unflatten(tree, load)

    def verify(self, pieces: list[Piece]) -> None:
        """Read and verify pieces in bounded memory, and discard them."""
        for piece in pieces:
            crc = 0
            for at in range(0, piece.length, BATCH_BYTES):
                end = min(at + BATCH_BYTES, piece.length)
                shard = f"{self._path}/{piece.shard}"
                reads = [
                    (shard, piece.offset + start, min(REQUEST_BYTES, end - start))
                    for start in range(at, end, REQUEST_BYTES)
                ]
                for (_, _, length), data in zip(reads, self._files.batch_read(reads), strict=True):
                    if len(data) != length:
                        raise CheckpointDamagedError(
                            f"`{piece.shard}` ends inside of `{piece.name}`"
                        )
                    crc = checksum(self._algorithm, data, crc)
            if crc != piece.crc:
                raise CheckpointDamagedError(
                    f"`{piece.name}` in `{piece.shard}` has a wrong checksum"
                )

    def _fill(self, buffers: dict[str, bytearray], pieces: list[Piece]) -> None:
        reads, places = [], []
        for piece in pieces:
            for at in range(0, piece.length, REQUEST_BYTES):
                length = min(REQUEST_BYTES, piece.length - at)
                reads.append((f"{self._path}/{piece.shard}", piece.offset + at, length))
                places.append((piece, at, length))
        for (piece, at, length), data in zip(places, self._files.batch_read(reads), strict=True):
            if len(data) != length:
                raise CheckpointDamagedError(f"`{piece.shard}` ends inside of `{piece.name}`")
            start = piece.global_offset + at
            buffers[piece.name][start : start + length] = data
        for piece in pieces:
            end = piece.global_offset + piece.length
            run = memoryview(buffers[piece.name])[piece.global_offset : end]
            if checksum(self._algorithm, run) != piece.crc:
                raise CheckpointDamagedError(
                    f"`{piece.name}` in `{piece.shard}` has a wrong checksum"
                )
