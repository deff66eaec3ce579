"""Two jobs' lifecycles on a real API server that fails, is slow, and has several leaders.

A proxy between it and the operators injects the faults.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from flyer.kube.apiserver.resources import LEASES

from fakekube.apiserver.faults import Fault, WatchFaults

if TYPE_CHECKING:
    from e2e.lib.operators import Stage

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

OFTEN = 1_000_000
MANY = 3
FORCED = 8


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (409, "Conflict"),
        (429, "TooManyRequests"),
        (500, "InternalError"),
        (504, "Timeout"),
    ],
)
async def test_refusals_change_nothing(stage: Stage, code: int, reason: str) -> None:
    every = Fault("refuse", times=OFTEN, every=4, code=code, reason=reason)
    every.retry_after_seconds = 1 if code == 429 else None
    # A conflict is an answer to a compare-and-swap.
    every.resource = "flyerjobs/status" if code == 409 else ""
    stage.proxy.faults.add(every)
    stage.operators.start()
    await stage.live("low", "high")
    assert every.committed >= MANY


@pytest.mark.parametrize(
    ("code", "reason"), [(429, "TooManyRequests"), (500, "InternalError"), (410, "Expired")]
)
async def test_watches_that_are_refused_change_nothing(
    stage: Stage, code: int, reason: str
) -> None:
    """Each watch is reopened repeatedly: it is interrupted early, and only half of the attempts
    succeed.
    """
    opened = Fault(
        "refuse", "watch", times=OFTEN, every=2, by_chance=True, code=code, reason=reason
    )
    stage.proxy.faults.add(opened)
    stage.proxy.faults.watches.cut_after = 3
    stage.operators.start()
    await stage.live("low", "high")
    assert opened.committed >= MANY
    assert opened.seen - opened.committed >= MANY  # went through


@pytest.mark.parametrize("do", ["hang", "lose", "drop"])
async def test_calls_without_an_answer_change_nothing(stage: Stage, do: str) -> None:
    # A hung watch receives no events: it is replaced after a minute.
    fault = Fault("hang", times=3, every=7, watches=False)
    if do != "hang":
        fault = Fault("lose" if do == "lose" else "drop", times=OFTEN, every=3, by_chance=True)
    stage.proxy.faults.add(fault)
    stage.operators.start()
    await stage.live("low", "high")
    assert fault.committed >= MANY


@pytest.mark.parametrize(
    "faults",
    [
        WatchFaults(cut_after=2),
        WatchFaults(delay_seconds=0.3),
        WatchFaults(double=True),
        WatchFaults(cut_after=5, delay_seconds=0.1, double=True),
    ],
    ids=["broken", "delayed", "doubled", "all"],
)
async def test_interrupted_late_or_duplicate_watches_change_nothing(
    stage: Stage, faults: WatchFaults
) -> None:
    stage.proxy.faults.watches = faults
    stage.operators.start()
    await stage.live("low", "high")
    assert (faults.cut > 0) is (faults.cut_after > 0)
    assert (faults.delayed > 0) is (faults.delay_seconds > 0)
    assert (faults.doubled > 0) is faults.double


async def test_concurrent_leaders_change_nothing(stage: Stage) -> None:
    for _ in range(2):
        stage.operators.start()
    epochs: set[int] = set()

    async def force() -> None:
        """The old leader remains convinced until it renews; meanwhile another one leads."""
        while len(epochs) < FORCED:
            await asyncio.sleep(0.3)
            leases = await stage.api.list(LEASES, stage.namespace)
            for lease in leases:
                if lease["spec"].get("holderIdentity"):
                    epochs.add(lease["spec"]["leaseTransitions"])
                    name, released = lease["metadata"]["name"], {"spec": {"holderIdentity": ""}}
                    await stage.api.merge(LEASES, name, released, stage.namespace)

    forcing = asyncio.create_task(force())
    lives = 0
    while not forcing.done():
        lives += 1
        await stage.live(f"low-{lives}", f"high-{lives}")
    await forcing
    assert len(epochs) >= FORCED
