"""`threefs cp`: files in and out, folders with -r, many files concurrently."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from threefs.cli.output import stderr_console
from threefs.client import Client, connect
from threefs.errors import InvalidArgument, IsADirectory, NotFound

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.progress import Progress, TaskID

__all__ = ["copy"]

REMOTE = "3fs:"
BATCH_BYTES = 32 << 20
"""Bytes of one batch: enough to keep every storage node busy, few enough to hold in memory."""
BATCH_FILES = 256


@dataclass(frozen=True, slots=True)
class Item:
    """One file to copy."""

    source: str
    destination: str
    size: int


def copy(
    cluster: Path | None,
    sources: list[str],
    destination: str,
    timeout_seconds: float,
    *,
    recursive: bool,
) -> None:
    """Copy between this machine and 3FS; one of the two sides must be 3FS."""
    outward = [source.startswith(REMOTE) for source in sources]
    inward = destination.startswith(REMOTE)
    if inward == any(outward) or any(outward) != all(outward):
        raise InvalidArgument(
            f"one side must be in 3FS and the other not: sources {', '.join(sources)}, "
            f"destination {destination}; paths in 3FS start with `{REMOTE}/`"
        )
    with connect(cluster, timeout_seconds=timeout_seconds) as client:
        if inward:
            items = _plan_in(client, sources, destination.removeprefix(REMOTE), recursive=recursive)
        else:
            remote = [source.removeprefix(REMOTE) for source in sources]
            items = _plan_out(client, remote, Path(destination), recursive=recursive)
        move = _copy_in if inward else _copy_out
        with _progress() as progress:
            task = progress.add_task("copy", total=sum(item.size for item in items))
            for batch in _batches(items):
                move(client, batch, progress, task)


def _plan_in(
    client: Client, sources: list[str], destination: str, *, recursive: bool
) -> list[Item]:
    into = destination.endswith("/") or len(sources) > 1 or _is_remote_dir(client, destination)
    if into and any(Path(source).exists() for source in sources):
        client.mkdir(destination, parents=True)
    items = []
    for source in map(Path, sources):
        if not source.exists():
            raise NotFound(f"`{source}` does not exist on this machine", path=str(source))
        target = str(PurePosixPath(destination) / source.name) if into else destination
        if source.is_file():
            items.append(Item(str(source), target, source.stat().st_size))
            continue
        _needs_recursive(str(source), recursive=recursive)
        client.mkdir(target, parents=True)
        for path in sorted(source.rglob("*")):
            remote = str(PurePosixPath(target) / path.relative_to(source).as_posix())
            if path.is_dir():
                client.mkdir(remote, parents=True)
            elif path.is_file():
                items.append(Item(str(path), remote, path.stat().st_size))
    return items


def _plan_out(
    client: Client, sources: list[str], destination: Path, *, recursive: bool
) -> list[Item]:
    into = destination.is_dir() or len(sources) > 1
    items: list[Item] = []
    for source in sources:
        stat = client.stat(source)
        target = destination / PurePosixPath(source).name if into else destination
        if stat.is_dir:
            _needs_recursive(source, recursive=recursive)
            items.extend(_walk(client, source, target))
        else:
            items.append(Item(source, str(target), stat.size))
    return items


def _walk(client: Client, folder: str, target: Path) -> Iterator[Item]:
    target.mkdir(parents=True, exist_ok=True)
    for entry in client.scandir(folder):
        path = str(PurePosixPath(folder) / entry.name)
        if entry.stat.is_dir:
            yield from _walk(client, path, target / entry.name)
        elif entry.stat.is_file:
            yield Item(path, str(target / entry.name), entry.stat.size)


def _copy_in(client: Client, batch: list[Item], progress: Progress, task: TaskID) -> None:
    if len(batch) == 1 and batch[0].size > BATCH_BYTES:
        _copy_in_large(client, batch[0], progress, task)
        return
    fresh = []
    for item in batch:
        content = Path(item.source).read_bytes()
        if client.exists(item.destination):
            client.write_file(item.destination, content)  # Replaced as a whole, or not at all.
        else:
            fresh.append((item.destination, 0, content))
    client.batch_write(fresh)
    progress.advance(task, sum(item.size for item in batch))


def _copy_in_large(client: Client, item: Item, progress: Progress, task: TaskID) -> None:
    with Path(item.source).open("rb") as source, client.open_raw(item.destination, "w") as out:
        view = memoryview(mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_READ))
        for start in range(0, len(view), BATCH_BYTES):
            progress.advance(task, out.write(view[start : start + BATCH_BYTES]))


def _copy_out(client: Client, batch: list[Item], progress: Progress, task: TaskID) -> None:
    if len(batch) == 1 and batch[0].size > BATCH_BYTES:
        item = batch[0]
        with client.open_raw(item.source) as source, Path(item.destination).open("wb") as out:
            buffer = memoryview(bytearray(BATCH_BYTES))
            while count := source.readinto(buffer):
                out.write(buffer[:count])
                progress.advance(task, count)
        return
    contents = client.batch_read([(item.source, 0, None) for item in batch])
    for item, content in zip(batch, contents, strict=True):
        Path(item.destination).write_bytes(content)
        progress.advance(task, len(content))


def _batches(items: list[Item]) -> Iterator[list[Item]]:
    batch: list[Item] = []
    size = 0
    for item in items:
        if batch and (size + item.size > BATCH_BYTES or len(batch) >= BATCH_FILES):
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += item.size
    if batch:
        yield batch


def _is_remote_dir(client: Client, path: str) -> bool:
    try:
        return client.stat(path).is_dir
    except NotFound:
        return False


def _needs_recursive(path: str, *, recursive: bool) -> None:
    if not recursive:
        raise IsADirectory(f"`{path}` is a directory; use -r to copy it", path=path)


def _progress() -> Progress:
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    console = stderr_console()
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )
