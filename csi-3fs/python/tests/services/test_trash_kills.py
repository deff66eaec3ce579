"""Removals and restores while metadata services are killed, over a folder and over etcd."""

from __future__ import annotations

import itertools
import random
import threading
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

FILES = [f"file-{number}" for number in range(12)]
ROUNDS = 3
OPERATIONS_PER_KILL = 6
OPERATION_SECONDS = 90.0


class Killer:
    """Kills the metadata services in turn, each some milliseconds into an operation."""

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        names = [name for name in cluster.status_file()["services"] if name.startswith("meta")]
        self._names = itertools.cycle(names)
        self._random = random.Random(7)
        self._operations = 0
        self._threads: list[threading.Thread] = []

    def before_operation(self) -> None:
        self._operations += 1
        if self._operations % OPERATIONS_PER_KILL == 0:
            delay = self._random.uniform(0, 0.01)
            arguments = (next(self._names),)
            self._threads.append(threading.Timer(delay, self._cluster.kill, arguments))
            self._threads[-1].start()

    def end(self) -> int:
        for thread in self._threads:
            thread.join()
        return len(self._threads)


@pytest.fixture(params=["folder", "etcd"])
def cluster(request: pytest.FixtureRequest, start_cluster: Callable[..., Any]) -> Any:
    if request.param == "folder":
        return start_cluster("data")
    endpoints = ",".join(request.getfixturevalue("etcd").endpoints)
    return start_cluster("data", "--metas", "2", "--mgmtds", "1", "--etcd-endpoints", endpoints)


@pytest.mark.timeout(400)
def test_each_file_is_at_its_path_or_in_the_trash(cluster: Any) -> None:
    cluster.wait_whole()
    killer = Killer(cluster)
    with cluster.client(OPERATION_SECONDS) as client:
        client.mkdir("/volume")
        client.set_quota("/volume", bytes_max=1 << 20)
        client.keep_removed("/volume", 86_400)
        for name in FILES:
            client.write_file(f"/volume/{name}", name.encode())
        trash = client.trash("/volume")
        for _ in range(ROUNDS):
            for name in FILES:
                killer.before_operation()
                client.remove(f"/volume/{name}")
            kept = {entry.path: entry.id for entry in trash.entries()}
            assert sorted(map(str, kept)) == sorted(FILES)
            # A change that was executed twice fails: the entry does not exist any more.
            for name in FILES:
                killer.before_operation()
                trash.restore(kept[name])
            assert list(trash.entries()) == []
        assert killer.end() == ROUNDS * 2 * len(FILES) // OPERATIONS_PER_KILL
        for name in FILES:
            assert client.read_file(f"/volume/{name}") == name.encode()
        quota = client.quota("/volume")
        assert quota is not None
        assert quota.inodes_used == len(FILES)
