"""Ends of pods and ranks: which failure is reported first, and when."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flyer.engine import (
    Failed,
    Killed,
    PodExited,
    Succeeded,
)

from .launchers import client, started

if TYPE_CHECKING:
    import pytest


OOM = "OOMKilled: container trainer"


async def test_the_first_failure_is_reported_first_with_its_rank(harness: Any) -> None:
    gang, launchers = await started(harness)
    peer = {"rank": 0, "time": 10.0, "exit_status": 75, "peer_lost": True, "traceback": "x\ngone"}
    root = {"rank": 3, "time": 10.4, "exit_status": 1, "traceback": "Traceback\nValueError: seven"}
    await launchers[0].send(op="ended", code=75, failure=peer)
    await launchers[0].receive("done")
    await launchers[1].send(op="ended", code=1, failure=root)
    await launchers[1].receive("done")
    await harness.until(lambda: len([e for e in harness.events if isinstance(e, PodExited)]) == 2)
    exits = [event for event in harness.events if isinstance(event, PodExited)]
    assert exits[0] == PodExited(
        gang.key, 1, "a1", Failed(1, "rank 3: ValueError: seven"), uid=gang.uid
    )
    assert (exits[0].outcome.rank, exits[0].outcome.traceback) == (3, root["traceback"])
    assert exits[1].node == "a0"
    guilty = harness.gateway.failure(gang.key)
    assert (guilty.rank, guilty.node, guilty.node_rank) == (3, "a1", 1)
    assert guilty.traceback.endswith("ValueError: seven")


async def test_the_sidecars_report_of_an_exit_precedes_the_pods_status(harness: Any) -> None:
    _gang, launchers = await started(harness)
    await launchers[0].send(op="ended", code=0, failure=None)
    await launchers[0].receive("done")
    await harness.event(PodExited)
    assert await harness.gateway.conclude("uid-gpt-1-0", Killed(0, "gone")) == Succeeded()
    assert len([event for event in harness.events if isinstance(event, PodExited)]) == 1


async def test_a_pod_without_a_report_is_concluded_from_its_status(harness: Any) -> None:
    gang, _ = await started(harness)
    await harness.sidecars["gpt-1-1"].end()
    outcome = await harness.gateway.conclude("uid-gpt-1-1", Killed(9, "OOMKilled"))
    assert outcome == Killed(9, "OOMKilled")
    assert await harness.event(PodExited) == PodExited(gang.key, 1, "a1", outcome, uid=gang.uid)
    assert await harness.gateway.conclude("uid-unknown", Succeeded()) == Succeeded()


async def test_an_ended_pod_is_reported_as_soon_as_its_report_arrives(
    harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The status ends the wait before its maximum."""
    patient = replace(harness.gateway._settings, account_seconds=3600.0)
    monkeypatch.setattr(harness.gateway, "_settings", patient)
    gang, launchers = await started(harness, nodes=3)

    def concluded(node_rank: int) -> asyncio.Task[Any]:
        work = harness.gateway.conclude(f"uid-gpt-1-{node_rank}", Killed(9, "OOMKilled"))
        return asyncio.create_task(work)

    accounted, silent, forgotten = (concluded(node_rank) for node_rank in range(3))
    await asyncio.sleep(0)
    await launchers[0].send(op="ended", code=0, failure=None)
    assert await accounted == Succeeded()
    await harness.sidecars["gpt-1-1"].end()
    assert await silent == Killed(9, "OOMKilled")
    assert not forgotten.done()
    harness.gateway.forget(gang.key, 1, gang.uid)
    assert await forgotten == Killed(9, "OOMKilled")
    assert len([event for event in harness.events if isinstance(event, PodExited)]) == 2


async def test_the_pods_status_explains_a_kill_as_soon_as_it_arrives(
    harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient = replace(harness.gateway._settings, account_seconds=3600.0, status_seconds=3600.0)
    monkeypatch.setattr(harness.gateway, "_settings", patient)
    _gang, launchers = await started(harness)
    work = harness.gateway.conclude("uid-gpt-1-0", Killed(9, OOM))
    waiting = asyncio.create_task(work)
    await asyncio.sleep(0)
    await launchers[0].send(op="ended", code=-9, failure={"rank": 0, "signal": 9})
    assert await waiting == Killed(9, OOM)


async def test_exits_of_a_forgotten_gang_are_not_held(
    harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exits are held for an hour here, but no exit of a forgotten gang is."""
    patient = replace(harness.gateway._settings, first_failure_seconds=3600.0)
    monkeypatch.setattr(harness.gateway, "_settings", patient)
    gang, _ = await started(harness)
    await harness.sidecars["gpt-1-1"].end()
    waiting = asyncio.create_task(harness.gateway.conclude("uid-gpt-1-1", Failed(1, "1")))
    is_waiting = harness.gateway._gangs[gang.key].exits.has_ended
    await harness.until(lambda: is_waiting(1))
    harness.gateway.forget(gang.key, 1, gang.uid)
    assert await waiting == Failed(1, "1")


async def test_a_fail_request_of_a_rank_fails_the_job(harness: Any) -> None:
    gang, _ = await started(harness)
    with await client(harness, "gpt-1-1", 3) as rank:
        await asyncio.to_thread(rank.fail, "no data left")
    event = await harness.event(PodExited)
    assert event == PodExited(gang.key, 1, "a1", Failed(1, "no data left"), uid=gang.uid)


async def test_a_rank_with_another_pods_number_is_reported_for_its_own_pod(harness: Any) -> None:
    """The report is accepted; otherwise the gateway would close the stream repeatedly."""
    _, launchers = await started(harness)  # ranks 0, 1 and 2, 3
    with await client(harness, "gpt-1-1", 0) as rank:
        await asyncio.to_thread(rank.fail, "the loss is NaN")
    exited = await harness.event(PodExited)
    reported = "(reported as rank 0) the loss is NaN"
    assert (exited.node, exited.outcome) == ("a1", Failed(1, reported, 2))
    await launchers[1].send(op="ended", code=1, failure={"rank": 99, "exit_status": 1})
    await launchers[1].receive("done")
    sidecar = harness.sidecars["gpt-1-1"]
    await harness.until(lambda: sidecar.state.acknowledged >= sidecar.state.report.revision)
    assert harness.count("bad_rank") == 0


async def test_an_exit_of_an_unknown_rank_is_reported_for_its_pod(harness: Any) -> None:
    """It was restarted and has lost its order, but not the traceback."""
    _, launchers = await started(harness)
    harness.sidecars["gpt-1-1"].state.start = None
    failure = {"rank": 3, "exit_status": 1, "traceback": "Traceback\nValueError: seven"}
    await launchers[1].send(op="ended", code=1, failure=failure)
    exited = await harness.event(PodExited)
    assert (exited.node, exited.outcome.rank) == ("a1", 2)
    assert exited.outcome.traceback == failure["traceback"]
