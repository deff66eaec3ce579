"""Random services are killed and stopped at random moments; an oracle records acknowledged writes.

Each worker has separate files and writes generations into them: a read must give exactly the
newest acknowledged generation. Other workers, each with a client, write one file together, the same
places and places side by side in the same chunks (see `shared_file`). An error of any operation
fails the test: clients outlive every service. The seed is printed; run one again with
``THREEFS_KILL_SEED=…``.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import threefs

sys.path.insert(0, str(Path(__file__).parent))

from shared_file import SharedFile, SharedWriter

SERVICES = ["mgmtd", "meta", "storage-1", "storage-2", "storage-3"]
FILE_BYTES = 1_500_000
FILES_PER_WORKER = 4
WORKERS = 3
SHARED_WRITERS = 4


@dataclass
class Worker:
    """Writes, reads and replaces its files, and checks what it reads."""

    client: threefs.Client
    folder: str
    seed: int
    acknowledged: dict[str, bytearray] = field(default_factory=dict)
    operations: int = 0
    error: BaseException | None = None

    def run(self, enough: threading.Event) -> None:
        seeded = random.Random(self.seed)
        try:
            while not enough.is_set():
                self.step(seeded, f"{self.folder}/{self.seed}-{seeded.randrange(FILES_PER_WORKER)}")
                self.operations += 1
        except BaseException as error:
            self.error = error

    def step(self, seeded: random.Random, path: str) -> None:
        expected = self.acknowledged.get(path)
        choice = seeded.random()
        if expected is None or choice < 0.1:
            data = bytearray(seeded.randbytes(seeded.randrange(FILE_BYTES)))
            self.client.write_file(path, data)
            self.acknowledged[path] = data
        elif choice < 0.5:
            offset = seeded.randrange(len(expected) + 1)
            piece = seeded.randbytes(seeded.randrange(1, 100_000))
            self.client.batch_write([(path, offset, piece)])
            expected.extend(bytes(max(0, offset + len(piece) - len(expected))))
            expected[offset : offset + len(piece)] = piece
        elif choice < 0.55:
            self.client.remove(path)
            del self.acknowledged[path]
        else:
            assert self.client.read_file(path) == expected, path

    def check(self, client: threefs.Client) -> None:
        for path, data in self.acknowledged.items():
            assert client.read_file(path) == data, path
        names = {f"{self.folder}/{name}" for name in client.listdir(self.folder)}
        names = {path for path in names if f"/{self.seed}-" in path}
        assert names == set(self.acknowledged)


def disturb(cluster: Any, seeded: random.Random, seconds: float) -> list[str]:
    """Kill or stop one service after the other, sometimes two together."""
    actions = []
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for service in seeded.sample(SERVICES, seeded.choice([1, 1, 1, 2])):
            pid = cluster.pid(service)
            if seeded.random() < 0.2:
                os.kill(pid, signal.SIGSTOP)
                threading.Timer(seeded.uniform(0.1, 2.0), resume, [pid]).start()
                actions.append(f"stop {service}")
            else:
                os.kill(pid, signal.SIGKILL)
                actions.append(f"kill {service}")
        time.sleep(seeded.uniform(0.0, 1.0))
    return actions


def resume(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def run_seed(cluster: Any, folder: str, seed: int, seconds: float) -> None:
    print(f"THREEFS_KILL_SEED={seed}")
    enough = threading.Event()
    shared = SharedFile(f"{folder}/shared")
    with contextlib.ExitStack() as open_clients:
        client, *clients = (
            open_clients.enter_context(cluster.client(60)) for _ in range(1 + SHARED_WRITERS)
        )
        client.write_file(shared.path, b"")
        workers = [Worker(client, folder, seed * 100 + number) for number in range(WORKERS)]
        writers = [
            SharedWriter(writer_client, shared, number, seed * 100 + 50 + number)
            for number, writer_client in enumerate(clients)
        ]
        everyone: list[Worker | SharedWriter] = [*workers, *writers]
        threads = [threading.Thread(target=worker.run, args=[enough]) for worker in everyone]
        for thread in threads:
            thread.start()
        try:
            actions = disturb(cluster, random.Random(seed), seconds)
        finally:
            enough.set()
            for thread in threads:
                thread.join(70)
        operations = [sum(w.operations for w in group) for group in (workers, writers)]
        print(
            f"{len(actions)} disturbances, {operations[0]} operations, {operations[1]} of one file"
        )
        for worker in everyone:
            if worker.error is not None:
                raise worker.error
    cluster.wait_whole()
    with cluster.client() as fresh:
        for worker in workers:
            worker.check(fresh)
        shared.check(fresh)
    assert actions
    assert all(operations)


def test_random_kills_lose_nothing(cluster: Any, folder: str) -> None:
    run_seed(cluster, folder, int(os.environ.get("THREEFS_KILL_SEED", "1")), seconds=6)


@pytest.mark.soak
@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", range(2, 7))
def test_random_kills_over_a_longer_time_lose_nothing(cluster: Any, folder: str, seed: int) -> None:
    run_seed(cluster, folder, seed, seconds=15)
