"""A snapshot is one moment: of writers that continue, and while services are killed or stopped."""

from __future__ import annotations

import itertools
import os
import random
import signal
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import threefs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

VOLUME = "/moments"
CHUNK = 64 << 10
SLOT = 4096
WRITERS = 4
SNAPSHOTS = 8
SECONDS = 120.0
SERVICES = ["storage-1", "storage-2", "storage-3", "meta"]


@dataclass
class Writer:
    """Writes a counter to two files in turn, and appends a name for each."""

    client: threefs.Client
    number: int
    started: int = 0
    acknowledged: int = 0
    error: BaseException | None = None

    def run(self, stop: threading.Event) -> None:
        try:
            files = [self.client.open_raw(f"{VOLUME}/{it}", "r+b") for it in ("one", "two")]
            for count in itertools.count(1):
                if stop.is_set():
                    return
                self.started = count
                for file in files:
                    file.seek(self.number * CHUNK)
                    file.write(struct.pack("<Q", count) * (SLOT // 8))
                self.client.write_file(f"{VOLUME}/{self.number}/{count}", b"")
                self.acknowledged = count
        except BaseException as error:
            self.error = error


@dataclass(frozen=True)
class Moment:
    """What a snapshot must show: counters between those of before and after its creation."""

    acknowledged: list[int]
    started: list[int]


def shown(client: threefs.Client, name: str) -> list[tuple[int, int, int]]:
    """For each writer: the counters of both files, and the highest name."""
    root = f"{VOLUME}/.snapshots/{name}"
    one, two = (client.read_file(f"{root}/{it}") for it in ("one", "two"))
    found = []
    for writer in range(WRITERS):
        counters = []
        for content in (one, two):
            slot = content[writer * CHUNK : writer * CHUNK + SLOT]
            values = set(struct.unpack(f"<{SLOT // 8}Q", slot))
            assert len(values) == 1, "an update is whole"
            counters.append(values.pop())
        names = sorted(int(it) for it in client.listdir(f"{root}/{writer}"))
        assert names == list(range(1, len(names) + 1))
        found.append((counters[0], counters[1], len(names)))
    return found


def check(found: list[tuple[int, int, int]], moment: Moment) -> None:
    for (one, two, names), low, high in zip(
        found, moment.acknowledged, moment.started, strict=True
    ):
        assert low <= names <= two <= one <= high, (found, moment)
        assert one - names <= 1, "nothing of the next round without the whole round before"


@pytest.fixture
def cluster(start_cluster: Callable[..., Any]) -> Any:
    return start_cluster("data")


class Faults:
    """Kills or stops a service some milliseconds after the start of a creation."""

    def __init__(self, cluster: Any, kind: str) -> None:
        self._cluster = cluster
        self._kind = kind
        self._random = random.Random(kind)
        self._timer: threading.Timer | None = None
        self._stopped: list[int] = []

    def start(self, turn: int) -> None:
        service = SERVICES[turn % len(SERVICES)]
        if self._kind == "none" or (self._kind == "stop" and service == "meta"):
            return
        pid = self._cluster.pid(service)
        number = signal.SIGKILL if self._kind == "kill" else signal.SIGSTOP
        if number == signal.SIGSTOP:
            self._stopped.append(pid)
        self._timer = threading.Timer(self._random.uniform(0, 0.02), os.kill, (pid, number))
        self._timer.start()

    def end(self) -> None:
        if self._timer:
            self._timer.join()
        while self._stopped:
            # A service that mgmtd has replaced may have ended.
            with suppress(ProcessLookupError):
                os.kill(self._stopped.pop(), signal.SIGCONT)


@pytest.fixture
def faults(request: pytest.FixtureRequest, cluster: Any) -> Iterator[Faults]:
    faults = Faults(cluster, request.param)
    yield faults
    faults.end()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("faults", ["none", "kill", "stop"], indirect=True)
def test_a_snapshot_is_one_moment(cluster: Any, faults: Faults) -> None:
    moments: dict[str, Moment] = {}
    seen: dict[str, list[tuple[int, int, int]]] = {}
    stop = threading.Event()
    with cluster.client(SECONDS) as client:
        client.make_directory(VOLUME, 0o777, chunk_bytes=CHUNK)
        client.set_quota(VOLUME, bytes_max=1 << 30)
        for name in ("one", "two"):
            client.write_file(f"{VOLUME}/{name}", bytes(WRITERS * CHUNK))
        writers = [Writer(client, number) for number in range(WRITERS)]
        for writer in writers:
            client.mkdir(f"{VOLUME}/{writer.number}")
        threads = [threading.Thread(target=writer.run, args=(stop,)) for writer in writers]
        for thread in threads:
            thread.start()
        try:
            for turn in range(SNAPSHOTS):
                enough = [writer.acknowledged + 2 for writer in writers]
                cluster.wait_for(
                    lambda enough=enough: (
                        any(it.error for it in writers)
                        or all(
                            it.acknowledged >= low for it, low in zip(writers, enough, strict=True)
                        )
                    ),
                    SECONDS,
                    "writes after a snapshot",
                )
                acknowledged = [writer.acknowledged for writer in writers]
                faults.end()
                faults.start(turn)
                for attempt in itertools.count():
                    name = f"s{turn}-{attempt}"
                    try:
                        client.snapshots(VOLUME).create(name)
                    except threefs.Unavailable:
                        assert attempt < 20
                        continue
                    break
                moments[name] = Moment(acknowledged, [writer.started for writer in writers])
                seen[name] = shown(client, name)
                check(seen[name], moments[name])
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        for writer in writers:
            if writer.error:
                raise writer.error
    with cluster.client(SECONDS) as other:
        assert {name: shown(other, name) for name in moments} == seen
        for name in list(moments)[::2]:
            other.snapshots(VOLUME).remove(name)
        for name in list(moments)[1::2]:
            assert shown(other, name) == seen[name]
