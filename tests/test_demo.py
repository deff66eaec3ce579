"""The demo keeps its promises, alone on the machine, and refuses a second one beside it."""

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from demo.processes import only_one

ROOT = Path(__file__).resolve().parents[1]
DEMO_SECONDS = 900
CHAOS_SECONDS = 900
VICTIMS = ("meta", "flyer")
"""Whom the demo itself does not kill; `python -m demo.chaos` kills twenty times, anybody."""


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
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                line = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if str(folder) in line and "pytest" not in line:
                found.append(line)
    return found


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.torch
@pytest.mark.timeout(DEMO_SECONDS + 60)
def test_the_demo_loses_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    done = run_module("demo", "--folder", str(folder), timeout=DEMO_SECONDS)
    assert done.returncode == 0, done.stderr
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
    done = run_module(
        "demo.chaos",
        "--kills",
        str(len(VICTIMS)),
        "--victims",
        *VICTIMS,
        "--folder",
        str(folder),
        timeout=CHAOS_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    trials = json.loads((folder / "chaos.json").read_text())
    assert [trial["victim"] for trial in trials] == list(VICTIMS)
    assert all(trial["identical"] for trial in trials)
    assert left_behind(folder) == []


def test_a_second_demo_beside_the_first_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    with only_one(folder.with_suffix(".lock")):
        second = run_module("demo", "--folder", str(folder), timeout=60)
    assert second.returncode == 1
    assert "another demo" in second.stderr
    assert "--folder" in second.stderr
    assert not folder.exists()
