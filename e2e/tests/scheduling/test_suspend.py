"""Latency of a suspend request to a job in pods: `build/e2e/suspend.json`.

FLYER_E2E_ROUNDS=25 suspends each job 25 times, as a 99th percentile requires.
"""

from __future__ import annotations

import asyncio
import os
import re
import statistics
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from flyer.kube.apiserver import Api, find_access
from flyer.kube.apiserver.resources import FLYERJOBS

from e2e.lib.jobs import END_SECONDS, job, logs
from testcluster.measurements import record

if TYPE_CHECKING:
    from collections.abc import Callable

    from e2e.lib import chart

# The first test of a session starts the cluster, loads images and installs the chart.
pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(1800)]

ROUNDS = int(os.environ.get("FLYER_E2E_ROUNDS", "3"))
JOBS = ("one", "two", "three", "four")  # on a node each
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


def has_come_to(step: int, job_status: dict[str, Any]) -> bool:
    return bool((job_status.get("progress") or {}).get("step", 0) >= step)


async def test_a_rank_receives_a_suspension_immediately(
    release: chart.Release, namespace: str
) -> None:
    cluster = release.cluster
    cluster.apply(*(job(name, 1, LISTENS, nodeClass="a100") for name in JOBS), namespace=namespace)
    seconds = []
    # Neither looking nor asking takes the processor from what is measured, as kubectl would.
    async with Api(await find_access(cluster.kubeconfig), agent="test") as api:

        async def until(name: str, description: str, holds: Callable[[Any], bool]) -> Any:
            job_status: Any = {}
            try:
                async with asyncio.timeout(END_SECONDS):
                    while not holds(job_status):
                        await asyncio.sleep(0.1)
                        job_status = (await api.get(FLYERJOBS, name, namespace)).get("status") or {}
            except TimeoutError:
                events = cluster.kubectl("events", f"--namespace={namespace}")
                raise AssertionError(f"{name}: no {description}\n{job_status}\n{events}") from None
            return job_status

        async def suspend(name: str, suspended: bool) -> None:
            await api.merge(FLYERJOBS, name, {"spec": {"suspend": suspended}}, namespace)

        for attempt in range(1, ROUNDS + 1):
            # A starting pod takes all processors of a small machine: suspend no job meanwhile.
            for name in JOBS:
                await until(name, "step", partial(has_come_to, attempt))
            requested_at = {}
            for name in JOBS:
                requested_at[name] = time.time()
                await suspend(name, True)
                job_status = await until(name, "end", lambda it: it.get("phase") == "Suspended")
                assert job_status["history"]["attempt"] == attempt
                assert job_status["eviction"]["lostSteps"] == 0
            for name in JOBS:
                output = await asyncio.to_thread(logs, cluster, name, namespace, attempt=attempt)
                knew = re.search(r"knew ([0-9.]+)", output)
                assert knew, output
                seconds.append(float(knew[1]) - requested_at[name])
                await suspend(name, False)
    record("suspend", "samples", len(seconds))
    record("suspend", "asked_to_known_seconds_median", statistics.median(seconds))
    record("suspend", "asked_to_known_seconds_max", max(seconds))
    if len(seconds) >= 100:
        worst = statistics.quantiles(seconds, n=100, method="inclusive")[98]
        record("suspend", "asked_to_known_seconds_p99", worst, most=0.2)
