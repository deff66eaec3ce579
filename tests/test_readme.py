"""The README's commands have the described effects."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from demo.scenario import variant
from demo.stack import EXAMPLE

ROOT = Path(__file__).resolve().parents[1]
READY_SECONDS = 60
RUN_SECONDS = 300
STEPS = 40
"""Number of steps here; the demo trains all 120 of the example."""


@pytest.fixture
def by_hand(tmp_path: Path) -> Iterator[list[str]]:
    """The lines of the block after its first, which is running in the background."""
    section = (ROOT / "README.md").read_text().partition("## By hand")[2]
    lines = re.search(r"```sh\n(.*?)```", section, re.DOTALL)[1].splitlines()
    lines = [line.replace("$PWD/build", str(tmp_path)) for line in lines]
    example, short = str(EXAMPLE.relative_to(ROOT)), tmp_path / "flyerjob.yaml"
    short.write_text(variant(EXAMPLE, "gpt", **{'"120"': f'"{STEPS}"'}))
    assert any(example in line for line in lines)
    lines = [line.replace(example, str(short)) for line in lines]
    serve = lines[0].removesuffix("&").replace("build/3fs", str(tmp_path / "3fs")).split()
    with subprocess.Popen(serve, cwd=ROOT, stderr=subprocess.DEVNULL) as server:
        deadline = time.monotonic() + READY_SECONDS
        while not (tmp_path / "3fs" / "cluster.json").exists():
            assert server.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield lines[1:]
        server.send_signal(signal.SIGTERM)
        server.wait(READY_SECONDS)


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.torch
@pytest.mark.timeout(RUN_SECONDS + 2 * READY_SECONDS)
def test_the_example_runs_by_hand(by_hand: list[str], tmp_path: Path) -> None:
    state = tmp_path / "state"
    script = "\n".join(["set -eu", *by_hand, ".venv/bin/flyer ps", ".venv/bin/flyer show gpt"])
    result = subprocess.run(
        ["bash", "-c", script],
        cwd=ROOT,
        env={**os.environ, "FLYER_STATE": str(state)},
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert "read back identical" in result.stdout
    assert f"step {STEPS}/{STEPS}" in result.stdout + result.stderr
    assert re.search(r"gpt +Succeeded", result.stdout)
