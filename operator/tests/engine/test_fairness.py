"""Fairness between users: time slices, limits and backfill."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from flyer.api import FlyerTopology, Phase, Priority
from flyer.engine import (
    CheckpointReported,
    JobSubmitted,
    Quota,
    QuotaObserved,
    Released,
    StartRefused,
    Zones,
    ZonesObserved,
)
from flyer.sim import sample_job

from .running_jobs import UNLIMITED, finish, leave, nodes, phases

if TYPE_CHECKING:
    from collections.abc import Callable


# -- a blocked job and the nodes that it waits for -------------------------------------------------


def test_a_large_job_without_an_estimated_start_keeps_no_node_idle(new_harness: Callable) -> None:
    harness = new_harness(nodes(10), time_slice_seconds=0.0)
    harness.run("long", 1, **UNLIMITED)
    harness.submit("big", 10, **UNLIMITED)
    for index in range(9):
        harness.run(f"filler{index}", 1, priority="low" if index % 2 else "normal", **UNLIMITED)
    harness.wait(24 * 3600)
    assert {harness.status(f"filler{index}").phase for index in range(9)} == {Phase.RUNNING}
    finish(harness, "long")
    assert harness.status("big").phase is Phase.DRAINING
    leave(harness)
    assert harness.status("big").phase is Phase.RUNNING


def test_a_large_job_starts_although_small_jobs_are_submitted_continuously(
    new_harness: Callable,
) -> None:
    """Its estimated start never moves later, and few nodes are idle until then."""
    harness = new_harness(nodes(10), time_slice_seconds=4 * 3600.0)
    for index in range(10):
        harness.run(f"old{index}", 1, **UNLIMITED)
        harness.step(CheckpointReported(f"default/old{index}", 1, 1, "/c"))
    harness.submit("big", 10, **UNLIMITED)
    waited, idle, alive = 0.0, 0.0, []
    while harness.status("big").phase is not Phase.RUNNING:
        harness.wait(300)
        waited += 300
        name = f"new{waited:g}"
        harness.submit(name, 1, preemption={"minRuntime": "15m"}, **UNLIMITED)
        alive.append(name)
        leave(harness)
        # Some end early; without a reservation new jobs would occupy their nodes.
        running = [name for name in alive if harness.status(name).phase is Phase.RUNNING]
        for name in running[::3]:
            finish(harness, name)
            alive.remove(name)
        if (
            waited <= 1800
            and waited % 900 == 0
            and harness.status(f"old{waited // 900:g}").occupied
        ):
            finish(harness, f"old{waited // 900:g}")
        jobs = harness.state.jobs.values()
        busy = {node.name for job in jobs for node in job.status.occupied}
        idle += (10 - len(busy)) * 300
        assert waited < 6 * 3600, harness.status("big").pending
    assert waited <= 4 * 3600 + 900
    assert idle < 0.15 * 10 * waited


def test_a_job_of_lower_priority_that_would_delay_a_reservation_is_not_started(
    new_harness: Callable,
) -> None:
    harness = new_harness(nodes(4))
    harness.run("first", 3, activeDeadline="20m", **UNLIMITED)
    harness.submit("big", 4)
    harness.submit(
        "low", 1, priority="low", preemption={"minRuntime": "2h", "maxCheckpointGracePeriod": "1h"}
    )
    assert phases(harness, "big", "low") == [Phase.QUEUED, Phase.QUEUED]
    assert harness.status("low").pending.blocked_by == ("default/first", "default/big")


# -- rotation among equals -------------------------------------------------------------------------


def test_jobs_of_equal_priority_rotate_and_none_starves(new_harness: Callable) -> None:
    harness = new_harness(nodes(1), time_slice_seconds=3600.0)
    names = ("x", "y", "z")
    ran = dict.fromkeys(names, 0)
    for name in names:
        harness.submit(name, 1, **UNLIMITED)
    for _ in range(6 * 12):
        harness.wait(300)
        leave(harness)
        for name in names:
            if harness.status(name).phase is Phase.RUNNING:
                ran[name] += 1
                attempt = harness.status(name).history.attempt
                harness.step(CheckpointReported(f"default/{name}", attempt, ran[name], "/c"))
    assert max(ran.values()) - min(ran.values()) <= 2, ran
    assert "time slice" in harness.status("x").eviction.message


def test_an_interruption_does_not_start_a_new_time_slice(new_harness: Callable) -> None:
    harness = new_harness(nodes(1), time_slice_seconds=3600.0)
    harness.run("x", 1, **UNLIMITED)
    harness.submit("y", 1, **UNLIMITED)
    for name in ("h1", "h2"):
        harness.wait(1200)
        harness.step(CheckpointReported("default/x", harness.status("x").history.attempt, 1, "/c"))
        harness.submit(name, 1, priority="high")
        leave(harness)
        finish(harness, name)
        leave(harness)
        assert harness.status("x").phase is Phase.RUNNING  # its time slice has not ended
    harness.step(CheckpointReported("default/x", harness.status("x").history.attempt, 2, "/c"))
    harness.wait(1200)
    leave(harness)
    assert phases(harness, "x", "y") == [Phase.QUEUED, Phase.RUNNING]


def test_a_job_without_checkpoints_is_not_rotated_immediately(new_harness: Callable) -> None:
    harness = new_harness(nodes(1), time_slice_seconds=3600.0, unsaved_slices=3)
    harness.run("x", 1, **UNLIMITED)
    harness.submit("y", 1, **UNLIMITED)
    harness.wait(2 * 3600)
    assert harness.status("x").phase is Phase.RUNNING
    harness.wait(3600)
    assert harness.status("x").phase is Phase.SUSPENDING


def test_no_job_is_rotated_for_an_equal_one_that_fails_repeatedly(new_harness: Callable) -> None:
    harness = new_harness(nodes(1), time_slice_seconds=3600.0)
    harness.run("x", 1, **UNLIMITED)
    harness.submit("y", 1, **UNLIMITED)
    job = harness.state.jobs["default/y"]
    history = job.status.history.replace(restarts_without_progress=3)
    harness.state.jobs["default/y"] = type(job)(
        job.key,
        job.user,
        job.generation,
        job.spec,
        job.status.replace(history=history),
        job.suspend,
    )
    harness.wait(48 * 3600)
    assert harness.status("x").phase is Phase.RUNNING


# -- quotas, refusals, priorities ------------------------------------------------------------------


def test_a_users_quota_blocks_no_other_user(new_harness: Callable) -> None:
    harness = new_harness([*nodes(2, "v100"), *nodes(2, "a100")])
    harness.step(
        QuotaObserved(Quota("u1-a100", "u1", "*", "a100", 0)),
        QuotaObserved(Quota("u2-v100", "u2", "*", "v100", 0)),
    )
    harness.run("running", 2, user="u3", nodeClass="v100")
    harness.submit("first", 1, user="u1")
    harness.submit("second", 1, user="u2")
    assert phases(harness, "first", "second") == [Phase.QUEUED, Phase.STARTING]


def run_low(harness: Any) -> None:
    for name in ("lowa", "lowb"):
        harness.run(name, 1, priority="low")
    harness.wait(100)


def test_a_job_whose_pods_are_refused_blocks_no_other_job(new_harness: Callable) -> None:
    harness = new_harness(nodes(2))
    run_low(harness)
    harness.submit("refused", 1, priority="high")
    leaving = [name for name in ("lowa", "lowb") if harness.status(name).phase is Phase.SUSPENDING]
    harness.step(Released(f"default/{leaving[0]}", 1))
    harness.empty(leaving[0])
    harness.step(StartRefused("default/refused", 1, "the quota is full"))
    harness.empty("refused")
    harness.up(leaving[0])
    harness.wait(70)  # it is retried, and preempts no job during its cooldown
    assert harness.status("refused").phase is Phase.QUEUED
    harness.submit("urgent", 1, priority="high", user="other")
    assert harness.status("urgent").phase is Phase.DRAINING


def test_a_refused_job_in_its_cooldown_does_not_block_a_retry_of_another(
    new_harness: Callable,
) -> None:
    harness = new_harness(nodes(2), refusal_cooldown_seconds=100.0)
    run_low(harness)
    for name in ("ahead", "behind"):
        harness.submit(name, 1, priority="high", user=name)
    for name in ("lowa", "lowb"):
        harness.step(Released(f"default/{name}", 1))
        harness.empty(name)
    for name, seconds in (("behind", 55), ("ahead", 45)):
        harness.wait(seconds)
        harness.step(StartRefused(f"default/{name}", 1, "the quota is full"))
        harness.empty(name)
        for low in ("lowa", "lowb"):
            harness.up(low)
    harness.wait(120)  # the first refusal is long enough ago, the second one is not
    assert phases(harness, "ahead", "behind") == [Phase.QUEUED, Phase.DRAINING]


@pytest.mark.parametrize("quotas", [(), (Quota("any", "*", "*", "*", 100),)])
def test_a_changed_priority_of_a_running_job_counts(
    new_harness: Callable, quotas: tuple[Quota, ...]
) -> None:
    harness = new_harness(nodes(1))
    harness.step(*(QuotaObserved(quota) for quota in quotas))
    harness.run("r", 1, priority="high")
    harness.wait(100)
    harness.submit("other", 1)
    assert harness.status("other").phase is Phase.QUEUED
    harness.step(JobSubmitted(sample_job("r", 1, priority="low")))
    assert harness.status("r").priority is Priority.LOW
    assert harness.status("r").phase is Phase.SUSPENDING


# -- the administrator's caps ----------------------------------------------------------------------


MAXIMAL = {
    "minRuntime": "87000h",
    "checkpointGracePeriod": "87000h",
    "maxCheckpointGracePeriod": "87000h",
}


def test_every_job_can_be_preempted_after_the_caps(new_harness: Callable) -> None:
    harness = new_harness(nodes(1))
    harness.run("selfish", 1, priority="low", preemption=MAXIMAL, **UNLIMITED)
    harness.submit("vip", 1, priority="extreme-high")
    harness.wait(2 * 3600)
    assert harness.status("selfish").phase is Phase.SUSPENDING
    assert harness.status("selfish").suspension.deadline == harness.now + 900
    assert harness.status("selfish").suspension.limit == harness.now + 3600
    harness.wait(900)
    harness.empty("selfish")
    assert harness.status("vip").phase is Phase.STARTING


def test_the_administrator_sets_caps_by_priority(new_harness: Callable) -> None:
    harness = new_harness(nodes(1))
    topology = FlyerTopology.model_validate(
        {
            "apiVersion": "fireflyer.dev/v1alpha1",
            "kind": "FlyerTopology",
            "metadata": {"name": "cluster"},
            "spec": {
                "limits": {
                    "minRuntime": "1h",
                    "priorities": [
                        {"priority": "low", "minRuntime": "10s", "checkpointGracePeriod": "20s"}
                    ],
                }
            },
        }
    )
    harness.step(ZonesObserved(Zones.of(topology)))
    harness.run("selfish", 1, priority="low", preemption=MAXIMAL, **UNLIMITED)
    message = harness.status("selfish").condition("Admitted").message
    assert "spec.preemption.minRuntime: 87000h is capped to 10s" in message
    assert "spec.preemption.checkpointGracePeriod: 87000h is capped to 20s" in message
    harness.submit("vip", 1, priority="high")
    harness.wait(10)
    assert harness.status("selfish").suspension.deadline == harness.now + 20


# -- the status follows the spec -------------------------------------------------------------------


def test_the_observed_generation_follows_a_change_without_effect(
    new_harness: Callable, pick: Callable
) -> None:
    harness = new_harness(nodes(1))
    harness.run("r", 1)
    job = sample_job("r", 1, maxRestarts=3)
    job = job.replace(metadata=job.metadata.replace(generation=2))
    harness.step(JobSubmitted(job))
    assert harness.status("r").observed_generation == 2
    assert not harness.wait(1)[:-1]  # and the status is written once
