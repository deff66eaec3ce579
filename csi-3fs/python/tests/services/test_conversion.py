"""A cluster in use is converted from embedded stores to etcd, and back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from threefs import errors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from threefs import Client

TIMERS = ("--ready-timeout", "60", "--node-failure-ms", "5000")
LARGE = 8 << 20


def run(*arguments: str) -> str:
    command = [sys.executable, "-m", "threefs", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def report(*arguments: str) -> dict[str, Any]:
    output: dict[str, Any] = json.loads(run(*arguments, "-o", "json"))
    return output


def convert(kind: str, source: list[str], target: list[str], file: Path) -> None:
    dumped = report(kind, "dump", *source, "--file", str(file))
    assert report(kind, "verify", "--file", str(file)) == dumped
    assert report(kind, "load", *target, "--file", str(file)) == dumped


class Maker(threading.Thread):
    """Creates directories one after the other, through every conversion."""

    def __init__(self, client: Client) -> None:
        super().__init__(daemon=True)
        self._client = client
        self._stop_requested = threading.Event()
        self.made = 0
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            while not self._stop_requested.is_set():
                # A change that is executed twice finds its directory.
                self._client.mkdir(f"/made/{self.made}")
                self.made += 1
        except errors.ThreeFSError as error:
            self.error = error

    def finish(self) -> int:
        self._stop_requested.set()
        self.join(timeout=120)
        assert not self.is_alive()
        assert self.error is None
        return self.made


@pytest.fixture
def held_file(tmp_path: Path) -> Iterator[Callable[[Any, str], HeldFile]]:
    """Open a file in a mount of the cluster, so that it remains when it is removed."""
    files: list[HeldFile] = []

    def hold(cluster: Any, name: str) -> HeldFile:
        files.append(HeldFile(cluster, name, tmp_path))
        return files[-1]

    yield hold
    for file in files:
        file.close()


class HeldFile:
    """An open file of a mount."""

    def __init__(self, cluster: Any, name: str, folder: Path) -> None:
        self._target, self._state = folder / "mnt", ["--state", str(folder / "mounts")]
        command = ["mount", "--cluster", str(cluster.file), "--root", "/", *self._state]
        run(*command, str(self._target))
        self._fd = os.open(self._target / name, os.O_RDONLY)
        self._reader = ThreadPoolExecutor(1)

    def read(self, offset: int, size: int) -> bytes:
        return self._reader.submit(os.pread, self._fd, size, offset).result(120)

    def close_file(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def close(self) -> None:
        self.close_file()
        run("umount", *self._state, str(self._target))


def used_bytes(cluster: Any) -> int:
    return sum(node["used_bytes"] for node in cluster.status()["cluster"]["nodes"])


def check(cluster: Any, number: int) -> None:
    """Files and limits are as before, and can be used."""
    with cluster.client(60.0) as client:
        assert client.read_file("/kept") == b"k" * 300_000
        assert client.read_file("/limited/a") == b"a" * 70_000
        quota = client.quota("/limited")
        assert quota is not None
        assert (quota.bytes_used, quota.inodes_max, quota.inodes_used) == (70_000, 1, 1)
        with pytest.raises(errors.NoSpace):
            client.write_file("/limited/b", b"b")
        client.write_file(f"/later-{number}", b"l" * 100_000)
        for earlier in range(number + 1):
            assert client.read_file(f"/later-{earlier}") == b"l" * 100_000


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(
    os.geteuid() != 0 or not Path("/dev/fuse").exists(), reason="needs root and /dev/fuse"
)
def test_a_cluster_in_use_is_converted_to_etcd_and_back(
    start_cluster: Callable[..., Any],
    etcd: Any,
    held_file: Callable[[Any, str], HeldFile],
    tmp_path: Path,
) -> None:
    endpoints = ["--etcd-endpoints", ",".join(etcd.endpoints)]
    cluster = start_cluster("data", *TIMERS)
    folders = {kind: cluster.folder / "data" / kind for kind in ("meta", "mgmtd")}
    with cluster.client(300.0) as client, cluster.client(300.0) as making:
        client.write_file("/kept", b"k" * 300_000)
        client.mkdir("/limited")
        client.set_quota("/limited", inodes_max=1)
        client.write_file("/limited/a", b"a" * 70_000)
        client.write_file("/held", b"h" * LARGE)
        client.write_file("/collected", b"c" * LARGE)
        client.mkdir("/made")
        maker = Maker(making)
        maker.start()
        held = held_file(cluster, "held")
        client.remove("/held")
        client.remove("/collected")
        cluster.wait_for(lambda: used_bytes(cluster) > 6 * LARGE, 60, "two large files")

        cluster.stop()
        for kind, folder in folders.items():
            convert(kind, ["--data", str(folder)], endpoints, tmp_path / f"{kind}.dump")
            folder.rename(tmp_path / f"{kind}.embedded")
        cluster = start_cluster("data", *endpoints, *TIMERS)
        check(cluster, 0)
        assert not any(folder.exists() for folder in folders.values())
        # The removed file is collected, unless a client has it open.
        cluster.wait_for(lambda: used_bytes(cluster) < 5 * LARGE, 60, "collection")
        # Not in the page cache: each part is read once.
        assert held.read(0, 1 << 20) == b"h" * (1 << 20)

        cluster.stop()
        for kind, folder in folders.items():
            convert(kind, endpoints, ["--data", str(folder)], tmp_path / f"{kind}.etcd")
        cluster = start_cluster("data", *TIMERS)
        check(cluster, 1)
        assert held.read(LARGE - (1 << 20), 1 << 20) == b"h" * (1 << 20)
        held.close_file()
        cluster.wait_for(lambda: used_bytes(cluster) < 2 * LARGE, 60, "collection")
        count = maker.finish()
        assert count > 0
        assert len(client.listdir("/made")) == count
