"""`threefs trash`: what was removed from a volume is listed, restored, or removed for good."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING

from threefs.cli.output import Output, describe_bytes, print_json, printable
from threefs.client import connect
from threefs.durations import seconds_of
from threefs.errors import Exists, InvalidArgument, NotFound, ThreeFSError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from threefs.trash import Trash, TrashEntry

__all__ = ["keep", "list_trash", "purge", "restore"]

OFF = "off"


def keep(cluster: Path | None, volume: str, duration: str, timeout_seconds: float) -> None:
    """Set the retention of a volume."""
    seconds = 0 if duration == OFF else seconds_of("the retention", duration)
    with connect(cluster, timeout_seconds=timeout_seconds) as client:
        client.trash(volume).keep(seconds)


def list_trash(
    cluster: Path | None,
    volume: str,
    output: Output,
    timeout_seconds: float,
    *,
    under: list[str],
    limit: int,
) -> None:
    """Print the entries, oldest first."""
    with connect(cluster, timeout_seconds=timeout_seconds) as client:
        trash = client.trash(volume)
        entries = _selected(trash, under)
        shown = list(islice(entries, limit))
        more = next(entries, None) is not None
        seconds = trash.keep_seconds()
    if output is Output.JSON:
        rows = [asdict(entry) for entry in shown]
        print_json({"volume": volume, "keep_seconds": seconds, "entries": rows, "more": more})
        return
    if shown:
        sys.stdout.write(f"{'ID':28} {'REMOVED (UTC)':19} {'SIZE':>10}  PATH\n")
    for entry in shown:
        removed = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(entry.removed_ms / 1000))
        size = describe_bytes(entry.size) if entry.kind == "file" else entry.kind
        sys.stdout.write(f"{entry.id:28} {removed:19} {size:>10}  {_shown_path(entry)}\n")
    if more:
        sys.stderr.write(f"threefs: more than {limit} entries; --limit shows more\n")
    elif not shown and seconds == 0:
        sys.stderr.write(
            f"threefs: nothing is kept; `threefs trash keep {volume} 7d` keeps what is removed\n"
        )


def restore(
    cluster: Path | None,
    volume: str,
    timeout_seconds: float,
    *,
    paths: list[str],
    entry: str | None,
    to: str | None,
) -> bool:
    """Restore an entry, or the newest one of each path at or below `paths`; whether all were."""
    if (entry is None) == (not paths):
        raise InvalidArgument("pass paths below the volume, or --id with one entry")
    if to is not None and entry is None:
        raise InvalidArgument("--to needs --id: it is the new path of one entry")
    with connect(cluster, timeout_seconds=timeout_seconds) as client:
        trash = client.trash(volume)
        if entry is not None:
            trash.restore(entry, to)
            return True
        newest = {kept.path: kept for kept in _selected(trash, paths)}
        if not newest:
            raise NotFound(
                f"the trash of `{volume}` has no entry at or below {', '.join(paths)}; "
                f"`threefs trash list {volume}` shows all"
            )
        restored, failed = 0, 0
        # A directory precedes what was in it.
        for kept in sorted(newest.values(), key=lambda kept: kept.path or ""):
            try:
                trash.restore(kept.id)
                restored += 1
            except (Exists, NotFound) as error:
                # It was restored with another entry, or has a successor.
                if not kept.is_empty_directory:
                    failed += 1
                    sys.stderr.write(f"threefs: {kept.path} ({kept.id}) is not restored: {error}\n")
            except ThreeFSError as error:
                failed += 1
                sys.stderr.write(f"threefs: {kept.path} ({kept.id}) is not restored: {error}\n")
    sys.stdout.write(f"restored {restored} entries\n")
    return failed == 0


def purge(
    cluster: Path | None,
    volume: str,
    timeout_seconds: float,
    *,
    paths: list[str],
    everything: bool,
    older_than: str | None,
    entry: str | None,
) -> None:
    """Remove entries for good."""
    chosen = [bool(paths), everything, older_than is not None, entry is not None]
    if chosen.count(True) != 1:
        raise InvalidArgument("pass paths below the volume, --older-than, --id or --all")
    end_ms = float("inf")
    if older_than is not None:
        end_ms = (time.time() - seconds_of("--older-than", older_than)) * 1000
    with connect(cluster, timeout_seconds=timeout_seconds) as client:
        trash = client.trash(volume)
        ids = [entry] if entry is not None else _before(_selected(trash, paths), end_ms)
        count = trash.purge(ids)
    sys.stdout.write(f"purged {count} entries; their space is freed in the background\n")


def _before(entries: Iterator[TrashEntry], end_ms: float) -> Iterator[str]:
    for entry in entries:
        if entry.removed_ms >= end_ms:
            return
        yield entry.id


def _selected(trash: Trash, under: list[str]) -> Iterator[TrashEntry]:
    """All entries, or those at or below these paths."""
    prefixes = [path.strip("/") for path in under]
    for entry in trash.entries():
        if not prefixes or any(_is_below(entry.path, prefix) for prefix in prefixes):
            yield entry


def _is_below(path: str | None, prefix: str) -> bool:
    if path is None:
        return False
    return not prefix or path == prefix or path.startswith(f"{prefix}/")


def _shown_path(entry: TrashEntry) -> str:
    return printable(entry.path if entry.path is not None else f"(gone)/{entry.name}")
