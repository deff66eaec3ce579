"""Directories and files that the clients of a run share, and the plan of each client. Pure."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "BLOCK_BYTES",
    "FINAL_WORKER",
    "WORKERS_MAX",
    "Cell",
    "ClientPlan",
    "SharedFile",
    "cells",
    "shared_files",
]

BLOCK_BYTES = 4096
WORKERS_MAX = 1 << 8
"""Workers of a client; worker N of client C has the number C * WORKERS_MAX + N."""
FINAL_WORKER = 1 << 16
"""Workers from here read everything after the load."""
DIRECTORIES_PER_CELL, NAMES_PER_DIRECTORY = 2, 3


@dataclass(frozen=True, slots=True)
class Cell:
    """Directories whose names are one object of the history."""

    name: str
    folders: tuple[str, ...]

    @property
    def slots(self) -> tuple[str, ...]:
        """The path of each name."""
        return tuple(
            f"{folder}/{number}" for folder in self.folders for number in range(NAMES_PER_DIRECTORY)
        )


@dataclass(frozen=True, slots=True)
class SharedFile:
    """A file whose blocks are objects of the history."""

    name: str
    """Its path below the root of the mounts."""
    offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ClientPlan:
    """Work of one client process."""

    number: int
    seed: int
    cluster: str
    timeout_seconds: float
    history: str
    """Folder of the histories of its workers."""
    private: str
    """Directory that only this client changes."""
    mount: str
    """Mounted root of the cluster; empty: files are accessed through the Python client."""
    cells: tuple[Cell, ...]
    files: tuple[SharedFile, ...]
    name_workers: int
    data_workers: int
    private_workers: int
    operations_max: int = 0
    """Operations of each worker after which it ends; 0: unlimited."""

    def write(self, path: Path) -> None:
        """Writes the plan for the process."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> ClientPlan:
        """Reads the plan."""
        plan = json.loads(path.read_text())
        plan["cells"] = tuple(Cell(each["name"], tuple(each["folders"])) for each in plan["cells"])
        plan["files"] = tuple(
            SharedFile(each["name"], tuple(each["offsets"])) for each in plan["files"]
        )
        return cls(**plan)


def cells(root: str, count: int) -> tuple[Cell, ...]:
    """Directories below `root`; the run makes them."""
    return tuple(
        Cell(
            f"cell-{number}",
            tuple(f"{root}/cell-{number}-{place}" for place in range(DIRECTORIES_PER_CELL)),
        )
        for number in range(count)
    )


def shared_files(root: str, count: int, blocks: int, chunk_bytes: int) -> tuple[SharedFile, ...]:
    """Files below `root`, with two blocks in each chunk."""
    offsets = tuple(chunk_bytes // 2 * number for number in range(blocks))
    return tuple(SharedFile(f"{root}/file-{number}", offsets) for number in range(count))
