"""The operator is killed after every API call of two jobs' lifecycles; nothing is lost or doubled.

The cluster checks the invariants after every change of an object.
"""

import asyncio

import pytest
from flyer.api import Phase

CONCURRENT_CLUSTERS = 4  # they are mostly idle


async def run_two_jobs(cluster, until):
    """The second job preempts the first and ends; then the first resumes and ends."""
    # Longer than a failover on a busy host; otherwise "low" is killed before it saves.
    preemption = {
        "checkpointGracePeriod": "60s",
        "maxCheckpointGracePeriod": "120s",
        "minRuntime": "0s",
    }
    cluster.submit("low", 2, priority="low", preemption=preemption)
    await until(lambda: cluster.phase("low") is Phase.RUNNING)
    cluster.submit("high", 2, priority="high")
    await until(lambda: cluster.phase("high") is Phase.RUNNING)
    cluster.finish("high")
    await until(lambda: cluster.phase("low") is Phase.RUNNING)
    cluster.finish("low")
    await until(lambda: cluster.phase("low") is Phase.SUCCEEDED)
    await until(lambda: not cluster.status("low").occupied)
    for name, attempts in (("low", 2), ("high", 1)):
        status = cluster.status(name)
        assert status.phase is Phase.SUCCEEDED
        assert (status.history.attempt, status.history.restarts) == (attempts, 0), (
            name,
            status.eviction,
        )
    assert cluster.status("low").checkpoint.step == 1
    assert not cluster.pods()


async def kill_once(make_cluster, until, after, *, performed, writes):
    """The first operator dies at its n-th call. Returns whether it made n calls."""
    async with make_cluster() as cluster:
        cluster.nodes("AA")
        first = cluster.operator()

        def die():
            first.kill()
            cluster.operator()

        death = cluster.server.faults.kill(
            first.name, die, after=after, performed=performed, writes=writes, ignore="leases"
        )
        try:
            await run_two_jobs(cluster, until)
        except AssertionError as error:
            calls = [call for call in cluster.server.faults.calls if call.resource != "leases"]
            last = next((c for c in reversed(calls) if c.agent == first.name), None)
            raise AssertionError(f"killed with call {after} ({last}): {error}") from error
        return death.seen >= after


async def kill_at_every_call(make_cluster, until, *, performed, writes):
    """Kill at the first, the second, … call until the lifecycle has fewer calls."""
    after = 1
    while True:
        batch = range(after, after + CONCURRENT_CLUSTERS)
        died = await asyncio.gather(
            *(kill_once(make_cluster, until, n, performed=performed, writes=writes) for n in batch)
        )
        after += CONCURRENT_CLUSTERS
        if not all(died):
            return after - CONCURRENT_CLUSTERS + sum(died) - 1


@pytest.mark.timeout(400)
@pytest.mark.parametrize("performed", [True, False])
async def test_the_operator_is_killed_at_every_write(make_cluster, until, performed):
    deaths = await kill_at_every_call(make_cluster, until, performed=performed, writes=True)
    assert deaths >= 15


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("performed", [True, False])
async def test_the_operator_is_killed_at_every_call(make_cluster, until, performed):
    deaths = await kill_at_every_call(make_cluster, until, performed=performed, writes=False)
    assert deaths >= 20


async def test_the_operator_is_killed_during_takeover(make_cluster, until):
    """Three consecutive operators die early in their terms."""
    async with make_cluster() as cluster:
        cluster.nodes("AA")
        delays = [1, 2, 4]

        def next_operator():
            operator = cluster.operator()

            def die():
                operator.kill()
                next_operator()

            if delays:
                faults = cluster.server.faults
                faults.kill(operator.name, die, after=delays.pop(), writes=True, ignore="leases")

        next_operator()
        await run_two_jobs(cluster, until)
