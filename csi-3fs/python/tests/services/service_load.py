"""Operations that run while services are killed, and what of them must remain."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

BLOCK_BYTES = 4096
OPEN_FILE_BLOCKS = 64
OPERATION_SECONDS = 90.0
"""Deadline of one operation; on an idle machine the longest takes about as long as a lease."""
ROUNDS_AFTER_A_FAULT = 3


@dataclass
class Worker:
    """Repeats one kind of operation and records what was acknowledged."""

    name: str
    operation: Callable[[int], None]
    rounds: int = 0
    longest_seconds: float = 0.0
    error: BaseException | None = None
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                started = time.monotonic()
                self.operation(self.rounds)
                self.longest_seconds = max(self.longest_seconds, time.monotonic() - started)
                self.rounds += 1
        except BaseException as error:
            self.error = error

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(2 * OPERATION_SECONDS)
            assert not self._thread.is_alive(), f"`{self.name}` hangs"


def block(number: int) -> bytes:
    return number.to_bytes(8, "big") * (BLOCK_BYTES // 8)


class Load:
    """Creates, writes and reads through files that stay open, with a client for each."""

    def __init__(self, cluster: Any) -> None:
        self._clients = [cluster.client(OPERATION_SECONDS) for _ in range(3)]
        creator, writer, reader = self._clients
        creator.mkdir("/created")
        self.created: dict[str, bytes] = {}
        self.written: dict[int, bytes] = {}
        self._writing = writer.open_raw("/open", "w+")
        constant = reader.open_raw("/constant", "w+")
        constant.write(block(7))

        def create(number: int) -> None:
            path, data = f"/created/{number}", block(number)
            creator.batch_write([(path, 0, data)])
            moved = f"/created/{number}-moved"
            # A change that was executed twice fails: the source does not exist any more.
            creator.rename(path, moved)
            self.created[moved] = data

        def write(number: int) -> None:
            position = number % OPEN_FILE_BLOCKS
            self._writing.seek(position * BLOCK_BYTES)
            self._writing.write(block(number))
            self.written[position] = block(number)

        def read(_number: int) -> None:
            constant.seek(0)
            assert constant.read(BLOCK_BYTES) == block(7)

        operations = {"create": create, "write": write, "read": read}
        self.workers = [Worker(name, operation) for name, operation in operations.items()]

    def start(self) -> None:
        for worker in self.workers:
            worker.start()

    def check(self) -> None:
        for worker in self.workers:
            assert worker.error is None, f"{worker.name}: {worker.error!r}"

    def rounds(self) -> list[int]:
        self.check()
        return [worker.rounds for worker in self.workers]

    def take_longest(self) -> str:
        """The longest operation of each worker since the last call."""
        longest = [f"{worker.name} {worker.longest_seconds:.1f} s" for worker in self.workers]
        for worker in self.workers:
            assert worker.longest_seconds < OPERATION_SECONDS
            worker.longest_seconds = 0.0
        return ", ".join(longest)

    def stop(self) -> None:
        for worker in self.workers:
            worker.stop()

    def close(self) -> None:
        for client in self._clients:
            client.close()

    def check_contents(self) -> None:
        """Nothing that was acknowledged is missing, and nothing else is there."""
        self.check()
        creator, *_ = self._clients
        # The last create may have ended after the decision to stop; none may be missing.
        names = {f"/created/{name}" for name in creator.listdir("/created")}
        assert names == set(self.created)
        paths = sorted(self.created)
        contents = creator.batch_read([(path, 0, None) for path in paths])
        assert contents == [self.created[path] for path in paths]
        for position, data in self.written.items():
            read = creator.batch_read([("/open", position * BLOCK_BYTES, BLOCK_BYTES)])
            assert read == [data]


def wait_for_progress(cluster: Any, load: Load) -> None:
    goal = [rounds + ROUNDS_AFTER_A_FAULT for rounds in load.rounds()]

    def reached() -> bool:
        return all(now >= then for now, then in zip(load.rounds(), goal, strict=True))

    cluster.wait_for(reached, OPERATION_SECONDS, f"progress of every worker beyond {goal}")
