"""`threefs ls` and `threefs cat`."""

from __future__ import annotations

import dataclasses
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from threefs.cli.output import Output, print_json
from threefs.client import Entry, connect

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["cat_files", "list_path"]

PIECE_BYTES = 16 << 20
MARKS = {"file": "-", "directory": "d", "symlink": "l"}


def list_path(
    cluster: Path | None, path: str, timeout_seconds: float, *, output: Output, long: bool
) -> None:
    """Print the entries of a directory, or the file itself."""
    with connect(cluster, timeout_seconds=timeout_seconds) as client:
        stat = client.stat(path)
        if not stat.is_dir:
            entries = [Entry(path, stat)]
        elif long or output is Output.JSON:
            entries = client.scandir(path)
        else:
            sys.stdout.writelines(f"{name}\n" for name in client.listdir(path))
            return
    if output is Output.JSON:
        print_json([{"name": e.name, **dataclasses.asdict(e.stat)} for e in entries])
    else:
        sys.stdout.writelines(f"{_line(e) if long else e.name}\n" for e in entries)


def cat_files(cluster: Path | None, paths: list[str], timeout_seconds: float) -> None:
    """Write files to stdout, one after the other."""
    with connect(cluster, timeout_seconds=timeout_seconds) as client:
        for path in paths:
            with client.open_raw(path) as file:
                buffer = memoryview(bytearray(PIECE_BYTES))
                while count := file.readinto(buffer):
                    sys.stdout.buffer.write(buffer[:count])
    sys.stdout.buffer.flush()


def _line(entry: Entry) -> str:
    stat = entry.stat
    bits = "".join(
        letter if stat.mode >> (8 - place) & 1 else "-" for place, letter in enumerate("rwxrwxrwx")
    )
    when = datetime.fromtimestamp(stat.modified_ns / 1e9, tz=UTC).strftime("%Y-%m-%d %H:%M:%S")
    return f"{MARKS[stat.kind]}{bits} {stat.size:>14} {when} {entry.name}"
