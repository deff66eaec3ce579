"""The tutorial without Docker: `make cluster-up`, and the commands that it prints next."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from e2e.lib.jobs import job, wait_phase
from testcluster.guard import guarded
from testcluster.handle import Cluster
from testcluster.state import State
from tests.doc_blocks import ROOT, blocks

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(1800)]

TUTORIAL = ROOT / "docs/tutorial/kubernetes.md"
SCRIPT = "print('trained')"
DEADLINE_SECONDS = 900


def bash(text: str) -> str:
    result = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    assert result.returncode == 0, f"{text}\n{result.stdout}"
    return result.stdout


def commands(text: str) -> list[str]:
    """Commands without comments, options of a test, and the interpreter's path."""
    joined = re.sub(r" \\\n\s*", " ", text)
    plain = re.sub(r" +#.*| --state [^ )\"]+", "", joined)
    plain = re.sub(r"[^\s(]*python[0-9.]* -m", "python -m", plain).replace("--values ", "-f ")
    return [line.strip() for line in plain.strip().splitlines()]


def test_the_next_commands_install_the_chart_and_run_a_job() -> None:
    state = Path(tempfile.mkdtemp(prefix="flyer-e2e-")) / "cluster"
    with guarded(state):
        printed = bash(f"{sys.executable} -m testcluster up --state {state}")
        assert "started node node-s1" in printed
        following = printed.partition("Next:\n")[2]
        (block,) = (block for block in blocks("elsewhere") if block.page == TUTORIAL)
        assert commands(following) == commands(block.text)[1:]
        bash(following)
        cluster = Cluster(State.load(state))
        cluster.apply(job("first", 4, SCRIPT))
        ended = wait_phase(cluster, "first", "default", "Succeeded", "Failed")
        assert ended["phase"] == "Succeeded", ended
