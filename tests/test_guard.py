"""Clusters of tests do not outlive the tests, however those end."""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from testcluster.processes import Process, pids_of_cluster
from testcluster.state import State

ROOT = Path(__file__).resolve().parents[1]
GONE_DEADLINE_S = 60.0

USER = """
import os, signal, sys
from pathlib import Path
from testcluster.guard import guarded
from testcluster.processes import Process
from testcluster.state import State

state = State(Path(sys.argv[1]))
with guarded(state.folder):
    state.folder.mkdir()
    state.save()
    Process(state, "sleeper", ("/bin/sleep", "1000"), {}).start()
    if sys.argv[2] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
"""


def end(folder: Path, how: str) -> None:
    subprocess.run([sys.executable, "-c", USER, str(folder), how], cwd=ROOT, timeout=60)


def test_a_cluster_is_removed_when_its_user_exits() -> None:
    folder = Path(tempfile.mkdtemp(prefix="flyer-guard-")) / "cluster"
    end(folder, "leaves")
    assert pids_of_cluster(State(folder)) == []
    assert not folder.parent.exists()


def test_a_cluster_is_removed_when_its_user_is_killed() -> None:
    folder = Path(tempfile.mkdtemp(prefix="flyer-guard-")) / "cluster"
    end(folder, "killed")
    deadline = time.monotonic() + GONE_DEADLINE_S
    while pids_of_cluster(State(folder)) or folder.parent.exists():
        assert time.monotonic() < deadline, Process.load(State(folder), "sleeper").pids()
        time.sleep(0.05)
