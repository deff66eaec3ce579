"""The same events give the same decisions, from the log and after any restart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from flyer.api import Phase
from flyer.engine import (
    CheckpointReported,
    Killed,
    NodeLost,
    PodExited,
    Released,
    ReplayError,
    SchedulerSettings,
    Signal,
    Start,
    Stop,
    StopRequested,
    SuspendRequested,
)
from flyer.engine.decision_log import rebuild_line, replay, step_line
from flyer.sim import Behavior, Script, Simulation, sample_job, two_zones

if TYPE_CHECKING:
    from collections.abc import Callable


def busy_world(seed: int = 3) -> Simulation:
    simulation = Simulation(two_zones(), settings=SchedulerSettings(), seed=seed)
    simulation.submit(sample_job("a", 4), Script(steps=60))
    simulation.run(15)
    simulation.submit(sample_job("b", 3, priority="high"), Script(steps=20))
    simulation.run(20)
    simulation.submit(sample_job("c", 2, priority="low"), Script(behavior=Behavior.SILENT))
    simulation.suspend("default/b")
    simulation.run(5)
    simulation.kill_pod("a1")
    simulation.resume("default/b")
    simulation.lose_node("b0")
    simulation.run(10)
    simulation.stop("default/c")
    simulation.return_node("b0")
    simulation.run(300)
    return simulation


def log_of(simulation: Simulation) -> list[str]:
    lines = [rebuild_line(two_zones(), [], 1_800_000_000.0, 1, SchedulerSettings())]
    return lines + [step_line(events, now, actions) for now, events, actions in simulation.history]


def test_a_log_replays_to_identical_decisions() -> None:
    lines = log_of(busy_world())
    assert len(lines) > 100
    assert list(replay(lines)) == []


def test_a_seed_determines_one_history() -> None:
    assert log_of(busy_world()) == log_of(busy_world())


def test_the_hash_seed_does_not_affect_decisions() -> None:
    """Other processes hash strings otherwise; the bytes are the same."""
    script = (
        "import importlib.util, hashlib;"
        f"spec = importlib.util.spec_from_file_location('t', {__file__!r});"
        "t = importlib.util.module_from_spec(spec); spec.loader.exec_module(t);"
        "print(hashlib.sha256(''.join(t.log_of(t.busy_world())).encode()).hexdigest())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            text=True,
            timeout=60,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1


def test_a_different_decision_is_detected() -> None:
    lines = log_of(busy_world())
    changed = next(i for i, line in enumerate(lines) if '"type":"Start"' in line)
    record = json.loads(lines[changed])
    record["actions"] = [action for action in record["actions"] if action["type"] != "Start"]
    lines[changed] = json.dumps(record)
    (difference,) = replay(lines)
    assert difference.line == changed + 1
    assert '"Start"' in difference.decided
    assert '"Start"' not in difference.recorded


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (["{"], "line 1: cannot be read"),
        (['{"now":1,"events":[],"actions":[]}'], "line 1: comes before a rebuild"),
        (['{"version":9,"rebuild":{}}'], "version 9, this engine reads 7"),
    ],
)
def test_the_error_of_an_unreadable_log_has_its_position(lines: list[str], why: str) -> None:
    with pytest.raises(ReplayError, match=why):
        list(replay(lines))


def test_a_restart_repeats_unfinished_actions(new_harness: Callable, pick: Callable) -> None:
    harness = new_harness()
    harness.run("a", 4)
    harness.wait(10)
    harness.submit("b", 3, priority="high")
    harness.restart()
    actions = harness.step()
    assert [action.job for action in pick(actions, Signal)] == ["default/a"]
    harness.step(Released("default/a", 1))
    harness.restart()
    actions = harness.step()
    assert [action.job for action in pick(actions, Stop)] == ["default/a"]
    harness.empty("a")
    assert harness.status("b").phase is Phase.STARTING
    harness.restart()
    assert [action.job for action in pick(harness.step(), Start)] == ["default/b"]


def test_a_running_job_continues_through_a_restart(new_harness: Callable) -> None:
    harness = new_harness()
    before = harness.run("a", 4)
    harness.restart()
    harness.step()
    assert harness.status("a") == before


def test_pods_that_died_with_the_driver_are_restarted(
    new_harness: Callable, pick: Callable
) -> None:
    harness = new_harness()
    harness.run("a", 4)
    harness.step(CheckpointReported("default/a", 1, 8, "/ckpt/8"))
    harness.restart()
    harness.step(*(PodExited("default/a", 1, n, Killed(0)) for n in harness.names("a")))
    actions = harness.empty("a")
    (start,) = pick(actions, Start)
    assert (start.attempt, start.restore_from.step) == (2, 8)
    assert start.assignment.names == ("a0", "a1", "b0", "b1")  # nothing is held against them


def test_a_restart_after_any_step_changes_no_outcome(new_harness: Callable) -> None:
    """Restart after each step: the committed statuses are those of an engine that stayed."""
    story = [
        (10.0, SuspendRequested("default/a", "anna")),
        (1.0, CheckpointReported("default/a", 1, 9, "/ckpt/9")),
        (0.0, Released("default/a", 1)),
        (5.0, NodeLost("a2", "PowerLost")),
        (1.0, StopRequested("default/b")),
    ]

    def outcome(restarts: bool) -> dict:
        harness = new_harness()
        harness.run("a", 4)
        harness.submit("b", 2, priority="low")
        for seconds, event in story:
            harness.now += seconds
            harness.step(event)
            if restarts:
                harness.restart()
                harness.step()
        return {key: _plain(job.status) for key, job in harness.state.jobs.items()}

    assert outcome(restarts=True) == outcome(restarts=False)


def _plain(status: object) -> object:
    """Without the epoch, which is the leader's."""
    assignment = status.assignment  # type: ignore[attr-defined]
    cleared = assignment.replace(epoch=0) if assignment else None
    return status.replace(assignment=cleared, epoch=0)  # type: ignore[attr-defined]


def test_the_time_does_not_decrease_with_the_clock(new_harness: Callable) -> None:
    harness = new_harness()
    harness.run("a", 1)
    harness.now -= 1000
    harness.step()
    assert harness.state.now == harness.now + 1000


def test_policies_are_part_of_the_log() -> None:
    settings = replace(SchedulerSettings(), failure_window_seconds=1.5)
    line = json.loads(rebuild_line(two_zones(), [], 0.0, 1, settings))
    assert line["rebuild"]["settings"]["failure_window_seconds"] == 1.5
