"""A storage service with two disks, as in a pod: probes and names."""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from threefs.nodes import node_name, node_of

sys.path.insert(0, str(Path(__file__).parent))

from test_drain import threefs
from test_service_processes import PATIENCE_SECONDS, Pods, pods

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["pods"]

FURTHER = node_of(1, 1)


def wait_ready(pods: Pods, expected: Callable[[int, str], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not expected(*(last := ready(pods))):
        assert time.monotonic() < deadline, last


def ready(pods: Pods) -> tuple[int, str]:
    mgmtd = ["--mgmtd", pods.address("mgmtd"), "--listen", pods.address("storage-0")]
    result = pods.check("storage", "--ready", "--pod-name", "storage-0", *mgmtd)
    return result.returncode, result.stderr


def test_a_pod_with_a_lost_disk_is_ready_again_when_its_node_is_empty(pods: Pods) -> None:
    disk = pods.folder / "disk"
    for folder in (pods.folder / "storage-0", disk):
        (folder / "storage").mkdir(parents=True)
        (folder / "storage" / "adopt").touch()
    for name in ("mgmtd", "meta", "storage-1", "storage-2"):
        pods.start(name)
    pods.start("storage-0", "--disk", str(disk))
    # The further disk gets chains when the first ones exist.
    pods.wait_states(
        lambda states: (
            set(states) == {1, 2, 3, FURTHER}
            and all(set(of_node) == {"SERVING"} for of_node in states.values())
        )
    )
    wait_ready(pods, lambda status, _: status == 0)
    with pods.client() as client:
        client.write_file("/file", b"kept" * 100_000)
        lost = json.loads((disk / "storage" / "identity.json").read_text())["node"]
        shutil.rmtree(disk)
        pods.wait_states(lambda states: "SERVING" not in states[lost])
        wait_ready(pods, lambda _, error: f"mgmtd counts {node_name(lost)} as dead" in error)
        drained = threefs(pods, "drain", node_name(lost), "--apply").stdout
        assert f"{node_name(lost)}: empty" in drained
        wait_ready(pods, lambda status, _: status == 0)
        assert client.read_file("/file") == b"kept" * 100_000
