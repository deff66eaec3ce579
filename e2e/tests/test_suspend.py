"""How soon a job in pods knows that it is to go: `build/e2e/suspend.json`."""

from __future__ import annotations

import asyncio
import re
import statistics
import time
from typing import TYPE_CHECKING

import pytest
from flyer.kube.client import Api, find_access
from flyer.kube.client.resources import FLYERJOBS

from e2e.figures import figure
from e2e.jobs import job, logs, wait_phase, wait_step

if TYPE_CHECKING:
    from e2e import chart

# The first test of a session starts the cluster, loads images and installs the chart.
pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(1800)]

ROUNDS = 10
LISTENS = """
import flyer.job, time
job = flyer.job.current()
job.progress(job.attempt)
while not job.suspend_requested():
    time.sleep(0.001)
print("knew", repr(time.time()), flush=True)
job.received()
job.checkpoint(job.attempt, "/nowhere", durable=True)
job.release(job.attempt)
"""


async def test_a_rank_knows_of_a_suspension_at_once(release: chart.Release, namespace: str) -> None:
    cluster = release.cluster
    cluster.apply(job("listens", 1, LISTENS, group="a100"), namespace=namespace)
    seconds = []
    async with Api(await find_access(cluster.kubeconfig), agent="test") as api:

        async def suspend(wanted: bool) -> None:
            await api.merge(FLYERJOBS, "listens", {"spec": {"suspend": wanted}}, namespace)

        for attempt in range(1, ROUNDS + 1):
            await asyncio.to_thread(wait_step, cluster, "listens", namespace, attempt)
            asked = time.time()
            await suspend(True)
            found = await asyncio.to_thread(
                wait_phase, cluster, "listens", namespace, "Suspended", attempt=attempt
            )
            assert found["eviction"]["lostSteps"] == 0
            said = await asyncio.to_thread(logs, cluster, "listens", namespace, attempt=attempt)
            knew = re.search(r"knew ([0-9.]+)", said)
            assert knew, said
            seconds.append(float(knew[1]) - asked)
            await suspend(False)
    figure("suspend", "asked_to_known_seconds_median", statistics.median(seconds))
    figure("suspend", "asked_to_known_seconds_max", max(seconds))
