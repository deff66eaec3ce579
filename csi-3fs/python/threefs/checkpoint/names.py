"""Names in the folder of all checkpoints.

`step-00000040` is a checkpoint, `step-00000040.2` a newer one of the same step,
`step-00000040.tmp-ATTEMPT-NUMBER` one in the making, `trash.tmp-…` one being removed,
`load.tmp-ATTEMPT-NUMBER` what rank 0 chose for a load of that attempt. The empty folder
`attempt-CHAIN-00000003` says that attempt 3 of a job has begun. In a checkpoint the empty file
`commit-00000007` says that it is the seventh commit of the folder.
"""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = [
    "ANNOUNCED_NAME",
    "CHOICE_NAME",
    "MANIFEST_NAME",
    "Name",
    "attempt_name",
    "choice_folder",
    "commit_name",
    "final_name",
    "is_leftover",
    "parse_attempt",
    "parse_commit",
    "parse_name",
    "part_name",
    "shard_name",
    "temporary_name",
    "trash_name",
]

MANIFEST_NAME = "manifest.jsonl"
ANNOUNCED_NAME = "announced"
CHOICE_NAME = "choice.json"
_COMMIT = re.compile(r"commit-(\d{8,})")
_ATTEMPT = re.compile(r"attempt-(\w+)-(\d{8,})")
_FINAL = re.compile(r"step-(\d{8,})(?:\.(\d+))?")


class Name(NamedTuple):
    """Of a checkpoint; they sort from old to new."""

    step: int
    generation: int


def parse_name(name: str) -> Name | None:
    """None for anything that is no checkpoint's name."""
    match = _FINAL.fullmatch(name)
    return Name(int(match[1]), int(match[2] or 1)) if match else None


def commit_name(commit: int) -> str:
    """The file that holds a checkpoint's place in the order of commits."""
    return f"commit-{commit:08d}"


def parse_commit(names: list[str]) -> int:
    """The place of the checkpoint with these files; 0 for one from before there were any."""
    matches = [_COMMIT.fullmatch(name) for name in names]
    return max((int(match[1]) for match in matches if match), default=0)


def attempt_name(chain: str, number: int) -> str:
    """The sign that an attempt of a job has begun."""
    return f"attempt-{chain}-{number:08d}"


def parse_attempt(name: str) -> tuple[str, int] | None:
    """Chain and number; None for anything else."""
    match = _ATTEMPT.fullmatch(name)
    return (match[1], int(match[2])) if match else None


def choice_folder(load: str) -> str:
    """Where rank 0 publishes what it chose for a load."""
    return f"load.tmp-{load}"


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
