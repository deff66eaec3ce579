"""File and folder names of checkpoints.

`step-00000040` is a checkpoint, `step-00000040.2` a newer one of the same step,
`step-00000040.tmp-ATTEMPT-NUMBER` an unfinished one, `trash.tmp-…` one that is being removed,
`load.tmp-ATTEMPT-NUMBER` the choice of rank 0 for a load of that attempt. The empty folder
`attempt-HISTORY-00000003` records that attempt 3 of a job has started. In a checkpoint the empty
file `commit-00000007` records that it is the seventh commit of the folder.
"""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = [
    "ANNOUNCED_NAME",
    "CHOICE_NAME",
    "DISTRIBUTED_MANIFEST_NAME",
    "MANIFEST_NAME",
    "Name",
    "attempt_name",
    "choice_folder",
    "commit_name",
    "final_name",
    "is_leftover",
    "is_trash",
    "parse_attempt",
    "parse_commit",
    "parse_name",
    "part_name",
    "shard_name",
    "temporary_name",
    "trash_name",
]

MANIFEST_NAME = "manifest.jsonl"
DISTRIBUTED_MANIFEST_NAME = "manifest.dcp"
"""Manifest of a checkpoint of `threefs.checkpoint.distributed`."""
ANNOUNCED_NAME = "announced"
CHOICE_NAME = "choice.json"
_COMMIT = re.compile(r"commit-(\d{8,})")
_ATTEMPT = re.compile(r"attempt-(\w+)-(\d{8,})")
_FINAL = re.compile(r"step-(\d{8,})(?:\.(\d+))?")


class Name(NamedTuple):
    """Name of a checkpoint; names sort from old to new."""

    step: int
    generation: int


def parse_name(name: str) -> Name | None:
    """Parse a checkpoint's name; None for any other name."""
    match = _FINAL.fullmatch(name)
    return Name(int(match[1]), int(match[2] or 1)) if match else None


def commit_name(commit: int) -> str:
    """The file that records a checkpoint's commit number."""
    return f"commit-{commit:08d}"


def parse_commit(names: list[str]) -> int:
    """The commit number of the checkpoint with these files; 0 for an older format without it."""
    matches = [_COMMIT.fullmatch(name) for name in names]
    return max((int(match[1]) for match in matches if match), default=0)


def attempt_name(chain: str, number: int) -> str:
    """The folder that records the start of an attempt of a job."""
    return f"attempt-{chain}-{number:08d}"


def parse_attempt(name: str) -> tuple[str, int] | None:
    """Chain and number; None for any other name."""
    match = _ATTEMPT.fullmatch(name)
    return (match[1], int(match[2])) if match else None


def choice_folder(load: str) -> str:
    """The folder in which rank 0 publishes its choice for a load."""
    return f"load.tmp-{load}"


def final_name(step: int, generation: int) -> str:
    """The folder of a committed checkpoint."""
    return f"step-{step:08d}" + (f".{generation}" if generation > 1 else "")


def temporary_name(step: int, save: str) -> str:
    """The temporary folder of a save."""
    return f"step-{step:08d}.tmp-{save}"


def trash_name(word: str) -> str:
    """The name of a checkpoint that is being removed."""
    return f"trash.tmp-{word}"


def is_trash(name: str) -> bool:
    """Whether it is a checkpoint that is being removed, or whose removal was interrupted."""
    return name.startswith(trash_name(""))


def is_leftover(name: str) -> bool:
    """Whether it is unfinished or partly removed, of any attempt."""
    return ".tmp-" in name


def shard_name(rank: int) -> str:
    """The shard of a rank."""
    return f"shard-{rank:04d}.bin"


def part_name(rank: int) -> str:
    """The part file of a rank: its index, written once its shard is durable."""
    return f"part-{rank:04d}.json"
