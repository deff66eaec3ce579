"""Shortcuts and caches of a step change no decision.

The same histories run with and without each shortcut; all actions must be equal byte by byte.
FLYER_SEED=N runs one seed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from flyer.engine import WakeAt
from flyer.engine.cycle import actions_due, queue, reconcile, schedule
from flyer.engine.decision_log import step_line
from flyer.engine.explain import pending_reasons, remedies
from flyer.engine.placement.availability import NodeAvailability
from flyer.engine.state.cycle_state import CycleState
from flyer.engine.state.jobs import ACTIVE, RESERVING
from flyer.engine.state.nodes import natural_order
from flyer.sim import histories, random_cluster
from flyer.sim.histories import History
from flyer.sim.invariants import Violation

if TYPE_CHECKING:
    from collections.abc import Iterable

    from flyer.engine.state.queue import Entry

SETTINGS = random_cluster.SETTINGS
SUPPLY, PREEMPTIBLE_AT, STEP = (
    NodeAvailability.supply,
    NodeAvailability.preemptible_at,
    random_cluster.step,
)


def played(monkeypatch: pytest.MonkeyPatch, seeds: Iterable[int]) -> dict[int, str]:
    """The decisions for each seed.

    The time of the next step and the numbers that a queued job shows are not decisions: a step
    that assigns no nodes updates none. Plans are never recomputed only because time passed, so that
    a missed wake-up is detected.
    """
    never = 1e9
    settings = replace(SETTINGS, reschedule_seconds=never, pending_renew_seconds=never)
    monkeypatch.setattr(random_cluster, "SETTINGS", settings)
    # A text that is postponed because too many remedies are computed is not a decision either.
    monkeypatch.setattr(remedies, "_SEARCHES_MAX", 1_000)
    digests = {}
    for seed in seeds:
        digest = hashlib.sha256()

        def recorded(state, events, now, digest=digest):
            after, actions = STEP(state, events, now)
            decided = [action for action in actions if not isinstance(action, WakeAt)]
            digest.update(step_line((), now, decided).encode())
            return after, actions

        monkeypatch.setattr(random_cluster, "step", recorded)
        History(seed).run()
        digests[seed] = digest.hexdigest()
    return digests


def without_shortcuts(monkeypatch: pytest.MonkeyPatch) -> None:
    def supply(availability, job):
        availability._supplies.clear()
        return SUPPLY(availability, job)

    def preemptible_at(availability, job, victim):
        availability._protections.clear()
        return PREEMPTIBLE_AT(availability, job, victim)

    def freed_by(availability, victim, names):
        active = victim.status.phase in ACTIVE
        return [
            availability.cycle.nodes[name].node
            for name in sorted(names, key=natural_order)
            if availability.reserved_by.get(name) == victim.key
            and (active or availability._may_be_had(name))
            and availability.cycle.nodes[name].eligible
        ]

    def times(availability, job, nodes, zones, real=NodeAvailability.available_times):
        availability._times.clear()
        return real(availability, job, nodes, zones)

    def victims(availability, job, real=NodeAvailability.victims):
        availability._victims.clear()
        return real(availability, job)

    def reserving(availability):
        jobs = availability.cycle.jobs
        return sorted(key for key, job in jobs.items() if job.status.phase in RESERVING)

    def updated(cycle, real=queue.updated_queue):
        cycle.queue = None
        return real(cycle)

    def reasons_of(reasons, job, reservations, _own, eta):
        return pending_reasons.not_placed(reasons._availability, job, reservations, eta)

    monkeypatch.setattr(schedule, "updated_queue", updated)
    monkeypatch.setattr(pending_reasons.PendingReasonCache, "of", reasons_of)
    monkeypatch.setattr(CycleState, "may_skip", lambda *_args: False)
    monkeypatch.setattr(CycleState, "is_schedule_due", lambda *_args: True)
    monkeypatch.setattr(CycleState, "active_jobs", lambda cycle: cycle.jobs)
    monkeypatch.setattr(schedule.UnschedulableNeeds, "is_unschedulable", lambda *_args: False)
    monkeypatch.setattr(reconcile, "_is_idle", lambda _job: False)
    monkeypatch.setattr(actions_due, "_is_idle", lambda _job: False)
    monkeypatch.setattr(NodeAvailability, "supply", supply)
    monkeypatch.setattr(NodeAvailability, "preemptible_at", preemptible_at)
    monkeypatch.setattr(NodeAvailability, "freed_by", freed_by)
    monkeypatch.setattr(NodeAvailability, "available_times", times)
    monkeypatch.setattr(NodeAvailability, "victims", victims)
    monkeypatch.setattr(NodeAvailability, "reserving_jobs", reserving)
    monkeypatch.setattr(
        CycleState,
        "terms",
        lambda cycle, job: cycle.zones.limits.terms(job.spec, cycle.priority(job)),
    )


def differences(seeds: range) -> list[int]:
    with pytest.MonkeyPatch.context() as patch:
        short = played(patch, seeds)
    with pytest.MonkeyPatch.context() as patch:
        without_shortcuts(patch)
        whole = played(patch, seeds)
    return [seed for seed in seeds if short[seed] != whole[seed]]


def test_shortcuts_change_no_decision() -> None:
    assert differences(range(25)) == []


@pytest.mark.slow
def test_shortcuts_change_no_decision_of_new_histories() -> None:
    first = int(os.environ.get("FLYER_SEED", "0")) or random.SystemRandom().randrange(2**48)
    print(f"FLYER_SEED={first}")
    assert differences(range(first, first + 200)) == []


def test_a_stale_plan_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_cluster, "preempted_in_vain", lambda *_args: "")
    monkeypatch.setattr(histories, "idle_although_wanted", lambda *_args: {})
    seeds = range(25)
    right = played(monkeypatch, seeds)
    is_due = CycleState.is_schedule_due
    monkeypatch.setattr(
        CycleState, "is_schedule_due", lambda cycle, state: is_due(cycle, state) and cycle.changed
    )
    with contextlib.suppress(Violation):  # some job may never start
        assert played(monkeypatch, seeds) != right


def test_a_stale_position_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_cluster, "preempted_in_vain", lambda *_args: "")
    monkeypatch.setattr(histories, "idle_although_wanted", lambda *_args: {})
    seeds = range(25)
    right = played(monkeypatch, seeds)
    entries: dict[str, Entry] = {}
    real = queue._Update._entry
    monkeypatch.setattr(
        queue._Update, "_entry",
        lambda update, job: entries.setdefault(job.key, real(update, job)),
    )  # fmt: skip
    with contextlib.suppress(Violation):
        assert played(monkeypatch, seeds) != right


def test_a_shortcut_that_skips_too_much_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_cluster, "preempted_in_vain", lambda *_args: "")
    monkeypatch.setattr(histories, "idle_although_wanted", lambda *_args: {})
    seeds = range(25)
    right = played(monkeypatch, seeds)
    monkeypatch.setattr(
        schedule.UnschedulableNeeds, "is_unschedulable", lambda needs, *_args: needs._least
    )
    assert played(monkeypatch, seeds) != right
