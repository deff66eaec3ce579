"""One cluster of real processes for a whole session, and new ones for tests that break it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
import threefs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass
class Cluster:
    """A `threefs serve` process and what it wrote."""

    folder: Path
    process: subprocess.Popen[str]

    @property
    def file(self) -> Path:
        return self.folder / "cluster.json"

    def client(self, timeout_seconds: float = 30.0) -> threefs.Client:
        return threefs.connect(self.file, timeout_seconds=timeout_seconds)

    def status_file(self) -> dict[str, Any]:
        contents: dict[str, Any] = json.loads(self.file.read_text())
        return contents

    def pid(self, service: str) -> int:
        """The running process of the service, once there is one."""

        def living() -> int | None:
            pid = self.status_file()["pids"].get(service)
            return pid if pid is not None and is_alive(pid) else None

        process_id = wait_for(living, 20, f"a process of {service}")
        assert process_id is not None
        return process_id

    def kill(self, service: str, number: signal.Signals = signal.SIGKILL) -> int:
        pid = self.pid(service)
        os.kill(pid, number)
        return pid

    def status(self) -> dict[str, Any]:
        with self.client(5.0) as client:
            status: dict[str, Any] = json.loads(client.status())
        return status

    def wait_whole(self, seconds: float = 40.0) -> None:
        def whole() -> bool:
            try:
                cluster = self.status()["cluster"]
            except threefs.ThreeFSError:
                return False
            return bool(cluster["chains"] and cluster["chains"] == cluster["chains_whole"])

        wait_for(whole, seconds, "all targets SERVING")

    @staticmethod
    def wait_for(look: Callable[[], T], seconds: float, description: str) -> T:
        return wait_for(look, seconds, description)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(timeout=60)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


T = TypeVar("T")


def wait_for(look: Callable[[], T], seconds: float, description: str) -> T:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := look():
            return value
        time.sleep(0.02)
    raise AssertionError(f"no {description} within {seconds} s")


def serve(folder: Path, *options: str) -> Cluster:
    """Start a cluster and wait until it reports that it is ready."""
    command = [sys.executable, "-m", "threefs", "serve", "--data", str(folder)]
    with (folder.parent / f"{folder.name}.stderr").open("w") as errors:
        process = subprocess.Popen(
            [*command, "--restart-after", "0.2", "--node-failure-ms", "500", *options],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line.startswith("ready"):
        process.kill()
        raise AssertionError((folder.parent / f"{folder.name}.stderr").read_text())
    return Cluster(folder, process)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The shared cluster: tests may kill its services, but leave it whole."""
    cluster = serve(tmp_path_factory.mktemp("shared") / "data")
    yield cluster
    cluster.stop()


@pytest.fixture
def start_cluster(tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    """Start separate clusters: `start_cluster("name", "--option", …)`."""
    started: list[Cluster] = []

    def start(name: str = "data", *options: str) -> Cluster:
        started.append(serve(tmp_path / name, *options))
        return started[-1]

    yield start
    for cluster in started:
        cluster.stop()


@pytest.fixture
def client(cluster: Cluster) -> Iterator[threefs.Client]:
    with cluster.client() as client:
        yield client


@pytest.fixture
def folder(client: threefs.Client, request: pytest.FixtureRequest) -> Iterator[str]:
    """A directory in the shared cluster for one test."""
    path = f"/{request.node.name.translate(str.maketrans('/[]', '---'))}"
    client.mkdir(path)
    yield path
    client.rmtree(path)
