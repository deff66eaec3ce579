"""State folder of the agent: inventory and health in one file, and a lock against a second agent.

An unreadable file is ignored with a warning: everything in it can be observed again, except faults
that leave no visible trace.
"""

# ruff: noqa: TC001 - `json_codec` resolves the annotations at run time

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from flyer_node.errors import DataError, SettingError
from flyer_node.health.state_machine import DeviceHealth
from flyer_node.health.store import Kind, Subject
from flyer_node.inventory import Inventory
from flyer_node.json_codec import from_json, to_json

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["DeviceRecord", "SavedState", "StateFolder"]

VERSION = 2
log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class DeviceRecord:
    """Health of one device."""

    kind: str
    id: str
    health: DeviceHealth


@dataclass(frozen=True, slots=True)
class SavedState:
    """Contents of the state file."""

    version: int
    inventory: Inventory
    records: tuple[DeviceRecord, ...] = ()

    @property
    def health(self) -> dict[Subject, DeviceHealth]:
        """Health by subject."""
        kinds: dict[str, Kind] = {"gpu": "gpu", "pair": "pair", "hca": "hca"}
        return {
            Subject(kinds[record.kind], record.id): record.health
            for record in self.records
            if record.kind in kinds
        }


class StateFolder:
    """The agent's folder on the node's disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "state.json"
        self.topology = folder / "nccl-topology.xml"
        self._lock = -1

    def open(self) -> None:
        """Creates the folder and takes the lock; SettingError if another agent holds it."""
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
            expected = "another folder: a running agent holds its lock"
            raise SettingError("--state-folder", str(self.folder), expected) from None

    def close(self) -> None:
        """Releases the lock."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def load(self) -> SavedState | None:
        """Loads the state of an earlier agent; None if there is none or it cannot be read."""
        try:
            saved = from_json(SavedState, json.loads(self.file.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, DataError) as error:
            log.warning("ignoring unreadable state file", file=str(self.file), error=str(error))
            return None
        return saved if saved.version == VERSION else None

    def save(self, inventory: Inventory, health: dict[Subject, DeviceHealth]) -> None:
        """Writes the state atomically."""
        records = tuple(
            DeviceRecord(subject.kind, subject.id, record) for subject, record in health.items()
        )
        text = json.dumps(to_json(SavedState(VERSION, inventory, records)))
        _replace(self.file, text)

    def write_topology(self, text: str) -> str:
        """Writes NCCL's topology file; returns its path, or an empty string on failure."""
        try:
            _replace(self.topology, text)
            self.topology.chmod(0o644)
        except OSError as error:
            log.warning("topology file not written", file=str(self.topology), error=str(error))
            return ""
        return str(self.topology)


def _replace(path: Path, text: str) -> None:
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(path)
