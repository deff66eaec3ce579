"""`down` removes every process, mount, interface, route, rule, control group and file."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from testcluster import network
from testcluster.down import down
from testcluster.processes import pids_of_cluster
from testcluster.state import State

ROOT = Path(__file__).parents[3]


@pytest.mark.alone
@pytest.mark.timeout(400)
@pytest.mark.parametrize("moment_s", [0.3, 1.0, 2.5, 5.0, 9.0])
def test_down_removes_everything_after_up_was_killed(tmp_path: Path, moment_s: float) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    folder = tmp_path / "cluster"
    before = _machine()
    command = [sys.executable, "-m", "testcluster", "up", f"--state={folder}"]
    up = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    try:
        time.sleep(moment_s + random.uniform(0, 0.5))  # at a random time
        os.killpg(up.pid, signal.SIGKILL)
        up.wait(timeout=30)
    finally:
        down(folder)
    assert not folder.exists()
    assert list(tmp_path.iterdir()) == []
    assert pids_of_cluster(State(folder)) == []
    assert _machine() == before


def test_leftovers_of_a_network_are_detected(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    state = State(tmp_path / "cluster")
    assert network.traces(state) == []
    try:
        network.create(state)
        lines = network.traces(state)
        assert any(f"ff{state.id}br: " in line for line in lines)
        assert any(f"10.{state.octet}." in line for line in lines)  # the bridge's own route
    finally:
        network.remove(state)
    assert network.traces(state) == []


def _machine() -> dict[str, list[str]]:
    """Resources that a cluster could leave on this machine."""

    def lines(*command: str) -> list[str]:
        result = subprocess.run(command, capture_output=True, text=True, check=True)
        return [line for line in result.stdout.splitlines() if not line.startswith("#")]

    return {
        "links": lines("ip", "-brief", "link"),
        "routes": lines("ip", "route", "show", "table", "all"),
        "rules": [line.partition("[")[0] for line in lines("iptables-save")],
        "mounts": Path("/proc/self/mountinfo").read_text().splitlines(),
        "cgroups": sorted(str(path) for path in Path("/sys/fs/cgroup").glob("*/fireflyer-*")),
        "folders": [
            str(path)
            for path in (Path("/var/lib/kubelet"), Path("/run/containerd"), Path("/var/log/pods"))
            if path.exists()
        ],
    }
