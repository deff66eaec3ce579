"""Runs the demo, and checks that a second demo on the machine is refused."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

ROOT = Path(__file__).resolve().parents[1]
DEMO_SECONDS = 900
CHAOS_SECONDS = 900
LOCK_SECONDS = 60
END_SECONDS = 60
VICTIMS = ("meta", "flyer")
"""Processes that the demo does not kill; `python -m demo.chaos` kills any process, twenty times."""


def run_module(*arguments: str, timeout: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def left_behind(folder: Path) -> list[str]:
    """Command lines of processes that still name the folder."""
    processes = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                line = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if str(folder) in line and "pytest" not in line:
                processes.append(line)
    return processes


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.torch
@pytest.mark.timeout(DEMO_SECONDS + 60)
def test_the_demo_loses_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    result = run_module("demo", "--folder", str(folder), timeout=DEMO_SECONDS)
    assert result.returncode == 0, result.stderr
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["bit_identical"] is True
    assert summary["final_digest"] == summary["reference_digest"]
    assert summary["ranks"] == 8
    assert summary["zones"] == 2
    assert summary["zone_crossings_per_tree"] == [1, 1]
    assert summary["preemptions"] == 1
    assert summary["node_failures"] == 1
    assert summary["storage_kills"] == 1
    assert summary["steps_lost_by_suspend"] == 0
    assert 0 < summary["steps_lost_by_failure"] <= 20
    assert summary["corpus_bytes"] > 10_000_000
    assert summary["loss_last"] < 0.6 * summary["loss_first"]
    assert ET.parse(folder / "timeline.svg").getroot().tag.endswith("svg")
    assert left_behind(folder) == []


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.torch
@pytest.mark.timeout(CHAOS_SECONDS + 60)
def test_a_kill_at_a_random_moment_changes_no_bit(tmp_path: Path) -> None:
    folder = tmp_path / "chaos"
    result = run_module(
        "demo.chaos",
        "--kills",
        str(len(VICTIMS)),
        "--victims",
        *VICTIMS,
        "--folder",
        str(folder),
        timeout=CHAOS_SECONDS,
    )
    assert result.returncode == 0, result.stderr
    trials = json.loads((folder / "chaos.json").read_text())
    assert [trial["victim"] for trial in trials] == list(VICTIMS)
    assert all(trial["identical"] for trial in trials)
    assert left_behind(folder) == []


def test_a_second_concurrent_demo_is_refused(tmp_path: Path) -> None:
    folder, lock = tmp_path / "demo", tmp_path / "demo.lock"
    with (tmp_path / "first.log").open("w") as log:
        first = subprocess.Popen(
            [sys.executable, "-m", "demo", "--folder", str(folder)],
            cwd=ROOT, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + LOCK_SECONDS
        while not lock.exists() or lock.read_text() != str(first.pid):
            assert first.poll() is None, "the first demo ended"
            assert time.monotonic() < deadline, "the first demo took no lock"
            time.sleep(0.01)
        second = run_module("demo", "--folder", str(folder), timeout=LOCK_SECONDS)
        assert first.poll() is None, "the second demo ended the first"
        first.send_signal(signal.SIGINT)
        assert first.wait(END_SECONDS) == 130
    finally:
        first.kill()
        first.wait()
    assert second.returncode == 1
    assert f"another demo (process {first.pid}) runs in {tmp_path};" in second.stderr
    assert "--folder" in second.stderr
    assert "interrupted" in (tmp_path / "first.log").read_text()
    assert left_behind(folder) == []
