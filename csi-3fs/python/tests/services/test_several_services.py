"""Two metadata services and two mgmtds over etcd: one of each is killed or stopped under load."""

from __future__ import annotations

import json
import signal
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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


@pytest.fixture
def cluster(start_cluster: Callable[..., Any], etcd: Any) -> Any:
    return start_cluster(
        "data",
        *("--metas", "2", "--mgmtds", "2", "--etcd-endpoints", ",".join(etcd.endpoints)),
        *("--ready-timeout", "90", "--node-failure-ms", "2000"),
    )


@pytest.fixture
def load(cluster: Any) -> Iterator[Load]:
    load = Load(cluster)
    load.start()
    yield load
    load.stop()
    load.close()


def roles(cluster: Any, kind: str) -> dict[str, dict[str, Any]]:
    """Status of each service of a kind, by its name."""
    names = {address: name for name, address in cluster.status_file()["services"].items()}
    with cluster.client(OPERATION_SECONDS) as client:
        status = json.loads(client.status())
    return {names[each["address"]]: each for each in status[f"{kind}s"]}


def leader(cluster: Any, kind: str) -> str:
    def find() -> str | None:
        leaders = [name for name, each in roles(cluster, kind).items() if each["leads"]]
        return leaders[0] if len(leaders) == 1 else None

    name: str = cluster.wait_for(find, 60, f"one {kind} that leads")
    return name


def wait_for_progress(cluster: Any, load: Load) -> None:
    goal = [rounds + ROUNDS_AFTER_A_FAULT for rounds in load.rounds()]

    def reached() -> bool:
        return all(now >= then for now, then in zip(load.rounds(), goal, strict=True))

    cluster.wait_for(reached, OPERATION_SECONDS, f"progress of every worker beyond {goal}")


def wait_for_states(cluster: Any, kind: str, states: set[str]) -> None:
    def reached() -> bool:
        return {each["state"] for each in roles(cluster, kind).values()} == states

    cluster.wait_for(reached, 90, f"{kind}: {states}")


def lose(cluster: Any, load: Load, lost: str, number: signal.Signals) -> None:
    """Kill or stop one service; every worker continues without it."""
    kind = lost.partition("-")[0]
    wait_for_progress(cluster, load)
    load.take_longest()
    pid = cluster.kill(lost, number)
    wait_for_progress(cluster, load)
    if number == signal.SIGSTOP:
        cluster.wait_for(lambda: leader(cluster, kind) != lost, 90, f"a successor of {lost}")
        assert roles(cluster, kind)[lost]["state"] == "unreachable"
        wait_for_progress(cluster, load)
        cluster.kill(lost, signal.SIGCONT)
    if number == signal.SIGKILL or kind == "meta":
        # A metadata service that others have removed exits; its next start is a new one.
        cluster.wait_for(lambda: cluster.pid(lost) != pid, 60, f"a start of {lost}")
    healthy = {"meta": {"serving"}, "mgmtd": {"serving", "standby"}}
    wait_for_states(cluster, kind, healthy[kind])
    # Operations that have waited end, and count.
    wait_for_progress(cluster, load)
    print(f"{number.name} of {lost}: {load.take_longest()}", flush=True)


@pytest.mark.timeout(400)
def test_a_lost_meta_or_mgmtd_loses_no_acknowledged_operation(cluster: Any, load: Load) -> None:
    for lost in ("meta", "meta-2", leader(cluster, "mgmtd")):
        lose(cluster, load, lost, signal.SIGKILL)
    # The other one leads after the first of two.
    for kind in ("meta", "meta", "mgmtd"):
        lose(cluster, load, leader(cluster, kind), signal.SIGSTOP)
    wait_for_progress(cluster, load)
    load.stop()
    load.check()
    print("rounds:", load.rounds())
    with cluster.client(OPERATION_SECONDS) as client:
        # The last create may have ended after the decision to stop; none may be missing.
        names = {f"/created/{name}" for name in client.listdir("/created")}
        assert names == set(load.created)
        paths = sorted(load.created)
        contents = client.batch_read([(path, 0, None) for path in paths])
        assert contents == [load.created[path] for path in paths]
        for position, data in load.written.items():
            assert client.batch_read([("/open", position * BLOCK_BYTES, BLOCK_BYTES)]) == [data]


def test_a_folder_gets_more_services_and_fewer(
    start_cluster: Callable[..., Any], etcd: Any
) -> None:
    options = ("--etcd-endpoints", ",".join(etcd.endpoints), "--ready-timeout", "90")
    one = start_cluster("data", *options)
    ports = one.status_file()["services"]
    with one.client() as client:
        client.write_file("/file", b"data")
    one.stop()
    for metas, mgmtds in ((3, 2), (1, 1)):
        counts = ("--metas", str(metas), "--mgmtds", str(mgmtds))
        cluster = start_cluster("data", *options, *counts)
        assert ports.items() <= cluster.status_file()["services"].items()
        assert len(cluster.status_file()["mgmtd"]) == mgmtds
        status = cluster.status()
        assert [each["state"] for each in status["metas"]] == ["serving"] * metas
        states = sorted(each["state"] for each in status["mgmtds"])
        assert states == ["serving", "standby"][:mgmtds]
        with cluster.client() as client:
            assert client.read_file("/file") == b"data"
        cluster.stop()
