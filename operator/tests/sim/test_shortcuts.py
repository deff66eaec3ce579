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
from flyer.engine import WakeAt, blockers, effects, queue, search, settle, waysout
from flyer.engine.draft import ACTIVE, RESERVING, Draft
from flyer.engine.log import step_line
from flyer.engine.market import Market
from flyer.engine.nodes import natural_order
from flyer.sim import histories
from flyer.sim.histories import History
from flyer.sim.invariants import Violation

if TYPE_CHECKING:
    from collections.abc import Iterable

    from flyer.engine.queue import Entry

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
    # A text that is put off because too many ways out are searched for is no decision either.
    monkeypatch.setattr(waysout, "_SEARCHES_MAX", 1_000)
    found = {}
    for seed in seeds:
        digest = hashlib.sha256()

        def recorded(state, events, now, digest=digest):
            after, actions = STEP(state, events, now)
            decided = [action for action in actions if not isinstance(action, WakeAt)]
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

    def freed_by(market, victim, names):
        active = victim.status.phase in ACTIVE
        return [
            market.draft.nodes[name].node
            for name in sorted(names, key=natural_order)
            if market.reserved_by.get(name) == victim.key
            and (active or market._may_be_had(name))
            and market.draft.nodes[name].eligible
        ]

    def times(market, job, nodes, zones, real=Market.times):
        market._times.clear()
        return real(market, job, nodes, zones)

    def victims(market, job, real=Market.victims):
        market._victims.clear()
        return real(market, job)

    def reserving(market):
        jobs = market.draft.jobs
        return sorted(key for key, job in jobs.items() if job.status.phase in RESERVING)

    def updated(draft, real=queue.updated):
        draft.queue = None
        return real(draft)

    def reasons_of(reasons, job, claims, _own, eta):
        return blockers.pending(reasons._market, job, claims, eta)

    monkeypatch.setattr(queue, "updated", updated)
    monkeypatch.setattr(search.Reasons, "of", reasons_of)
    monkeypatch.setattr(Draft, "is_at_rest", lambda *_args: False)
    monkeypatch.setattr(Draft, "is_plan_due", lambda *_args: True)
    monkeypatch.setattr(Draft, "active_jobs", lambda draft: draft.jobs)
    monkeypatch.setattr(search.Search, "is_hopeless", lambda *_args: False)
    monkeypatch.setattr(settle, "_is_idle", lambda _job: False)
    monkeypatch.setattr(effects, "_is_idle", lambda _job: False)
    monkeypatch.setattr(Market, "supply", supply)
    monkeypatch.setattr(Market, "preemptible_at", preemptible_at)
    monkeypatch.setattr(Market, "freed_by", freed_by)
    monkeypatch.setattr(Market, "times", times)
    monkeypatch.setattr(Market, "victims", victims)
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
    monkeypatch.setattr(histories, "idle_although_wanted", lambda *_args: {})
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
    monkeypatch.setattr(histories, "idle_although_wanted", lambda *_args: {})
    seeds = range(25)
    right = played(monkeypatch, seeds)
    known: dict[str, Entry] = {}
    real = queue._Update._entry
    monkeypatch.setattr(
        queue._Update, "_entry",
        lambda update, job: known.setdefault(job.key, real(update, job)),
    )  # fmt: skip
    with contextlib.suppress(Violation):
        assert played(monkeypatch, seeds) != right


def test_a_shortcut_that_skips_too_much_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(histories, "preempted_in_vain", lambda *_args: "")
    monkeypatch.setattr(histories, "idle_although_wanted", lambda *_args: {})
    seeds = range(25)
    right = played(monkeypatch, seeds)
    monkeypatch.setattr(search.Search, "is_hopeless", lambda one, *_args: one._least)
    assert played(monkeypatch, seeds) != right
