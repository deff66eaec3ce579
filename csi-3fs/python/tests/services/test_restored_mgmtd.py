"""mgmtd loses its store, and an old dump is loaded: no acknowledged data is lost."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import threefs

sys.path.insert(0, str(Path(__file__).parent))

from test_service_processes import Pods, all_serve, choose_ports

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PATIENCE_SECONDS = 120.0


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    pods = Pods(tmp_path, choose_ports(6))
    yield pods
    for process in pods.processes.values():
        process.kill()
        process.wait()


def mgmtd(pods: Pods, command: str) -> None:
    store = [
        "--data",
        str(pods.folder / "mgmtd" / "mgmtd"),
        "--file",
        str(pods.folder / "mgmtd.dump"),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "threefs", "mgmtd", command, *store],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def restore(pods: Pods) -> None:
    """mgmtd is killed, its store is lost, and the dump is loaded."""
    pods.stop("mgmtd", signal.SIGKILL)
    shutil.rmtree(pods.folder / "mgmtd" / "mgmtd")
    mgmtd(pods, "load")
    pods.start("mgmtd")


def wait_report(pods: Pods, expected: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    deadline = time.monotonic() + PATIENCE_SECONDS
    status: dict[str, Any] = {}
    while time.monotonic() < deadline:
        try:
            with pods.client() as client:
                status = json.loads(client.status())
        except threefs.ThreeFSError:
            continue
        if expected(status):
            return status
        time.sleep(0.05)
    raise AssertionError(f"{status}\n{pods.log('mgmtd')}")


def waits_for(*nodes: int) -> Callable[[dict[str, Any]], bool]:
    """Whether every chain waits for exactly these nodes."""

    def waits(status: dict[str, Any]) -> bool:
        chains = status["unconfirmed"]["chains"]
        named = [
            {node for node in (1, 2, 3) if f"on node-{node}" in chain["reason"]} for chain in chains
        ]
        return len(chains) == 3 and all(each == set(nodes) for each in named)

    return waits


def leaves(node: int, states: dict[int, list[str]]) -> bool:
    """Whether no target of the node serves any more."""
    return "SERVING" not in states[node]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("newest_stops", [True, False], ids=["all-stop", "newest-keeps-running"])
def test_an_old_dump_and_a_stale_replica_that_starts_first_lose_nothing(
    pods: Pods, *, newest_stops: bool
) -> None:
    generator = random.Random(7)
    files = {f"/{number}": generator.randbytes(3 << 20) for number in range(6)}
    pods.start_all()
    pods.wait_states(all_serve)
    with threefs.connect(pods.folder / "cluster.json", timeout_seconds=PATIENCE_SECONDS) as client:
        client.write_file("/0", b"before the dump")
        mgmtd(pods, "dump")
        # Node 1 leaves, then node 2: node 3 alone has the newest data.
        for name, parts in (("storage-0", ("/0", "/1", "/2")), ("storage-1", ("/3", "/4", "/5"))):
            pods.stop(name, signal.SIGKILL)
            node = int(name[-1]) + 1
            pods.wait_states(partial(leaves, node))
            for part in parts:
                client.write_file(part, files[part])
        if newest_stops:
            pods.stop("storage-2", signal.SIGKILL)
        restore(pods)
        pods.start("storage-0")
        status = wait_report(pods, waits_for(2, 3) if newest_stops else waits_for(2))
        assert status["cluster"]["chains_down"] == 3
        if newest_stops:
            pods.start("storage-1")
            wait_report(pods, waits_for(3))
            # mgmtd is killed during the confirmation.
            pods.stop("mgmtd", signal.SIGKILL)
            pods.start("mgmtd")
            wait_report(pods, waits_for(3))
            pods.start("storage-2")
        else:
            pods.start("storage-1")
        pods.wait_states(all_serve)
        for path, content in files.items():
            assert client.read_file(path) == content, path
        client.write_file("/after", b"written after the restore")
        status = wait_report(pods, lambda status: not status["unconfirmed"]["chains"])
        assert status["unconfirmed"]["unknown_targets"] == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_operator_decides_if_the_newest_replica_is_lost(pods: Pods) -> None:
    pods.start_all()
    pods.wait_states(all_serve)
    with threefs.connect(pods.folder / "cluster.json", timeout_seconds=PATIENCE_SECONDS) as client:
        client.write_file("/kept", b"k" * (3 << 20))
        mgmtd(pods, "dump")
        pods.kill_one_by_one(("storage-0", "storage-1", "storage-2"))
        shutil.rmtree(pods.folder / "storage-2")
        restore(pods)
        for name in ("storage-0", "storage-1", "storage-2"):
            pods.start(name)
        status = wait_report(pods, waits_for(3))
        places = [
            place
            for chain in status["routing"]["chains"].values()
            for place in chain["targets"]
            if place["node"] == 2
        ]
        assert len(places) == 3
        for place in places:
            promotion = json.loads(client.promote(place["target"], apply=False))
            # The record of replica 2 shows that it was serving with replica 3.
            assert 3 in [node for _, node in promotion["served_last"]]
            client.promote(place["target"], apply=True)
        pods.wait_states(all_serve)
        assert client.read_file("/kept") == b"k" * (3 << 20)
