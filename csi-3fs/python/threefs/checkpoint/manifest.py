"""Manifest of a checkpoint: assignment of bytes to ranks, and the index. Pure.

The bytes of all replicated leaves, in name order, form one stream. It is split into one range per
rank, each a whole number of pages except the last: all ranks write about the same amount, and
several ranks write a large tensor. A rank's sharded leaves follow its range in its shard.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from threefs.checkpoint.errors import CheckpointDamagedError

if TYPE_CHECKING:
    from threefs.checkpoint.tree import Leaf, Tree

__all__ = ["VERSION", "Entry", "Manifest", "Part", "Piece", "assemble", "entry_of", "split"]

VERSION = 1
PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Piece:
    """A contiguous range of one leaf's bytes in one shard."""

    name: str
    global_offset: int
    """Offset in the leaf."""
    shard: str
    offset: int
    """Offset in the shard."""
    length: int
    crc: int = 0


@dataclass(frozen=True, slots=True)
class Entry:
    """Description of a leaf."""

    name: str
    kind: str
    dtype: str
    shape: list[int]
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Part of one rank. Written after its shard is durable."""

    save: str
    """Identifies the save and the attempt: parts of different saves are never mixed."""
    rank: int
    world_size: int
    step: int
    shard: str
    shard_bytes: int
    layout: int
    """Checksum of the replicated entries: ranks whose states differ must not share a checkpoint."""
    pieces: list[Piece]
    own_tree: Tree = None
    own_entries: list[Entry] = field(default_factory=list)
    own_pieces: list[Piece] = field(default_factory=list)

    def encode(self) -> bytes:
        """One JSON object."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> Part | None:
        """None while the file is incomplete."""
        try:
            body = json.loads(data)
            return cls(
                **{
                    **body,
                    "pieces": [Piece(**piece) for piece in body["pieces"]],
                    "own_entries": [Entry(**entry) for entry in body["own_entries"]],
                    "own_pieces": [Piece(**piece) for piece in body["own_pieces"]],
                }
            )
        except (ValueError, TypeError, KeyError):
            return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Description of a complete checkpoint. Two lines: the body, and the CRC-32 of the body."""

    step: int
    save: str
    world_size: int
    algorithm: str
    tree: Tree
    entries: list[Entry]
    pieces: list[Piece]
    shards: dict[str, int]
    """Names and bytes of the shards."""
    own: list[dict[str, Any]]
    """{tree, entries, pieces} of each rank."""
    version: int = VERSION

    def encode(self) -> bytes:
        """Encode the manifest with its checksum."""
        body = json.dumps(asdict(self)).encode()
        return body + b'\n{"crc32": %d}\n' % zlib.crc32(body)

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """Decode; raises `CheckpointDamagedError` if the manifest is incomplete or inconsistent."""
        body, _, last = data.partition(b"\n")
        try:
            if json.loads(last)["crc32"] != zlib.crc32(body):
                raise CheckpointDamagedError("the manifest's checksum is wrong")
            fields = json.loads(body)
            if fields["version"] != VERSION:
                raise CheckpointDamagedError(
                    f"the manifest has version {fields['version']}; this code reads {VERSION}"
                )
            manifest = cls(
                **{
                    **fields,
                    "entries": [Entry(**entry) for entry in fields["entries"]],
                    "pieces": [Piece(**piece) for piece in fields["pieces"]],
                }
            )
            manifest.check(manifest.entries, manifest.pieces)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointDamagedError(f"the manifest is torn: {error!r:.100}") from error
        return manifest

    def own_of(self, rank: int) -> tuple[Tree, list[Entry], list[Piece]]:
        """A rank's sharded state."""
        own = self.own[rank]
        entries = [Entry(**entry) for entry in own["entries"]]
        pieces = [Piece(**piece) for piece in own["pieces"]]
        self.check(entries, pieces)
        return own["tree"], entries, pieces

    def check(self, entries: list[Entry], pieces: list[Piece]) -> None:
        """Check that every leaf is covered exactly once, by pieces inside known shards."""
        at = {entry.name: 0 for entry in entries}
        for piece in sorted(pieces, key=lambda piece: (piece.name, piece.global_offset)):
            if at.get(piece.name) != piece.global_offset or piece.length <= 0:
                raise CheckpointDamagedError(f"the index of `{piece.name}` has a gap")
            at[piece.name] += piece.length
            size = self.shards.get(piece.shard, -1)
            if "/" in piece.shard or piece.offset < 0 or piece.offset + piece.length > size:
                raise CheckpointDamagedError(f"`{piece.name}` lies outside of `{piece.shard}`")
        for entry in entries:
            if at[entry.name] != entry.length:
                raise CheckpointDamagedError(f"the index of `{entry.name}` is incomplete")


def entry_of(leaf: Leaf) -> Entry:
    """Describe a leaf for the manifest."""
    return Entry(leaf.name, leaf.kind, leaf.dtype, list(leaf.shape), leaf.length)


def layout_of(entries: list[Entry]) -> int:
    """A checksum that is equal on ranks whose states have the same names, kinds and shapes.

    Plain values (a rate, a counter) are taken from rank 0 and not compared.
    """
    return zlib.crc32(json.dumps([asdict(entry) for entry in entries]).encode())


def split(leaves: list[Leaf], rank: int, world_size: int, shard: str) -> list[Piece]:
    """The pieces of the replicated stream that a rank writes, in order, from its shard's start."""
    total = sum(leaf.length for leaf in leaves)
    pages = -(-total // PAGE_BYTES)
    cuts = [min(pages * n // world_size * PAGE_BYTES, total) for n in range(world_size)] + [total]
    start, end = list(pairwise(cuts))[rank]
    pieces, at = [], 0
    for leaf in leaves:
        low, high = max(start, at), min(end, at + leaf.length)
        if low < high:
            pieces.append(Piece(leaf.name, low - at, shard, low - start, high - low))
        at += leaf.length
    return pieces


def assemble(parts: list[Part], tree: Tree, entries: list[Entry], algorithm: str) -> Manifest:
    """Build the manifest of a checkpoint whose parts are complete and consistent."""
    manifest = Manifest(
        step=parts[0].step,
        save=parts[0].save,
        world_size=len(parts),
        algorithm=algorithm,
        tree=tree,
        entries=entries,
        pieces=[piece for part in parts for piece in part.pieces],
        shards={part.shard: part.shard_bytes for part in parts},
        own=[
            {
                "tree": part.own_tree,
                "entries": [asdict(entry) for entry in part.own_entries],
                "pieces": [asdict(piece) for piece in part.own_pieces],
            }
            for part in parts
        ],
    )
    manifest.check(manifest.entries, manifest.pieces)
    return manifest
