"""Nobody's job stops or robs another's: turns, caps, costs, and who may be in whose way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from flyer.api import FlyerTopology, Phase, Priority
from flyer.engine import (
    CheckpointReported,
    Event,
    GangStarted,
    JobSubmitted,
    Node,
    NodeEmptied,
    NodeObserved,
    PodExited,
    Quota,
    QuotaObserved,
    Released,
    RequeueRequested,
    StartRefused,
    StopRequested,
    Succeeded,
    Zones,
    ZonesObserved,
)
from flyer.sim import sample_job

if TYPE_CHECKING:
    from collections.abc import Callable

UNLIMITED: dict[str, Any] = {"progressDeadline": None}


def nodes(count: int, node_class: str = "default") -> list[Node]:
    return [Node(f"{node_class[0]}{i:03d}", "A", node_class=node_class) for i in range(count)]


def leave(d: Any) -> None:
    """Whoever is asked to leave does, and whoever starts comes up."""
    for _ in range(8):
        events: list[Event] = []
        for key, job in d.state.jobs.items():
            status, stops = job.status, job.sent.stops
            if status.phase is Phase.SUSPENDING and not status.suspension.expired and not stops:
                events.append(Released(key, status.history.attempt))
            elif status.phase is Phase.STARTING:
                events.append(GangStarted(key, status.history.attempt))
            events += [
                NodeEmptied(one.name, key, one.attempt)
                for one in status.occupied
                if one.name in stops
            ]
        if not events:
            return
        d.tell(*events)


def finish(d: Any, name: str) -> None:
    key, attempt = f"default/{name}", d.status(name).history.attempt
    d.tell(*(PodExited(key, attempt, node, Succeeded()) for node in d.names(name)))
    d.empty(name)


def phases(d: Any, *names: str) -> list[Phase]:
    return [d.status(name).phase for name in names]


# -- a blocked job and the nodes that it waits for -------------------------------------------------


def test_a_large_job_without_a_known_time_keeps_no_node_empty(desk: Callable) -> None:
    d = desk(nodes(10), time_slice_seconds=0.0)
    d.run("long", 1, **UNLIMITED)
    d.submit("big", 10, **UNLIMITED)
    for index in range(9):
        d.run(f"filler{index}", 1, priority="low" if index % 2 else "normal", **UNLIMITED)
    d.wait(24 * 3600)
    assert {d.status(f"filler{index}").phase for index in range(9)} == {Phase.RUNNING}
    finish(d, "long")
    assert d.status("big").phase is Phase.DRAINING
    leave(d)
    assert d.status("big").phase is Phase.RUNNING


def test_a_large_job_starts_although_small_ones_keep_coming(desk: Callable) -> None:
    """The proof in small: its time never moves away, and few nodes idle until then."""
    d = desk(nodes(10), time_slice_seconds=4 * 3600.0)
    for index in range(10):
        d.run(f"old{index}", 1, **UNLIMITED)
        d.tell(CheckpointReported(f"default/old{index}", 1, 1, "/c"))
    d.submit("big", 10, **UNLIMITED)
    waited, idle, alive = 0.0, 0.0, []
    while d.status("big").phase is not Phase.RUNNING:
        d.wait(300)
        waited += 300
        name = f"new{waited:g}"
        d.submit(name, 1, preemption={"minRuntime": "15m"}, **UNLIMITED)
        alive.append(name)
        leave(d)
        # Some end early, and their successors would keep the nodes for ever.
        running = [one for one in alive if d.status(one).phase is Phase.RUNNING]
        for one in running[::3]:
            finish(d, one)
            alive.remove(one)
        if waited <= 1800 and waited % 900 == 0 and d.status(f"old{waited // 900:g}").occupied:
            finish(d, f"old{waited // 900:g}")
        busy = {node for job in d.state.jobs.values() for node in (
            one.name for one in job.status.occupied)}  # fmt: skip
        idle += (10 - len(busy)) * 300
        assert waited < 6 * 3600, d.status("big").pending
    assert waited <= 4 * 3600 + 900
    assert idle < 0.15 * 10 * waited


def test_a_lower_job_that_would_be_in_the_way_in_time_is_not_started(desk: Callable) -> None:
    d = desk(nodes(4))
    d.run("first", 3, activeDeadline="20m", **UNLIMITED)
    d.submit("big", 4)
    d.submit(
        "low", 1, priority="low", preemption={"minRuntime": "2h", "maxCheckpointGracePeriod": "1h"}
    )
    assert phases(d, "big", "low") == [Phase.QUEUED, Phase.QUEUED]
    assert d.status("low").pending.blocked_by == ("default/first", "default/big")


# -- rotation among equals -------------------------------------------------------------------------


def test_equals_take_turns_and_nobody_is_left_out(desk: Callable) -> None:
    d = desk(nodes(1), time_slice_seconds=3600.0)
    names = ("x", "y", "z")
    ran = dict.fromkeys(names, 0)
    for name in names:
        d.submit(name, 1, **UNLIMITED)
    for _ in range(6 * 12):
        d.wait(300)
        leave(d)
        for name in names:
            if d.status(name).phase is Phase.RUNNING:
                ran[name] += 1
                attempt = d.status(name).history.attempt
                d.tell(CheckpointReported(f"default/{name}", attempt, ran[name], "/c"))
    assert max(ran.values()) - min(ran.values()) <= 2, ran
    assert "time slice" in d.status("x").eviction.message


def test_an_interruption_does_not_give_a_new_slice(desk: Callable) -> None:
    d = desk(nodes(1), time_slice_seconds=3600.0)
    d.run("x", 1, **UNLIMITED)
    d.submit("y", 1, **UNLIMITED)
    for name in ("h1", "h2"):
        d.wait(1200)
        d.tell(CheckpointReported("default/x", d.status("x").history.attempt, 1, "/c"))
        d.submit(name, 1, priority="high")
        leave(d)
        finish(d, name)
        leave(d)
        assert d.status("x").phase is Phase.RUNNING  # its turn is not over
    d.tell(CheckpointReported("default/x", d.status("x").history.attempt, 2, "/c"))
    d.wait(1200)
    leave(d)
    assert phases(d, "x", "y") == [Phase.QUEUED, Phase.RUNNING]


def test_a_job_that_saves_nothing_is_not_rotated_at_once(desk: Callable) -> None:
    d = desk(nodes(1), time_slice_seconds=3600.0, unsaved_slices=3)
    d.run("x", 1, **UNLIMITED)
    d.submit("y", 1, **UNLIMITED)
    d.wait(2 * 3600)
    assert d.status("x").phase is Phase.RUNNING
    d.wait(3600)
    assert d.status("x").phase is Phase.SUSPENDING


def test_no_equal_gives_way_to_a_job_that_fails_again_and_again(desk: Callable) -> None:
    d = desk(nodes(1), time_slice_seconds=3600.0)
    d.run("x", 1, **UNLIMITED)
    d.submit("y", 1, **UNLIMITED)
    job = d.state.jobs["default/y"]
    history = job.status.history.replace(restarts_without_progress=3)
    d.state.jobs["default/y"] = type(job)(
        job.key,
        job.user,
        job.generation,
        job.spec,
        job.status.replace(history=history),
        job.suspend,
    )
    d.wait(48 * 3600)
    assert d.status("x").phase is Phase.RUNNING


# -- quotas, refusals, priorities ------------------------------------------------------------------


def test_a_users_quota_blocks_no_other_user(desk: Callable) -> None:
    d = desk([*nodes(2, "v100"), *nodes(2, "a100")])
    d.tell(
        QuotaObserved(Quota("u1-a100", "u1", "*", "a100", 0)),
        QuotaObserved(Quota("u2-v100", "u2", "*", "v100", 0)),
    )
    d.run("hog", 2, user="u3", nodeClass="v100")
    d.submit("first", 1, user="u1")
    d.submit("second", 1, user="u2")
    assert phases(d, "first", "second") == [Phase.QUEUED, Phase.STARTING]


def run_low(d: Any) -> None:
    for name in ("lowa", "lowb"):
        d.run(name, 1, priority="low")
    d.wait(100)


def test_a_job_whose_pods_are_refused_is_in_nobodys_way(desk: Callable) -> None:
    d = desk(nodes(2))
    run_low(d)
    d.submit("refused", 1, priority="high")
    leaving = [one for one in ("lowa", "lowb") if d.status(one).phase is Phase.SUSPENDING]
    d.tell(Released(f"default/{leaving[0]}", 1))
    d.empty(leaving[0])
    d.tell(StartRefused("default/refused", 1, "the quota is full"))
    d.empty("refused")
    d.up(leaving[0])
    d.wait(70)  # it is tried again, and interrupts nobody for now
    assert d.status("refused").phase is Phase.QUEUED
    d.submit("urgent", 1, priority="high", user="other")
    assert d.status("urgent").phase is Phase.DRAINING


def test_a_refused_job_that_waits_is_not_in_the_way_of_another_that_is_tried_again(
    desk: Callable,
) -> None:
    d = desk(nodes(2), refused_seconds=100.0)
    run_low(d)
    for name in ("ahead", "behind"):
        d.submit(name, 1, priority="high", user=name)
    for name in ("lowa", "lowb"):
        d.tell(Released(f"default/{name}", 1))
        d.empty(name)
    for name, seconds in (("behind", 55), ("ahead", 45)):
        d.wait(seconds)
        d.tell(StartRefused(f"default/{name}", 1, "the quota is full"))
        d.empty(name)
        for low in ("lowa", "lowb"):
            d.up(low)
    d.wait(120)  # the first refusal is long enough ago, the second one is not
    assert phases(d, "ahead", "behind") == [Phase.QUEUED, Phase.DRAINING]


@pytest.mark.parametrize("quotas", [(), (Quota("any", "*", "*", "*", 100),)])
def test_a_changed_priority_of_a_running_job_counts(
    desk: Callable, quotas: tuple[Quota, ...]
) -> None:
    d = desk(nodes(1))
    d.tell(*(QuotaObserved(quota) for quota in quotas))
    d.run("r", 1, priority="high")
    d.wait(100)
    d.submit("other", 1)
    assert d.status("other").phase is Phase.QUEUED
    d.tell(JobSubmitted(sample_job("r", 1, priority="low")))
    assert d.status("r").priority is Priority.LOW
    assert d.status("r").phase is Phase.SUSPENDING


# -- what a victim costs ---------------------------------------------------------------------------


def test_a_small_victim_is_cheaper_than_hundreds_of_idle_nodes(desk: Callable) -> None:
    d = desk(nodes(501))
    d.run("huge", 500, priority="low", **UNLIMITED)
    d.run("tiny", 1, priority="low", **UNLIMITED)
    d.wait(12 * 3600)
    d.tell(CheckpointReported("default/huge", 1, 1000, "/c"))
    d.submit("need1", 1)
    assert phases(d, "huge", "tiny") == [Phase.RUNNING, Phase.SUSPENDING]


def often_and_dear(desk: Callable, **policy: Any) -> Any:
    """Two jobs of low priority have both nodes, for an hour."""
    d = desk(nodes(2), **policy)
    d.run("often", 1, priority="low", **UNLIMITED)
    d.run("dear", 1, priority="low", **UNLIMITED)
    d.wait(3600)
    return d


def save(d: Any) -> None:
    """The job "often" has just saved, and so loses less than "dear"."""
    for name, pause_seconds in (("dear", 800), ("often", 0)):
        attempt = d.status(name).history.attempt
        d.tell(CheckpointReported(f"default/{name}", attempt, int(d.now), "/c"))
        d.wait(pause_seconds)


def interrupt(d: Any, name: str, user: str = "other") -> None:
    """Something urgent of this user comes, runs on one node and ends."""
    save(d)
    d.submit(name, 1, priority="high", user=user)
    leave(d)
    (node,) = d.names(name)
    d.tell(
        PodExited(f"default/{name}", 1, node, Succeeded()), NodeEmptied(node, f"default/{name}", 1)
    )
    leave(d)
    d.wait(3600)


def test_a_job_that_was_preempted_often_is_spared_if_others_suffice(desk: Callable) -> None:
    d = often_and_dear(desk)
    for index in range(3):
        interrupt(d, f"urgent{index}")
        assert [past_attempt.reason for past_attempt in d.status("often").past_attempts] == [
            "Preempted"
        ] * (index + 1)
    save(d)  # it would lose the least a fourth time, too
    d.submit("urgent", 1, priority="high")
    assert phases(d, "often", "dear") == [Phase.RUNNING, Phase.SUSPENDING]
    # Where nobody else has nodes, its budget protects nobody.
    d.submit("also", 1, priority="high")
    assert phases(d, "often") == [Phase.SUSPENDING]


@pytest.mark.parametrize("restarts", [0, 6])
def test_restarts_and_a_new_leader_hide_no_preemption(desk: Callable, restarts: int) -> None:
    d = often_and_dear(desk)
    for index in range(3):
        interrupt(d, f"urgent{index}")
        for _ in range(restarts):  # more than the history of attempts keeps
            d.tell(RequeueRequested("default/often", d.status("often").history.attempt, "me"))
            leave(d)
    d.restart()
    leave(d)
    save(d)
    d.submit("urgent", 1, priority="high")
    assert phases(d, "often", "dear") == [Phase.RUNNING, Phase.SUSPENDING]


def test_the_times_of_preemptions_that_a_status_keeps_are_bounded(desk: Callable) -> None:
    d = often_and_dear(desk, preemptions_max=10**6)
    times = []
    for index in range(10):
        interrupt(d, f"urgent{index}")
        times.append(d.status("often").history.preempted_at[-1])
    assert d.status("often").history.preempted_at == tuple(times[-8:])
    d.wait(86_400)
    interrupt(d, "urgent")
    assert len(d.status("often").history.preempted_at) == 1


def test_the_end_of_a_turn_is_no_preemption(desk: Callable) -> None:
    d = desk(nodes(1), time_slice_seconds=3600.0)
    for name in ("often", "other"):
        d.submit(name, 1, priority="low", **UNLIMITED)
    for turn in range(8):  # each gives way to the other four times
        leave(d)
        running = ("often", "other")[turn % 2]
        assert d.status(running).phase is Phase.RUNNING
        attempt = d.status(running).history.attempt
        d.tell(CheckpointReported(f"default/{running}", attempt, turn, "/c"))
        d.wait(3600)
    leave(d)
    d.tell(StopRequested("default/other", "me"))
    assert [past_attempt.reason for past_attempt in d.status("often").past_attempts] == [
        "Preempted"
    ] * 4
    d.tell(NodeObserved(Node("d001", "A")))
    d.run("dear", 1, priority="low", **UNLIMITED)
    save(d)
    d.submit("urgent", 1, priority="high")
    assert phases(d, "often", "dear") == [Phase.SUSPENDING, Phase.RUNNING]


def test_a_user_spends_the_budget_of_their_own_jobs_on_nothing(desk: Callable) -> None:
    d = desk(nodes(2))
    d.run("often", 1, priority="low", user="me", **UNLIMITED)
    d.run("dear", 1, priority="low", **UNLIMITED)
    d.wait(3600)
    for index in range(3):
        interrupt(d, f"urgent{index}", user="me")
        assert len(d.status("often").past_attempts) == index + 1
    save(d)
    d.submit("urgent", 1, priority="high", user="other")
    assert phases(d, "often", "dear") == [Phase.SUSPENDING, Phase.RUNNING]


def test_a_spared_job_that_has_only_reserved_nodes_loses_no_work(desk: Callable) -> None:
    d = desk(nodes(3), preemptions_max=1)
    d.run("often", 1, **UNLIMITED)
    d.run("dear", 1, **UNLIMITED)
    d.run("weak", 1, priority="low", **UNLIMITED)
    d.tell(*(CheckpointReported(f"default/{name}", 1, 1, "/c") for name in ("dear", "weak")))
    d.wait(800)
    d.tell(CheckpointReported("default/often", 1, 1, "/c"))
    d.submit("urgent", 1, priority="high", user="other")
    d.tell(Released("default/often", 1))
    d.empty("often")
    d.wait(1)  # it takes the weaker one's node, and waits for it to be left
    assert phases(d, "often", "weak") == [Phase.DRAINING, Phase.SUSPENDING]
    d.submit("also", 1, priority="high")
    assert phases(d, "often", "dear", "also") == [Phase.QUEUED, Phase.RUNNING, Phase.DRAINING]


def test_no_equal_gives_its_turn_to_a_job_whose_pods_are_refused(desk: Callable) -> None:
    d = desk(nodes(1))
    d.submit("refused", 1, **UNLIMITED)
    d.tell(StartRefused("default/refused", 1, "a quota is full"))
    d.run("other", 1, **UNLIMITED)
    d.empty("refused")
    leave(d)
    for _ in range(10):
        d.wait(3600)  # its pause is over, and so is the other one's time slice
        d.tell(CheckpointReported("default/other", 1, int(d.now), "/c"))
    assert phases(d, "refused", "other") == [Phase.QUEUED, Phase.RUNNING]
    d.submit("third", 1, **UNLIMITED)
    assert phases(d, "other") == [Phase.SUSPENDING]


def test_preemptions_of_yesterday_are_forgotten(desk: Callable) -> None:
    d = often_and_dear(desk, preemptions_max=1, preemptions_seconds=7200.0)
    interrupt(d, "urgent0")
    d.wait(3601)
    save(d)
    d.submit("urgent", 1, priority="high")
    assert phases(d, "often", "dear") == [Phase.SUSPENDING, Phase.RUNNING]


def test_nodes_that_are_not_needed_count_although_little_work_is_lost(desk: Callable) -> None:
    d = desk(nodes(11))
    d.run("ten", 10, priority="low", **UNLIMITED)
    d.run("one", 1, priority="low", **UNLIMITED)
    d.tell(CheckpointReported("default/one", 1, 1, "/c"))
    d.wait(600)
    d.tell(CheckpointReported("default/ten", 1, 1, "/c"))
    assert d.state.policy.restart_cost_seconds * 10 < 600 + d.state.policy.restart_cost_seconds
    d.submit("need1", 1)
    assert phases(d, "ten", "one") == [Phase.RUNNING, Phase.SUSPENDING]


@pytest.mark.parametrize("hours", [1, 12, 500])
def test_who_never_saves_is_not_preempted_last(desk: Callable, hours: int) -> None:
    d = desk(nodes(2))
    d.run("honest", 1, priority="low", **UNLIMITED)
    d.run("silent", 1, priority="low", checkpoint={"path": "/c", "interval": "87000h"}, **UNLIMITED)
    d.wait(hours * 3600 + 3600)
    d.tell(CheckpointReported("default/honest", 1, 1, "/c"))
    d.wait(240)
    d.submit("need1", 1)
    assert phases(d, "honest", "silent") == [Phase.RUNNING, Phase.SUSPENDING]


# -- the administrator's caps ----------------------------------------------------------------------


SELFISH = {
    "minRuntime": "87000h",
    "checkpointGracePeriod": "87000h",
    "maxCheckpointGracePeriod": "87000h",
}


def test_nobody_is_immune_for_ever(desk: Callable) -> None:
    d = desk(nodes(1))
    d.run("selfish", 1, priority="low", preemption=SELFISH, **UNLIMITED)
    d.submit("vip", 1, priority="extreme-high")
    d.wait(2 * 3600)
    assert d.status("selfish").phase is Phase.SUSPENDING
    assert d.status("selfish").suspension.deadline == d.now + 900
    assert d.status("selfish").suspension.limit == d.now + 3600
    d.wait(900)
    d.empty("selfish")
    assert d.status("vip").phase is Phase.STARTING


def test_caps_by_priority_are_the_administrators(desk: Callable) -> None:
    d = desk(nodes(1))
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
    d.tell(ZonesObserved(Zones.of(topology)))
    d.run("selfish", 1, priority="low", preemption=SELFISH, **UNLIMITED)
    message = d.status("selfish").condition("Admitted").message
    assert "spec.preemption.minRuntime: 87000h is capped to 10s" in message
    assert "spec.preemption.checkpointGracePeriod: 87000h is capped to 20s" in message
    d.submit("vip", 1, priority="high")
    d.wait(10)
    assert d.status("selfish").suspension.deadline == d.now + 20


# -- the status follows the spec -------------------------------------------------------------------


def test_the_observed_generation_follows_a_change_that_decides_nothing(
    desk: Callable, pick: Callable
) -> None:
    d = desk(nodes(1))
    d.run("r", 1)
    job = sample_job("r", 1, maxRestarts=3)
    job = job.replace(metadata=job.metadata.replace(generation=2))
    d.tell(JobSubmitted(job))
    assert d.status("r").observed_generation == 2
    assert not d.wait(1)[:-1]  # and is written once
