"""Client process of a run: `python -m bench.chaos.client PLAN`. Ends when its input does.

Workers of three kinds, each a thread: names that all clients share, blocks of files that all
clients share, and a private directory, whose contents are known without a search.
"""

from __future__ import annotations

import mmap
import os
import random
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import threefs

from bench.chaos.history import Recorder
from bench.chaos.models import DONE
from bench.chaos.workload import (
    BLOCK_BYTES,
    NAMES_PER_DIRECTORY,
    WORKERS_MAX,
    Cell,
    ClientPlan,
    SharedFile,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["NameCalls", "open_blocks"]

HOT_CELL_SHARE = 0.2
PRIVATE_NAMES = 64
CALLS = ("stat", "list", "create", "unlink", "rename", "mkdir", "rmdir", "link")
WEIGHTS = (44, 12, 14, 10, 10, 3, 3, 4)


class NameCalls:
    """Calls on the names of a cell; an error that the model knows is a result."""

    def __init__(self, client: threefs.Client) -> None:
        self._client = client

    def __call__(self, cell: Cell, call: tuple[str | int, ...]) -> str | int:
        """Executes one call."""
        try:
            return self._result(cell, call)
        except threefs.NotFound:
            return "missing"
        except threefs.Exists:
            return "exists"
        except threefs.IsADirectory:
            return "is a directory"
        except threefs.NotADirectory:
            return "not a directory"
        except threefs.PermissionDenied:
            return "not permitted"

    def _result(self, cell: Cell, call: tuple[str | int, ...]) -> str | int:
        client = self._client
        kind, *numbers = call
        if kind == "list":
            names = client.listdir(cell.folders[int(numbers[0])])
            return sum(1 << int(name) for name in names)
        paths = [cell.slots[int(number)] for number in numbers]
        if kind == "stat":
            status = client.stat(paths[0])
            return -status.inode if status.is_dir else status.inode
        if kind == "create":
            return client.open_raw(paths[0], "x").inode
        if kind == "mkdir":
            return -client.make_directory(paths[0]).inode
        if kind == "unlink":
            client.remove(paths[0])
        elif kind == "rmdir":
            client.rmdir(paths[0])
        elif kind == "rename":
            client.rename(*paths)
        else:
            client.link(*paths)
        return DONE


def open_blocks(
    files: Iterable[SharedFile], mount: str, client: threefs.Client
) -> Callable[..., int | None]:
    """A function that reads (`value` None) or writes a block; returns what a read has found.

    Through the files of a mount, or with the client if `mount` is empty.
    """
    if mount:
        return _through_mount(files, mount)
    opened = {file.name: client.open_raw(file.name, "r+") for file in files}

    def access(name: str, offset: int, value: int | None = None) -> int | None:
        file = opened[name]
        file.seek(offset)
        if value is None:
            return _value_of(file.read(BLOCK_BYTES) or b"")
        file.write(_block(value))
        return None

    return access


def _through_mount(files: Iterable[SharedFile], mount: str) -> Callable[..., int | None]:
    # Without the kernel's pages, which would answer reads in place of the cluster.
    descriptors = {file.name: os.open(mount + file.name, os.O_RDWR | os.O_DIRECT) for file in files}
    aligned = mmap.mmap(-1, BLOCK_BYTES)

    def access(name: str, offset: int, value: int | None = None) -> int | None:
        if value is None:
            count = os.preadv(descriptors[name], [aligned], offset)
            return _value_of(aligned[:count])
        aligned[:] = _block(value)
        count = os.pwritev(descriptors[name], [aligned], offset)
        if count != BLOCK_BYTES:
            raise OSError(f"{count} of {BLOCK_BYTES} bytes of `{name}` were written")
        return None

    return access


def _block(value: int) -> bytes:
    return value.to_bytes(8, "big") * (BLOCK_BYTES // 8)


def _value_of(data: bytes) -> int:
    """The value of a block; negative if it is not the block of one write."""
    value = data[:8]
    whole = len(data) == BLOCK_BYTES and data == value * (BLOCK_BYTES // 8)
    return int.from_bytes(value, "big") if whole else -1


class Workers:
    """The threads of one client."""

    def __init__(self, plan: ClientPlan, client: threefs.Client) -> None:
        self.plan, self.client = plan, client
        self.stopping = threading.Event()
        self.errors: list[str] = []

    def threads(self) -> list[threading.Thread]:
        """All workers, not started."""
        plan = self.plan
        kinds = (
            (self._change_names, plan.name_workers),
            (self._access_blocks, plan.data_workers),
            (self._fill_directory, plan.private_workers),
        )
        targets = [target for target, count in kinds for _ in range(count)]
        return [
            threading.Thread(target=self._run, args=(target, plan.number * WORKERS_MAX + number))
            for number, target in enumerate(targets)
        ]

    def _run(self, work: Callable[[Recorder, random.Random, int], None], worker: int) -> None:
        seeded = random.Random(f"{self.plan.seed}-{worker}")
        recorder = Recorder(Path(self.plan.history) / f"{worker}.history", worker)
        try:
            work(recorder, seeded, worker)
        except Exception as error:  # noqa: BLE001 -- any end of a worker fails the run
            self.errors.append(f"worker {worker}: {type(error).__name__}: {error}")
            self.stopping.set()

    def _continues(self, done: int) -> bool:
        enough = self.plan.operations_max
        return not self.stopping.is_set() and (not enough or done < enough)

    def _change_names(self, recorder: Recorder, seeded: random.Random, _worker: int) -> None:
        calls = NameCalls(self.client)
        done = 0
        while self._continues(done):
            hot = seeded.random() < HOT_CELL_SHARE
            cell = self.plan.cells[0] if hot else seeded.choice(self.plan.cells)
            call = _draw(seeded, cell)
            kind = "lookup" if call[0] in ("stat", "list") else "change"
            recorder.execute(
                kind, cell.name, call, lambda cell=cell, call=call: calls(cell, call),  # type: ignore[misc]
                threefs.Unavailable,
            )  # fmt: skip
            done += 1

    def _access_blocks(self, recorder: Recorder, seeded: random.Random, worker: int) -> None:
        access = open_blocks(self.plan.files, self.plan.mount, self.client)
        unknown = (threefs.Unavailable, TimeoutError)
        done = 0
        while self._continues(done):
            file = seeded.choice(self.plan.files)
            offset = seeded.choice(file.offsets)
            done += 1
            name = f"{file.name}@{offset}"
            if seeded.random() < 0.5:
                value = (worker + 1) << 40 | done

                def write(at: int = offset, value: int = value, path: str = file.name) -> int:
                    access(path, at, value)
                    return DONE

                recorder.execute("write", name, ("write", value), write, unknown)
            else:

                def read(at: int = offset, path: str = file.name) -> int:
                    value = access(path, at)
                    assert value is not None
                    return value

                recorder.execute("read", name, ("read",), read, unknown)

    def _fill_directory(self, recorder: Recorder, seeded: random.Random, worker: int) -> None:
        """A directory that only this worker changes."""
        folder = f"{self.plan.private}/{worker}"
        self.client.make_directory(folder)
        existing: dict[str, int] = {}
        done = 0
        while self._continues(done):
            done += 1
            path = f"{folder}/{seeded.randrange(PRIVATE_NAMES)}"
            if path not in existing:
                call: tuple[str | int, ...] = ("put", path, done)

                def execute(path: str = path, value: int = done) -> int:
                    self.client.batch_write([(path, 0, _block(value))])
                    return DONE

                existing[path] = done
            elif seeded.random() < 0.5:
                destination = f"{folder}/{seeded.randrange(PRIVATE_NAMES)}"
                call = ("move", path, destination)

                def execute(path: str = path, destination: str = destination) -> int:  # type: ignore[misc]
                    self.client.rename(path, destination)
                    return DONE

                existing[destination] = existing.pop(path)
            else:
                call = ("drop", path)

                def execute(path: str = path) -> int:  # type: ignore[misc]
                    self.client.remove(path)
                    return DONE

                del existing[path]
            if recorder.execute("change", folder, call, execute, threefs.Unavailable) is None:
                return  # What the directory contains is not known any more.


def _draw(seeded: random.Random, cell: Cell) -> tuple[str | int, ...]:
    kind = seeded.choices(CALLS, WEIGHTS)[0]
    if kind == "list":
        return (kind, seeded.randrange(len(cell.folders)))
    count = len(cell.folders) * NAMES_PER_DIRECTORY
    numbers = [seeded.randrange(count) for _ in range(2 if kind in ("rename", "link") else 1)]
    return (kind, *numbers)


def main() -> int:
    """Runs the workers until the input ends; prints what ended one early."""
    plan = ClientPlan.read(Path(sys.argv[1]))
    with ExitStack() as stack:
        client = stack.enter_context(
            threefs.connect(plan.cluster, timeout_seconds=plan.timeout_seconds)
        )
        workers = Workers(plan, client)
        threads = workers.threads()
        for thread in threads:
            thread.start()
        print("ready", flush=True)
        sys.stdin.read()
        workers.stopping.set()
        for thread in threads:
            thread.join()
    for error in workers.errors:
        print(error, flush=True)
    return 1 if workers.errors else 0


if __name__ == "__main__":
    sys.exit(main())
