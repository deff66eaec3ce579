"""Leader election: one leader at a time, a unique epoch per term, a fence that closes in time."""

import asyncio
import contextlib
import time
from dataclasses import replace

import pytest
from flyer.kube.apiserver import Election, LeadershipLostError, LeaseSettings
from flyer.kube.apiserver.resources import FLYERJOBS, LEASES

from fakekube import Fault
from fakekube.generators.samples import job_object

# Long enough that a busy host does not lose it.
SETTINGS = LeaseSettings(
    namespace="fireflyer-system", duration_seconds=300, renew_seconds=200, retry_seconds=0.05
)
SHORT = replace(SETTINGS, duration_seconds=1, renew_seconds=0.6)


@pytest.fixture
def candidate(connect):
    def make(name, settings=SETTINGS, **limits):
        return Election(connect(name, **limits), name, settings)

    return make


def lease(api_server):
    return api_server.store.get("leases", "flyer-operator", "fireflyer-system")["spec"]


async def test_the_second_candidate_waits_until_the_first_releases_the_lease(api_server, candidate):
    first, second = candidate("a"), candidate("b")
    assert await first.acquire() == 1
    hold = asyncio.create_task(first.hold())
    waiting = asyncio.create_task(second.acquire())
    await asyncio.sleep(0.5)
    assert first.leads
    assert not waiting.done()
    hold.cancel()
    await first.release()
    assert not first.leads
    async with asyncio.timeout(60):
        assert await waiting > 1
    assert lease(api_server)["holderIdentity"] == "b"


async def test_a_renewal_in_flight_does_not_keep_a_released_lease(api_server, candidate, connect):
    leader = candidate("a")
    await leader.acquire()
    stored = api_server.store.get("leases", "flyer-operator", "fireflyer-system")
    renewed = {**stored["spec"], "renewTime": "2026-01-01T00:00:00.000000Z"}
    await connect("a").replace(LEASES, {**stored, "spec": renewed})
    await leader.release()
    assert lease(api_server)["holderIdentity"] == ""


async def test_a_leader_that_cannot_renew_stops_before_its_successor_starts(api_server, candidate):
    limits = {"call_seconds": 0.5, "answer_seconds": 0.3}
    first, second = candidate("a", SHORT, **limits), candidate("b", SHORT, **limits)
    await first.acquire()
    hold = asyncio.create_task(first.hold())
    waiting = asyncio.create_task(second.acquire())
    api_server.faults.add(Fault("hang", agent="a", times=1000))
    both = False
    async with asyncio.timeout(60):
        while not waiting.done():
            both = both or (first.leads and second.leads)
            await asyncio.sleep(0.002)
        await hold
    assert not both
    assert (first.epoch, await waiting) == (0, 2)
    with pytest.raises(LeadershipLostError, match="was not renewed"):
        first.fence()


async def test_each_term_has_a_unique_epoch(candidate):
    election = candidate("a")
    assert await election.acquire() == 1
    await election.release()
    second = await election.acquire()
    assert second == 2
    assert await election.acquire() == 3  # its own earlier Lease, which it did not release


async def test_a_renewal_does_not_wait_for_other_calls(api_server, connect, until):
    api = connect("a", concurrency_max=1, answer_seconds=300, call_seconds=300)
    stuck = api_server.faults.add(Fault("hang", resource="flyerjobs"))
    job = job_object("x")
    creations = [asyncio.create_task(api.create(FLYERJOBS, job, "default")) for _ in range(9)]
    await until(lambda: not stuck.times)
    election = Election(api, "a", SETTINGS)
    async with asyncio.timeout(100):
        assert await election.acquire() == 1
    for other in creations:
        other.cancel()
    await asyncio.gather(*creations, return_exceptions=True)


async def test_deleting_the_lease_does_not_reset_the_epoch(api_server, candidate):
    election = candidate("a")
    await election.acquire()
    assert await election.raise_epoch(41) == 41
    assert lease(api_server)["leaseTransitions"] == 40
    assert await election.raise_epoch(7) == 41


async def test_a_lease_taken_by_another_holder_ends_the_term(api_server, candidate):
    election = candidate("a")
    await election.acquire()
    hold = asyncio.create_task(election.hold())
    patch = {"spec": {"holderIdentity": "b", "leaseTransitions": 9}}
    api_server.store.patch("leases", "flyer-operator", patch, "fireflyer-system")
    async with asyncio.timeout(60):
        await hold
    assert not election.leads


async def test_lost_answers_cost_neither_the_term_nor_the_epoch(api_server, candidate, until):
    election = candidate("a")
    epoch = await election.acquire()
    hold = asyncio.create_task(election.hold())
    for _ in range(3):
        lost = api_server.faults.add(Fault("lose", verb="update", agent="a"))
        await until(lambda lost=lost: not lost.times)
    assert election.leads
    assert election.epoch == epoch
    hold.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await hold


async def test_a_lease_is_acquired_and_renewed_although_each_response_is_lost(
    api_server, connect, until
):
    """The retry of each is refused: the first attempt has changed the Lease."""
    fault = Fault("lose", verb="update", resource="leases", times=1000, every=2)
    api_server.faults.faults += [Fault("lose", verb="create", resource="leases"), fault]
    election = Election(connect("a", call_seconds=100, answer_seconds=100), "a", SETTINGS)
    async with asyncio.timeout(60):
        assert await election.acquire() == 1
        assert await election.acquire() == 2  # its own
    kept_until = time.monotonic() + election.fence()
    hold = asyncio.create_task(election.hold())
    await until(lambda: fault.committed >= 5)
    hold.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await hold
    assert election.epoch == 2
    assert time.monotonic() + election.fence() >= kept_until + SETTINGS.retry_seconds


async def test_an_unanswered_renewal_is_retried_in_time(api_server, connect, until):
    settings = replace(SETTINGS, duration_seconds=10, renew_seconds=8)
    election = Election(connect("a", answer_seconds=100, call_seconds=100), "a", settings)
    epoch = await election.acquire()
    first = lease(api_server)["renewTime"]
    silent = Fault("hang", verb="update", resource="leases")
    api_server.faults.add(silent)
    hold = asyncio.create_task(election.hold())
    await until(lambda: silent.committed == 1 and lease(api_server)["renewTime"] != first)
    assert election.leads
    assert election.epoch == epoch
    hold.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await hold


async def test_an_epoch_raised_without_a_response_is_known(api_server, candidate):
    election = candidate("a")
    await election.acquire()
    api_server.faults.add(Fault("lose", verb="update", agent="a"))
    assert await election.raise_epoch(7) == 7
    patch = {"spec": {"holderIdentity": "b"}}
    api_server.store.patch("leases", "flyer-operator", patch, "fireflyer-system")
    with pytest.raises(LeadershipLostError):
        await election.raise_epoch(9)


async def test_a_fenced_client_writes_no_more(api_server, connect, candidate):
    election = candidate("a")
    await election.acquire()
    api = connect("writer").fenced(election.fence)
    await api.create(FLYERJOBS, job_object("x"), "default")
    await election.release()
    with pytest.raises(LeadershipLostError):
        await api.delete(FLYERJOBS, "x", "default")
    assert await api.get(FLYERJOBS, "x", "default")
