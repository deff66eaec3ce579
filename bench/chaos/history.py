"""Histories: each worker writes one file, a line before each call and one after it.

The line before a call is written before anything is sent, so an operation of a client that was
killed is in the history, with an unknown outcome. Times are of the clock that all processes of one
machine share. The process that checks reads what `Recorder` has written.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.chaos.linearizability import Operation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

__all__ = ["Record", "Recorder", "by_object", "read_records"]


@dataclass(frozen=True, slots=True)
class Record:
    """One operation of a history."""

    worker: int
    kind: str
    """Which gaps it counts for: `change`, `lookup`, `write` or `read`."""
    name: str
    """The object that it concerns."""
    operation: Operation
    error: str = ""
    """Why the outcome is unknown, or why a call without effect failed."""


class Recorder:
    """Executes the calls of one worker and records them. Use from one thread."""

    def __init__(self, path: Path, worker: int) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
        self._worker = worker

    def execute(
        self,
        kind: str,
        name: str,
        call: tuple[str | int, ...],
        execute: Callable[[], str | int],
        unknown: type[Exception] | tuple[type[Exception], ...],
    ) -> str | int | None:
        """Executes one call, which returns its result; an exception in `unknown` is one."""
        self._write([self._worker, kind, name, time.monotonic_ns(), *call])
        error = ""
        result: str | int | None = None
        try:
            result = execute()
        except unknown as raised:
            error = f"{type(raised).__name__}: {raised}"
        self._write([time.monotonic_ns(), result, error])
        return result

    def _write(self, line: list[str | int | None]) -> None:
        os.write(self._file, json.dumps(line, separators=(",", ":")).encode() + b"\n")


def read_records(path: Path) -> Iterator[Record]:
    """The operations in the file of one worker."""
    with path.open(encoding="utf-8") as file:
        # The last line of a killed client may be torn.
        lines = (line for line in file if line.endswith("\n"))
        for line in lines:
            worker, kind, name, called_ns, *call = json.loads(line)
            returned_ns, result, error = json.loads(next(lines, '[0, null, "client killed"]'))
            operation = Operation(worker, tuple(call), result, called_ns, returned_ns)
            yield Record(worker, kind, name, operation, error)


def by_object(records: Iterable[Record]) -> dict[str, list[Operation]]:
    """The operations on each object that the checker needs: a lookup that failed shows nothing."""
    objects: dict[str, list[Operation]] = {}
    for record in records:
        if record.operation.result is None and record.kind in ("lookup", "read"):
            continue
        objects.setdefault(record.name, []).append(record.operation)
    return objects
