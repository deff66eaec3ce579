"""Processes that append records to a file, and a check of the file."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = """
import os, sys
path, name, first, count, flags = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6])
sizes = [int(size) for size in sys.argv[6].split(",")]
descriptor = os.open(path, os.O_APPEND | os.O_CREAT | flags, 0o666)
for number in range(first, first + count):
    head = f"<{name} {number} "
    record = head + "x" * (sizes[number % len(sizes)] - len(head) - 2) + ">\\n"
    try:
        if os.write(descriptor, record.encode()) != len(record):
            sys.exit("a short write")
    except OSError as error:
        print("failed", number, error.errno, flush=True)
    else:
        print("appended", number, flush=True)
"""

RECORD = re.compile(rb"<(\S+) (\d+) x*>\n")


@dataclass
class Appender:
    """A process that appends records of these sizes, in turn."""

    name: str
    process: subprocess.Popen[str]
    sizes: tuple[int, ...]
    appended: list[int] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)

    @classmethod
    def start(
        cls, path: Path, name: str, count: int, sizes: tuple[int, ...], flags: int, first: int = 0
    ) -> Appender:
        numbers = [str(number) for number in (first, count, flags)]
        listed = ",".join(str(size) for size in sizes)
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", PROGRAM, str(path), name, *numbers, listed],
            stdout=subprocess.PIPE,
            text=True,
        )
        return cls(name, process, sizes)

    def end(self) -> None:
        """Wait for its end; the numbers of the appended records, and of those that failed."""
        assert self.process.wait(240) == 0
        assert self.process.stdout is not None
        for line in self.process.stdout:
            what, number = line.split()[:2]
            (self.appended if what == "appended" else self.failed).append(int(number))


def records(content: bytes) -> list[tuple[str, int, int]]:
    """Name, number and size of each record; the file consists of whole records."""
    found, end = [], 0
    for match in RECORD.finditer(content):
        between = content[end : match.start()]
        assert not between, f"{len(between)} bytes at {end} are not a record: {between[:80]!r}"
        found.append((match[1].decode(), int(match[2]), len(match[0])))
        end = match.end()
    assert end == len(content), f"bytes after the last record: {content[end : end + 80]!r}"
    return found


def check(content: bytes, appenders: list[Appender]) -> int:
    """Check that every acknowledged record is there, once, whole, and in the order of its process.

    Returns the number of records whose appends failed: these may be there, too.
    """
    found = records(content)
    for appender in appenders:
        appender.end()
        numbers = [number for name, number, _ in found if name == appender.name]
        assert numbers == sorted(set(numbers)), f"{appender.name}: repeated or out of order"
        assert set(appender.appended) <= set(numbers), f"{appender.name}: records are lost"
        assert set(numbers) <= set(appender.appended + appender.failed)
        sizes = appender.sizes
        for name, number, size in found:
            assert name != appender.name or size == sizes[number % len(sizes)]
    return sum(len(appender.failed) for appender in appenders)
