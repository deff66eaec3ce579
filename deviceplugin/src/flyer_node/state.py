"""What survives the agent: inventory and health in one file, and the lock that keeps it single.

A file that cannot be read is worth nothing and is ignored, with a line in the log: everything in it
can be observed again, except that a fault without visible traces would be forgotten.
"""

# ruff: noqa: TC001 - `serial` resolves the annotations of what is read

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from flyer_node.errors import DataError, SettingError
from flyer_node.health.ledger import Kind, Subject
from flyer_node.health.machine import Health
from flyer_node.inventory import Inventory
from flyer_node.serial import from_json, to_json

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Page", "Saved", "StateFolder"]

VERSION = 1
log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Page:
    """One device's health."""

    kind: str
    id: str
    health: Health


@dataclass(frozen=True, slots=True)
class Saved:
    """The file."""

    version: int
    inventory: Inventory
    pages: tuple[Page, ...] = ()

    @property
    def health(self) -> dict[Subject, Health]:
        """Health by subject."""
        kinds: dict[str, Kind] = {"gpu": "gpu", "pair": "pair", "hca": "hca"}
        return {
            Subject(kinds[page.kind], page.id): page.health
            for page in self.pages
            if page.kind in kinds
        }


class StateFolder:
    """A folder on the node's disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "state.json"
        self.topology = folder / "nccl-topology.xml"
        self._lock = -1

    def open(self) -> None:
        """Makes the folder and takes the lock; SettingError if another agent has it."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / "lock"
            self._lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            expected = f"a folder that can be written ({error.strerror})"
            raise SettingError("--state-folder", str(self.folder), expected) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            expected = "a folder of its own: another agent runs on this node"
            raise SettingError("--state-folder", str(self.folder), expected) from None

    def close(self) -> None:
        """Gives the lock back."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def load(self) -> Saved | None:
        """What an earlier agent wrote, if it can be read."""
        try:
            saved = from_json(Saved, json.loads(self.file.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, DataError) as error:
            log.warning("earlier state ignored", file=str(self.file), error=str(error))
            return None
        return saved if saved.version == VERSION else None

    def save(self, inventory: Inventory, health: dict[Subject, Health]) -> None:
        """Writes all, in one step."""
        pages = tuple(Page(subject.kind, subject.id, page) for subject, page in health.items())
        text = json.dumps(to_json(Saved(VERSION, inventory, pages)))
        _replace(self.file, text)

    def write_topology(self, text: str) -> str:
        """Writes NCCL's file; its path, or nothing if that failed."""
        try:
            _replace(self.topology, text)
            self.topology.chmod(0o644)
        except OSError as error:
            log.warning("no topology file", file=str(self.topology), error=str(error))
            return ""
        return str(self.topology)


def _replace(path: Path, text: str) -> None:
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(path)
