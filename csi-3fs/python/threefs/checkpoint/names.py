"""Names in the folder of all checkpoints.

`step-00000040` is a checkpoint, `step-00000040.2` a newer one of the same step,
`step-00000040.tmp-ATTEMPT-NUMBER` one in the making, `trash.tmp-…` one being removed.
"""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = [
    "ANNOUNCED_NAME",
    "MANIFEST_NAME",
    "Name",
    "final_name",
    "is_leftover",
    "parse_name",
    "part_name",
    "shard_name",
    "temporary_name",
    "trash_name",
]

MANIFEST_NAME = "manifest.jsonl"
ANNOUNCED_NAME = "announced"
_FINAL = re.compile(r"step-(\d{8,})(?:\.(\d+))?")


class Name(NamedTuple):
    """Of a checkpoint; they sort from old to new."""

    step: int
    generation: int


def parse_name(name: str) -> Name | None:
    """None for anything that is no checkpoint's name."""
    match = _FINAL.fullmatch(name)
    return Name(int(match[1]), int(match[2] or 1)) if match else None


def final_name(step: int, generation: int) -> str:
    """Where a checkpoint is once it exists."""
    return f"step-{step:08d}" + (f".{generation}" if generation > 1 else "")


def temporary_name(step: int, save: str) -> str:
    """Where it is made."""
    return f"step-{step:08d}.tmp-{save}"


def trash_name(word: str) -> str:
    """Where it goes before it is removed."""
    return f"trash.tmp-{word}"


def is_leftover(name: str) -> bool:
    """Unfinished or half removed, of whatever attempt."""
    return ".tmp-" in name


def shard_name(rank: int) -> str:
    """A rank's bytes."""
    return f"shard-{rank:04d}.bin"


def part_name(rank: int) -> str:
    """A rank's part of the index, and the sign that its shard is durable."""
    return f"part-{rank:04d}.json"
