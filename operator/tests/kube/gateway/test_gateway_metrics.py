"""Metrics of the gateway during a gang's start, suspension and end."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from flyer.engine import GangStarted, SuspendReceived
from flyer.sidecar.wire import Beat, LauncherState, Report

from .tokens import token_of


async def test_metrics_follow_a_gangs_lifecycle(harness: Any) -> None:
    def metric(name: str, **labels: str) -> float | None:
        value: float | None = harness.registry.get_sample_value(name, labels)
        return value

    gang = harness.gang()
    started_at = time.monotonic()
    harness.expect(gang)
    assert metric("flyer_gateway_connections") == 0
    rank0, rank1 = [await harness.greeted(pod.name) for pod in gang.pods]
    assert metric("flyer_gateway_connections") == 2
    assert metric("flyer_gateway_sockets") == 2
    assert metric("flyer_gateway_messages_total", kind="hello") == 2
    assert metric("flyer_gateway_start_seconds_count") == 0

    for revision, launcher in ((1, LauncherState.WAITING), (2, LauncherState.RUNNING)):
        for raw in (rank0, rank1):
            await raw.send(Report(revision=revision, launcher=launcher, port=4000, ranks_seen=2))
    await harness.event(GangStarted)
    assert metric("flyer_gateway_messages_total", kind="report") == 4
    assert metric("flyer_gateway_start_seconds_count") == 1
    took = metric("flyer_gateway_start_seconds_sum") or 0.0
    assert 0 < took <= time.monotonic() - started_at

    assert metric("flyer_gateway_signal_seconds_count") == 0
    requested_at = time.monotonic()
    harness.signal(gang)
    for raw in (rank0, rank1):
        while (await raw.hear_kind("order") or {}).get("suspend") is None:
            pass
    reported = Report(
        revision=3, launcher=LauncherState.RUNNING, port=4000, ranks_seen=2, suspended=True
    )
    # Only rank 0's acknowledgement is measured, and only once.
    await rank1.send(reported)
    await harness.until(lambda: metric("flyer_gateway_messages_total", kind="report") == 5)
    assert metric("flyer_gateway_signal_seconds_count") == 0
    await rank0.send(reported, replace(reported, revision=4, received=True))
    await harness.event(SuspendReceived)
    assert metric("flyer_gateway_signal_seconds_count") == 1
    took = metric("flyer_gateway_signal_seconds_sum") or 0.0
    assert 0 < took <= time.monotonic() - requested_at

    await rank1.send(Beat())
    await harness.until(lambda: metric("flyer_gateway_messages_total", kind="beat") == 1)
    connection = await harness.raw()
    await connection.send(
        {"kind": "hello", "version": 1, "token": token_of("gpt-1-0", secret="forged")}
    )
    assert await connection.refused() == "bad_token"
    assert metric("flyer_gateway_refusals_total", reason="bad_token") == 1
    for raw in (rank0, rank1):
        raw.close()
    await harness.until(lambda: metric("flyer_gateway_connections") == 0)
    await harness.until(lambda: metric("flyer_gateway_sockets") == 0)
