"""What a step skips or keeps for its own duration changes no decision.

The same histories are played with and without each shortcut; all actions have to be the same, byte
by byte. FLYER_SEED=N plays one seed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from flyer.engine import WakeAt, blockers, effects, schedule, settle
from flyer.engine.draft import ACTIVE, RESERVING, Draft
from flyer.engine.log import step_line
from flyer.engine.market import Market
from flyer.sim import histories
from flyer.sim.histories import History
from flyer.sim.invariants import Violation

if TYPE_CHECKING:
    from collections.abc import Iterable

    from flyer.engine.state import Standing

POLICY = histories.POLICY
SUPPLY, PREEMPTIBLE_AT, STEP = Market.supply, Market.preemptible_at, histories.step


def played(monkeypatch: pytest.MonkeyPatch, seeds: Iterable[int]) -> dict[int, str]:
    """For each seed, what was decided.

    When the engine wants to be stepped again is no decision, nor which numbers a queued job shows:
    a step that gives out no nodes renews none. Plans are never made again only because time passed,
    so that a missed wake-up shows.
    """
    never = 1e9
    policy = replace(POLICY, plan_again_seconds=never, pending_renew_seconds=never)
    monkeypatch.setattr(histories, "POLICY", policy)
    found = {}
    for seed in seeds:
        digest = hashlib.sha256()

        def recorded(state, events, now, digest=digest):
            after, actions = STEP(state, events, now)
            decided = [one for one in actions if not isinstance(one, WakeAt)]
            digest.update(step_line((), now, decided).encode())
            return after, actions

        monkeypatch.setattr(histories, "step", recorded)
        History(seed).run()
        found[seed] = digest.hexdigest()
    return found


def without_shortcuts(monkeypatch: pytest.MonkeyPatch) -> None:
    def supply(market, job):
        market._supplies.clear()
        return SUPPLY(market, job)

    def preemptible_at(market, job, victim):
        market._protections.clear()
        return PREEMPTIBLE_AT(market, job, victim)

    def freed_by(market, victim, nodes):
        active = victim.status.phase in ACTIVE
        return [
            node
            for node in nodes.values()
            if market.reserved_by.get(node.name) == victim.key
            and (active or market._may_be_had(node.name))
            and market.draft.nodes[node.name].eligible
        ]

    def available_at(market, job, node, _known, real=Market.available_at):
        return real(market, job, node, {})

    def reserving(market):
        jobs = market.draft.jobs
        return sorted(key for key, job in jobs.items() if job.status.phase in RESERVING)

    def standing(draft, job, real=schedule._standing):
        return real(draft, replace(job))

    def reasons_of(reasons, job, _needs, claims, _own, eta):
        return blockers.pending(reasons._market, job, claims, eta)

    monkeypatch.setattr(schedule, "_standing", standing)
    monkeypatch.setattr(schedule._Reasons, "of", reasons_of)
    monkeypatch.setattr(Draft, "is_plan_due", lambda *_args: True)
    monkeypatch.setattr(Draft, "active_jobs", lambda draft: draft.jobs)
    monkeypatch.setattr(schedule._Search, "is_hopeless", lambda *_args: False)
    monkeypatch.setattr(settle, "_is_idle", lambda _job: False)
    monkeypatch.setattr(effects, "_is_idle", lambda _job: False)
    monkeypatch.setattr(Market, "supply", supply)
    monkeypatch.setattr(Market, "preemptible_at", preemptible_at)
    monkeypatch.setattr(Market, "freed_by", freed_by)
    monkeypatch.setattr(Market, "available_at", available_at)
    monkeypatch.setattr(Market, "reserving", reserving)
    monkeypatch.setattr(
        Draft, "terms", lambda draft, job: draft.zones.limits.terms(job.spec, draft.priority(job))
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


def test_a_plan_that_is_kept_too_long_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(histories, "preempted_in_vain", lambda *_args: "")
    monkeypatch.setattr(histories, "idle_although_wanted", lambda *_args: "")
    seeds = range(25)
    right = played(monkeypatch, seeds)
    kept = Draft.is_plan_due
    monkeypatch.setattr(
        Draft, "is_plan_due", lambda draft, state: kept(draft, state) and draft.changed
    )
    with contextlib.suppress(Violation):  # some job may never start
        assert played(monkeypatch, seeds) != right


def test_a_place_that_is_kept_after_a_change_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(histories, "preempted_in_vain", lambda *_args: "")
    monkeypatch.setattr(histories, "idle_although_wanted", lambda *_args: "")
    seeds = range(25)
    right = played(monkeypatch, seeds)
    known: dict[str, Standing] = {}
    real = schedule._standing
    monkeypatch.setattr(
        schedule, "_standing", lambda draft, job: known.setdefault(job.key, real(draft, job))
    )
    with contextlib.suppress(Violation):
        assert played(monkeypatch, seeds) != right


def test_a_shortcut_that_skips_too_much_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(histories, "preempted_in_vain", lambda *_args: "")
    monkeypatch.setattr(histories, "idle_although_wanted", lambda *_args: "")
    seeds = range(25)
    right = played(monkeypatch, seeds)
    monkeypatch.setattr(schedule._Search, "is_hopeless", lambda search, *_args: search._least)
    assert played(monkeypatch, seeds) != right
