"""Manifest of a DCP checkpoint: where each item is stored, and its checksums. Pure, without torch.

One line with the CRC-32 and the lengths of the rest, then the index as JSON, then DCP's metadata
as the planner made it, pickled as DCP's `FileSystemWriter` does.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict, dataclass
from typing import Any

from threefs.checkpoint.errors import CheckpointDamagedError

__all__ = ["BLOCK_BYTES", "Index", "Item", "decode_index", "encode_index"]

VERSION = 1
BLOCK_BYTES = 1024 * 1024
"""Bytes of an item per checksum: a part of an item is verified without reading all of it."""


@dataclass(frozen=True, slots=True)
class Item:
    """A tensor shard, contiguous, or the bytes of an object, in one shard file."""

    fqn: str
    origin: list[int] | None
    """Offsets in the global tensor; None for an object."""
    shard: str
    offset: int
    """Offset in the shard."""
    length: int
    dtype: str
    """Empty for an object."""
    shape: list[int]
    checksums: list[int]
    """One for each block of the item."""


@dataclass(frozen=True, slots=True)
class Index:
    """All items of a checkpoint."""

    save: str
    """Identifies this save among all saves."""
    algorithm: str
    block_bytes: int
    shards: dict[str, int]
    """Names and bytes of the shards."""
    items: list[Item]

    def check(self, path: str) -> None:
        """Check that every item lies inside its shard and has a checksum for each block."""
        if self.block_bytes <= 0:
            raise CheckpointDamagedError(f"{path}: the manifest has blocks of {self.block_bytes} B")
        for item in self.items:
            end = item.offset + item.length
            blocks = -(-item.length // self.block_bytes)
            inside = 0 <= item.offset <= end <= self.shards.get(item.shard, -1)
            if "/" in item.shard or not inside or len(item.checksums) != blocks:
                raise CheckpointDamagedError(
                    f"{path}: the manifest has an invalid place for `{item.fqn}`"
                )


def encode_index(index: Index, metadata: bytes) -> bytes:
    """Encode a manifest; `metadata` is returned by `decode_index` as it is."""
    body = json.dumps(
        {**asdict(index), "items": [list(asdict(item).values()) for item in index.items]}
    ).encode()
    header = {
        "version": VERSION,
        "index_bytes": len(body),
        "metadata_bytes": len(metadata),
        "crc32": zlib.crc32(metadata, zlib.crc32(body)),
    }
    return json.dumps(header).encode() + b"\n" + body + metadata


def decode_index(data: bytes, path: str) -> tuple[Index, bytes]:
    """Decode and verify; an error names the checkpoint's path."""
    line, _, rest = data.partition(b"\n")
    try:
        header: dict[str, Any] = json.loads(line)
        if header["version"] != VERSION:
            raise CheckpointDamagedError(
                f"{path}: the manifest has version {header['version']}; this code reads {VERSION}"
            )
        length = header["index_bytes"]
        if len(rest) != length + header["metadata_bytes"]:
            raise CheckpointDamagedError(f"{path}: the manifest is truncated")
        if zlib.crc32(rest) != header["crc32"]:
            raise CheckpointDamagedError(f"{path}: the manifest's checksum is wrong")
        body = json.loads(rest[:length])
        index = Index(**{**body, "items": [Item(*item) for item in body["items"]]})
        index.check(path)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointDamagedError(f"{path}: the manifest is torn: {error!r:.100}") from error
    return index, rest[length:]
