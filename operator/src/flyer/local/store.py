"""Store of a driver: the lock, FlyerJob objects, decisions, events and the cluster on disk.

A job's file is the commit of a decision: written to a temporary file, flushed to disk,
renamed into place, and the folder flushed, all before the driver acts on it. A reader after a crash
sees one whole object, the old or the new. Events and decisions are appended; a line torn by a
crash is dropped at the next start.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import time
from typing import TYPE_CHECKING, Any, Final

from flyer.api import FlyerJob
from flyer.errors import ExitStatus, FlyerError
from flyer.local.run_folders import remove_dead, sign
from flyer.local.state_directory import StatePaths, owned_privately

if TYPE_CHECKING:
    from collections.abc import Iterator
    from io import FileIO
    from pathlib import Path

__all__ = ["Appender", "Store", "read_json_lines", "write_atomically"]

# Clients take a shared lock for an instant; a lock held for longer is a driver's.
LOCK_WAIT_SECONDS: Final = 1.0
LOCK_POLL_SECONDS: Final = 0.02
BLOCK_BYTES: Final = 64 * 1024

log = logging.getLogger(__name__)


class Store:
    """The state directory of one cluster, locked by this process until `close`."""

    def __init__(self, paths: StatePaths, lock_descriptor: int) -> None:
        self.paths = paths
        self._lock_descriptor = lock_descriptor
        self.events = Appender(paths.events)
        self.decisions = Appender(paths.decisions)

    @classmethod
    def open(cls, root: Path) -> Store:
        """Create missing folders and take the lock. Raises FlyerError that names its holder."""
        paths = StatePaths(root.absolute())
        try:
            # Environments in manifests may contain secrets: readable only by this user.
            paths.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            for folder in (paths.jobs, paths.logs):
                folder.mkdir(exist_ok=True)
            descriptor = _take_lock(paths)
            # Only under the lock: otherwise another driver may remove the folder as unused.
            paths.run.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise FlyerError.usage(
                f"cannot keep state in `{paths.root}`: {error.strerror or error}",
                "name a writable folder with --state",
            ) from error
        if not owned_privately(paths.run):
            os.close(descriptor)
            raise FlyerError.usage(
                f"`{paths.run}` belongs to another user or is writable by others",
                "remove it, or choose a shorter --state so that sockets fit inside it",
            )
        sign(paths)
        remove_dead(paths)
        return cls(paths, descriptor)

    def close(self) -> None:
        """Release the lock; another driver may start."""
        self.events.close()
        self.decisions.close()
        os.close(self._lock_descriptor)

    def jobs(self) -> list[FlyerJob]:
        """Every stored job, ordered by name."""
        return list(read_jobs(self.paths))

    def commit(self, key: str, document: dict[str, Any]) -> None:
        """Make one job's object durable. Only when this returns may the decision be acted on."""
        path = self.paths.jobs / f"{key.replace('/', '.')}.json"
        try:
            write_atomically(path, document)
        except OSError as error:
            raise FlyerError(
                f"cannot store the job `{key}` in `{path}`: {error.strerror or error}",
                exit_status=ExitStatus.UNFINISHED,
                code="CannotStore",
                hint="free space there; `flyer run` then resumes every unfinished job",
            ) from error

    def note(self, appender: Appender, line: str) -> None:
        """Append to a log that no decision depends on: a failed write is logged."""
        try:
            appender.append_line(line)
        except OSError as error:
            log.warning("%s: a line is lost: %s", appender.path, error.strerror or error)


def read_jobs(paths: StatePaths) -> Iterator[FlyerJob]:
    """Every job of a state directory; needs no lock, since files are replaced whole."""
    for path in sorted(paths.jobs.glob("*.json")):
        try:
            yield FlyerJob.model_validate_json(path.read_bytes())
        except ValueError as error:  # pydantic's too
            raise FlyerError.usage(
                f"`{path}` is not a stored FlyerJob: {str(error).splitlines()[0]}",
                "another version of flyer wrote it, or it was changed by hand: restore it, "
                "or move it away to forget that job",
            ) from error


def write_atomically(path: Path, document: dict[str, Any]) -> None:
    """Replace `path` by the JSON of `document`, durably: file, then rename, then folder."""
    temporary = path.with_name(f".{path.name}.new")
    with temporary.open("wb") as file:
        file.write(json.dumps(document, indent=1).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


class Appender:
    """An append-only file of JSON lines; cuts an incomplete last line first."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: FileIO | None = None

    def append(self, record: dict[str, Any]) -> None:
        """Append a record with one write: a crash can tear only this one."""
        self.append_line(json.dumps(record, separators=(",", ":")))

    def append_line(self, line: str) -> None:
        """Append a record in its JSON form, without a line end."""
        if self._file is None:
            self._file = self._opened()
        try:
            self._file.write(line.encode() + b"\n")
        except OSError:
            self.close()  # the next append cuts an incomplete line
            raise

    def close(self) -> None:
        """Close the file; a later append opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _opened(self) -> FileIO:
        whole = _bytes_of_whole_lines(self.path)
        file = self.path.open("ab", buffering=0)
        if whole is not None:
            file.truncate(whole)
        return file


def _bytes_of_whole_lines(path: Path) -> int | None:
    """How many bytes of a file end with a line end; None when there is nothing to cut."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return None
    with file:  # from its end: it may be large
        size = at = file.seek(0, os.SEEK_END)
        while at > 0:
            first = max(0, at - BLOCK_BYTES)
            file.seek(first)
            position = file.read(at - first).rfind(b"\n")
            if position >= 0:
                whole = first + position + 1
                return None if whole == size else whole
            at = first
    return 0 if size else None


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file of JSON lines; a torn last line is left out."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            record = json.loads(line)
            if isinstance(record, dict):
                yield record


def _take_lock(paths: StatePaths) -> int:
    descriptor = os.open(paths.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + LOCK_WAIT_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() < deadline:
                time.sleep(LOCK_POLL_SECONDS)
                continue
            owner = os.pread(descriptor, 64, 0).decode(errors="replace").strip()
            os.close(descriptor)
            raise FlyerError(
                f"process {owner or 'unknown'} already drives the cluster in `{paths.root}`",
                exit_status=2,
                code="AlreadyDriven",
                hint="submit to it with `flyer run JOB.yaml`, or choose another --state",
            ) from error
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        return descriptor
