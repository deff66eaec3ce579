"""Flight recorders of this machine: discovery and reading.

Every rank records its last operations in a small file that outlives it; the engine reads and
writes the format (`hfreduce._native.read_flight`), this module finds the files and looks at the
processes behind them. Nothing here stops or disturbs a rank.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hfreduce import _native

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["Recorder", "find", "folders", "of_process"]

NAMELESS = "/memfd:hfreduce-flight"
"""Name in /proc of a recorder in anonymous memory, used if no folder had space."""

SUFFIX = ".flight"

BEATS_SECONDS = 2.0
"""A rank sends ten heartbeats a second; without one for this time it does not run."""


@dataclass(frozen=True, slots=True)
class Recorder:
    """One rank's recorder and the state of its process."""

    data: dict[str, Any]
    """As the format's reference describes it."""
    life: str
    """running, stopped, dead, or silent (a process that we cannot see and that does nothing)."""
    pid: int
    """The process as we count them, where we see it; otherwise as it does itself."""

    @property
    def beat_age_seconds(self) -> float:
        """Since its last sign of life."""
        return float(max(self.data["read_ns"] - self.data["beat_ns"], 0) / 1e9)


def folders() -> list[Path]:
    """Folders of recorders: those of this user, and for root those of all users."""
    own = [Path(name) for name in _native.flight_folders()[0]]
    if os.geteuid() == 0 and "HFREDUCE_RUN_DIR" not in os.environ:
        for parent, pattern in (
            ("/run/user", "*/hfreduce"),
            ("/dev/shm", "hfreduce-*"),  # noqa: S108  (only read)
            ("/tmp", "hfreduce-*"),  # noqa: S108
        ):
            own += sorted(Path(parent).glob(pattern))
    return list(dict.fromkeys(own))


def find(places: Iterable[Path]) -> Iterator[Recorder]:
    """All recorders in these folders; what is none, or goes while we look, is left out."""
    for place in places:
        with suppress(OSError):
            for path in sorted(place.iterdir()):
                if path.name.endswith(SUFFIX):
                    yield from _read(path, None)


def of_process(pid: int) -> Iterator[Recorder]:
    """The recorders of one process, wherever their files are: in other containers too.

    Raises `ProcessLookupError` or `PermissionError` where the process cannot be inspected.
    """
    process = Path(f"/proc/{pid}")
    try:
        maps = (process / "maps").read_text(encoding="utf-8", errors="replace")
        descriptors = list((process / "fd").iterdir())
    except FileNotFoundError as error:
        raise ProcessLookupError(f"process {pid} does not exist") from error
    except PermissionError as error:
        raise PermissionError(f"process {pid} belongs to another user") from error
    names = {line.split(maxsplit=5)[-1] for line in maps.splitlines()}
    for name in sorted(names):
        if name.endswith(SUFFIX):
            # The path is relative to the root of that process.
            yield from _read(process / "root" / name.lstrip("/"), pid)
    for descriptor in descriptors:
        with suppress(OSError):
            if str(descriptor.readlink()).startswith(NAMELESS):
                yield from _read(descriptor, pid)


def _read(path: Path, pid: int | None) -> Iterator[Recorder]:
    try:
        data = json.loads(_native.read_flight(path))
    except (OSError, ValueError):
        return
    if data["boot_id"] != _boot_id():
        return
    same_namespace = data["pid_namespace"] == Path("/proc/self/ns/pid").stat().st_ino
    number = pid if pid is not None else data["pid"]
    life = _life(number, data["process_start"]) if same_namespace or pid is not None else None
    if life is None:
        age = (data["read_ns"] - data["beat_ns"]) / 1e9
        beats = age < BEATS_SECONDS or data["state"] == "connecting"
        life = "running" if beats else "silent"
    yield Recorder(data, life, number)


def _life(pid: int, start: int) -> str:
    """The state of the process with this number that started at this tick."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "dead"
    # The name in brackets may hold anything; the fields behind it do not.
    fields = stat.rpartition(")")[2].split()
    if fields[0] in "ZX" or int(fields[19]) != start:
        return "dead"
    return "stopped" if fields[0] in "Tt" else "running"


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
