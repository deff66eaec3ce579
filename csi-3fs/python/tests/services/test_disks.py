"""Storage services with several disks that are removed, swapped, hanging or foreign."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import pytest
import threefs
from threefs.cluster import ClusterFile
from threefs.services.settings import meta_config, mgmtd_config, storage_config
from threefs.supervisor.ports import choose_ports

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

PATIENCE_SECONDS = 90.0
SERVICES = (1, 2, 3)


def node_of(service: int, disk: int) -> int:
    return disk * 1_000_000 + service


@dataclass
class Machines:
    """Three storage services, each with a process and several disks, which are folders."""

    folder: Path
    ports: list[int]
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    disks: dict[int, list[Path]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        (self.folder / "key").write_text("k" * 64)
        file = ClusterFile((self.address("mgmtd"),), (self.address("meta"),), "key")
        file.write(self.folder / "cluster.json")
        for service in SERVICES:
            for disk in range(2):
                self.add_disk(service, f"{service}-{disk}")

    def address(self, name: str) -> str:
        names = ["mgmtd", "meta", *(f"storage-{service}" for service in SERVICES)]
        return f"127.0.0.1:{self.ports[names.index(name)]}"

    def add_disk(self, service: int, name: str) -> Path:
        path = self.folder / name
        self.disks.setdefault(service, []).append(path)
        self.empty_disk(path)
        return path

    def empty_disk(self, path: Path) -> None:
        path.mkdir()
        (path / "adopt").touch()

    def config(self, name: str) -> dict[str, Any]:
        address, key, mgmtd = self.address(name), self.folder / "key", self.address("mgmtd")
        if name == "mgmtd":
            return mgmtd_config(
                listen=address,
                advertise=address,
                data=self.folder / name,
                key_file=key,
                storage_nodes=3,
                replicas=3,
                chains_per_node=2,
                node_failure_ms=1000,
            )
        if name == "meta":
            return meta_config(
                listen=address,
                data=self.folder / name,
                key_file=key,
                mgmtd=mgmtd,
                chunk_bytes=1 << 16,
            )
        service = int(name.rpartition("-")[2])
        first, *others = self.disks[service]
        config = storage_config(
            listen=address,
            advertise=address,
            data=first,
            key_file=key,
            mgmtd=mgmtd,
            node_id=service,
            capacity_bytes=0,
            node_failure_ms=1000,
        )
        return config | {"data": str(first), "disks": [str(path) for path in others]}

    def start(self, name: str) -> None:
        path = self.folder / f"{name}.json"
        path.write_text(json.dumps(self.config(name)))
        with (self.folder / f"{name}.log").open("a") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-P", "-m", "threefs.service", name.partition("-")[0], str(path)],
                stderr=log,
                stdout=log,
            )

    def start_all(self) -> None:
        for name in ("mgmtd", "meta", *(f"storage-{service}" for service in SERVICES)):
            self.start(name)

    def stop(self, name: str, number: signal.Signals) -> None:
        process = self.processes.pop(name)
        process.send_signal(number)
        process.wait(timeout=PATIENCE_SECONDS)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def client(self) -> threefs.Client:
        return threefs.connect(self.folder / "cluster.json", timeout_seconds=PATIENCE_SECONDS)

    def states(self) -> dict[int, set[str]]:
        """States of the targets by node. Each chain is on all services, also while it is moved."""
        with self.client() as client:
            chains = json.loads(client.status())["routing"]["chains"].values()
        states: dict[int, set[str]] = {}
        for chain in chains:
            services = {place["node"] % 1_000_000 for place in chain["targets"]}
            assert services == set(SERVICES), chain
            for place in chain["targets"]:
                states.setdefault(place["node"], set()).add(place["state"])
        return states

    def wait_states(self, expected: Callable[[dict[int, set[str]]], bool]) -> None:
        states: dict[int, set[str]] = {}

        def are_expected() -> bool:
            nonlocal states
            states = self.states()
            return expected(states)

        self.wait(are_expected, lambda: f"{states}")

    def wait(self, condition: Callable[[], bool], detail: Callable[[], str] = str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            try:
                if condition():
                    return
            except threefs.ThreeFSError:
                pass
            time.sleep(0.05)
        logs = "\n".join(self.log(f"storage-{service}")[-3000:] for service in SERVICES)
        raise AssertionError(f"{detail()}\n{logs}")

    def wait_whole(self, *nodes: int) -> None:
        """Wait until each of these nodes has targets, and all targets of all nodes serve."""
        self.wait_states(
            lambda states: (
                set(nodes) <= set(states) and all(each == {"SERVING"} for each in states.values())
            )
        )

    def assert_service_has(self, service: int, files: dict[str, bytes]) -> None:
        """Read all bytes from the disks of one service: the other services are killed."""
        others = [f"storage-{other}" for other in SERVICES if other != service]
        for name in others:
            self.stop(name, signal.SIGKILL)
        with self.client() as client:
            for path, content in files.items():
                assert client.read_file(path) == content, path
        for name in others:
            self.start(name)


class Load:
    """Writes files in a thread until it is stopped; fails if one could not be written."""

    def __init__(self, machines: Machines, name: str) -> None:
        self.files: dict[str, bytes] = {}
        self._error: threefs.ThreeFSError | None = None
        self._stopped = threading.Event()
        self._machines, self._name = machines, name
        self._thread = threading.Thread(target=self._write)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def written(self) -> dict[str, bytes]:
        assert self._error is None, self._error
        assert self.files
        return self.files

    def _write(self) -> None:
        try:
            with self._machines.client() as client:
                while not self._stopped.is_set():
                    path = f"/{self._name}-{len(self.files)}"
                    content = os.urandom(1000 + 90_000 * (len(self.files) % 5))
                    client.write_file(path, content)
                    self.files[path] = content
                    self._stopped.wait(0.02)
        except threefs.ThreeFSError as error:
            self._error = error


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    machines = Machines(tmp_path, choose_ports(5))
    machines.start_all()
    try:
        machines.wait_whole(*(node_of(service, disk) for service in SERVICES for disk in range(2)))
        yield machines
    finally:
        for process in machines.processes.values():
            process.kill()
            process.wait()


def only_others_than(*nodes: int) -> Callable[[dict[int, set[str]]], bool]:
    """All nodes serve, except these, which serve nothing."""
    return lambda states: all(
        "SERVING" not in each if node in nodes else each == {"SERVING"}
        for node, each in states.items()
    )


def disk_node(path: Path) -> int:
    return int(json.loads((path / "identity.json").read_text())["node"])


@contextmanager
def hanging(path: Path) -> Iterator[None]:
    """Reads of the identity of a disk hang."""
    identity, saved = path / "identity.json", path.with_suffix(".identity")
    saved.hardlink_to(identity)
    fifo = path.with_suffix(".fifo")
    os.mkfifo(fifo)
    # The path has an identity at any time.
    fifo.rename(identity)
    try:
        yield
    finally:
        writer = os.open(identity, os.O_RDWR)
        saved.rename(identity)
        # A read that hangs gets an empty file.
        os.close(writer)


def test_a_disk_is_removed_under_load_and_returns_at_another_path(machines: Machines) -> None:
    first, second = machines.disks[1]
    spare = machines.folder / "spare"
    moved, kept = node_of(1, 1), node_of(1, 0)
    assert (disk_node(first), disk_node(second)) == (kept, moved), "the order of the paths"
    with Load(machines, "removed") as load:
        machines.disks[1].append(spare)
        machines.stop("storage-1", signal.SIGKILL)
        machines.start("storage-1")
        machines.wait_whole(moved, kept)
        second.rename(machines.folder / "unplugged")
        machines.wait_states(only_others_than(moved))
        # The other disk continues, also while its path hangs.
        with hanging(first):
            machines.stop("storage-2", signal.SIGKILL)
            down = {moved, *(node_of(2, disk) for disk in range(2))}
            # A target that is moved there now cannot be opened.
            machines.wait_states(
                lambda states: all(
                    ("SERVING" in each) == (node not in down) for node, each in states.items()
                )
            )
            count = len(load.files)
            machines.wait(lambda: len(load.files) > count + 5)
            machines.start("storage-2")
        (machines.folder / "unplugged").rename(spare)
        machines.wait_whole(moved)
    files = load.written()
    assert machines.processes["storage-1"].poll() is None
    machines.wait_whole(moved)
    machines.assert_service_has(1, files)


def test_disks_are_found_by_their_id_at_start_and_bad_ones_do_not_stop_the_others(
    machines: Machines, tmp_path: Path
) -> None:
    with Load(machines, "killed") as load:
        machines.wait(lambda: len(load.files) > 5)
        for service in SERVICES[:2]:
            machines.stop(f"storage-{service}", signal.SIGKILL)
        first, second = machines.disks[1]
        first.rename(tmp_path / "swap")
        second.rename(first)
        (tmp_path / "swap").rename(second)
        bad = machines.disks[2][0]
        hung = disk_node(bad)
        with hanging(bad):
            for service in SERVICES[:2]:
                machines.start(f"storage-{service}")
            machines.wait_states(only_others_than(hung))
        machines.wait_whole(hung)
        machines.stop("storage-2", signal.SIGKILL)
        identity = bad / "identity.json"
        content = identity.read_text()
        identity.write_text("{")
        machines.start("storage-2")
        machines.wait_states(only_others_than(hung))
        machines.wait(lambda: "`identity.json` is damaged" in machines.log("storage-2"))
        identity.write_text(content)
        machines.wait_whole(hung)
    files = load.written()
    machines.wait_whole()
    machines.assert_service_has(1, files)
    machines.wait_whole()
    machines.assert_service_has(2, files)


def test_foreign_disks_are_refused_and_empty_ones_are_adopted(machines: Machines) -> None:
    with Load(machines, "foreign") as load:
        machines.wait(lambda: len(load.files) > 5)
        machines.stop("storage-1", signal.SIGKILL)
        # A disk of another cluster, and one of another service.
        first, second = machines.disks[1]
        mark, foreign = second / "cluster", disk_node(second)
        own = mark.read_text()
        mark.write_text(f"{int(own, 16) ^ 1:032x}\n")
        stray = machines.add_disk(1, "stray")
        (stray / "identity.json").write_text('{"version": 1, "node": 2, "disk": "stray"}')
        machines.start("storage-1")
        machines.wait_states(only_others_than(foreign))
        machines.wait(lambda: "holds data of cluster-" in machines.log("storage-1"))
        machines.wait(lambda: "belongs to node-2" in machines.log("storage-1"))
        machines.stop("storage-1", signal.SIGTERM)
        mark.write_text(own)
        # An empty disk next to used ones gets the next node.
        (stray / "identity.json").unlink()
        machines.start("storage-1")
        machines.wait(lambda: (stray / "identity.json").exists())
        assert disk_node(stray) == node_of(1, 2)
        machines.wait_whole(foreign)
        # A disk that replaces a lost one is synced.
        machines.stop("storage-1", signal.SIGKILL)
        shutil.rmtree(second)
        machines.empty_disk(second)
        machines.start("storage-1")
        machines.wait(lambda: (second / "identity.json").exists())
        assert disk_node(second) == foreign
        machines.wait_whole(foreign)
    files = load.written()
    machines.wait_whole()
    machines.assert_service_has(1, files)
    assert disk_node(first) % 1_000_000 == 1


def test_node_ids_of_further_disks_and_repeated_paths_are_refused(
    machines: Machines, tmp_path: Path
) -> None:
    config = machines.config("storage-1") | {"listen": "127.0.0.1:0", "data": str(tmp_path / "x")}
    cases = [
        ({"node_id": 1_000_003}, "node id 1000003 is above 999999"),
        ({"disks": [str(tmp_path / "x")]}, "listed twice"),
    ]
    for change, message in cases:
        path = tmp_path / "bad.json"
        path.write_text(json.dumps(config | change))
        result = subprocess.run(
            [sys.executable, "-P", "-m", "threefs.service", "storage", str(path)],
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=False,
        )
        assert result.returncode == 1
        assert message in result.stderr, result.stderr
