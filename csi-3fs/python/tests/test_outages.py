"""mgmtd or meta is stopped for longer than every lease: calls wait, and no data is lost."""

from __future__ import annotations

import random
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

MIB = 1 << 20
OUTAGE_SECONDS = 6.0
"""Twelve node failure timeouts, which are sixteen leases."""


class Load(threading.Thread):
    """Writes, reads and replaces files; every call must succeed, at any delay."""

    def __init__(self, cluster: Any, number: int) -> None:
        super().__init__()
        self.cluster = cluster
        self.number = number
        self.ending = threading.Event()
        self.written: dict[str, bytes] = {}
        self.calls = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        seeded = random.Random(self.number)
        try:
            with self.cluster.client(60.0) as client:
                while not self.ending.is_set():
                    path = f"/load-{self.number}-{seeded.randrange(4)}"
                    data = seeded.randbytes(seeded.randrange(1, 2 * MIB))
                    client.write_file(path, data)
                    self.written[path] = data
                    assert client.read_file(path) == data
                    self.calls += 1
        except BaseException as error:
            self.error = error


@pytest.mark.parametrize("service", ["mgmtd", "meta"])
def test_calls_wait_for_a_stopped_service_and_continue(
    start_cluster: Callable[..., Any], service: str
) -> None:
    cluster = start_cluster()
    loads = [Load(cluster, number) for number in range(3)]
    for load in loads:
        load.start()
    cluster.wait_for(lambda: all(load.calls for load in loads), 30, "calls before the outage")
    pid = cluster.kill(service, signal.SIGSTOP)
    try:
        time.sleep(OUTAGE_SECONDS)
    finally:
        cluster.kill(service, signal.SIGCONT)
    assert cluster.pid(service) == pid
    before = [load.calls for load in loads]

    def all_go_on() -> bool:
        broken = [load.error for load in loads if load.error]
        assert not broken, broken
        return all(load.calls > calls + 1 for load, calls in zip(loads, before, strict=True))

    cluster.wait_for(all_go_on, 60, "calls after the outage")
    for load in loads:
        load.ending.set()
    for load in loads:
        load.join(60)
        assert load.error is None
    cluster.wait_whole()
    with cluster.client() as client:
        for load in loads:
            for path, data in load.written.items():
                assert client.read_file(path) == data
