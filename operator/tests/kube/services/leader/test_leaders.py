"""Two operators: failover, and two that both consider themselves the leader."""

import asyncio
import time

import pytest
from flyer.api import Phase
from flyer.kube.apiserver import LeadershipLostError
from flyer.kube.metrics import Metrics
from flyer.kube.services import ClusterCache, Leader

from fakekube import Fault


async def test_a_standby_takes_over_a_running_gang(cluster, until):
    cluster.nodes("AA")
    first = cluster.operator()
    await until(lambda: first.serves)
    second = cluster.operator()
    cluster.submit("a", 2)
    await until(lambda: cluster.phase("a") is Phase.RUNNING)
    before = cluster.status("a")
    first.kill()
    started_at = time.monotonic()
    await until(lambda: second.serves)
    assert time.monotonic() - started_at < 30
    cluster.edit("a", suspend=True)
    await until(lambda: cluster.phase("a") is Phase.SUSPENDED)
    after = cluster.status("a")
    assert after.history.restarts == 0
    assert after.checkpoint.step == 1
    assert after.epoch > before.epoch


async def test_a_successor_recreates_no_pod(cluster, until):
    cluster.nodes("AAAA")
    first = cluster.operator()
    await until(lambda: first.serves)
    cut = cluster.server.faults.add(Fault("hang", resource="pods/binding", agent=first.name))
    cluster.submit("a", 4)
    await until(lambda: not cut.times and len(bound(cluster)) == 3)
    first.kill()
    second = cluster.operator()
    await until(lambda: cluster.phase("a") is Phase.RUNNING)
    calls = [call for call in cluster.server.faults.calls if call.agent == second.name]
    creations = [call.name for call in calls if (call.verb, call.resource) == ("create", "pods")]
    assert creations == []
    reads = [call.name for call in calls if (call.verb, call.resource) == ("get", "pods")]
    assert len(set(reads)) <= 1, reads  # once in each of its terms
    assert cluster.status("a").history.attempt == 1


def bound(cluster):
    return [pod for pod in cluster.pods("a") if pod["spec"].get("nodeName")]


async def test_an_older_leader_that_does_not_stop_writes_nothing(cluster, until):
    """The test holds its fence open; a newer leader has started."""
    cluster.nodes("AAAA")
    first = cluster.operator()
    await until(lambda: first.serves)
    cluster.submit("a", 2)
    await until(lambda: cluster.phase("a") is Phase.RUNNING)
    fence, hold = first.election.fence, asyncio.Event()
    first.election.__class__ = type(
        "Forced",
        (type(first.election),),
        {"leads": property(lambda _: True), "fence": lambda _: 60.0, "hold": lambda _: hold.wait()},
    )
    term = first.leader.term
    for api in (term._api, term._commits._api, term._gangs._pod_control._api):
        api._fence = lambda: 60.0
    # It does not observe that it loses the Lease, because its renewals are not sent.
    lease = cluster.store.get("leases", "flyer-operator", "fireflyer-system")
    patch = {"spec": {"holderIdentity": "", "leaseDurationSeconds": 1}}
    cluster.store.patch("leases", "flyer-operator", patch, "fireflyer-system")
    second = cluster.operator()
    await until(lambda: second.serves)
    assert second.election.epoch > lease["spec"]["leaseTransitions"] + 1
    call_count = len(cluster.server.faults.calls)
    cluster.submit("b", 2)
    cluster.edit("a", suspend=True)
    await until(lambda: cluster.phase("b") is Phase.RUNNING)
    await until(lambda: cluster.phase("a") is Phase.SUSPENDED)
    cluster.finish("b")
    await until(lambda: cluster.phase("b") is Phase.SUCCEEDED)
    leader_writes = cluster.server.faults.writes(first.name, since=call_count)
    assert [call for call in leader_writes if call.status < 300 and call.resource != "leases"] == []
    assert cluster.status("b").epoch == second.election.epoch
    assert fence is not None


async def test_a_late_commit_of_the_previous_leader_is_not_overwritten(cluster, until):
    """It arrives after the successor's resync: its nodes are assigned to another job."""
    cluster.nodes("A")
    leader = cluster.operator()
    cluster.submit("a", 1, suspend=True)
    await until(lambda: cluster.phase("a") is Phase.SUSPENDED)
    rebuilds = leader.metrics.rebuilds._value.get()
    before = cluster.status("a")
    late = before.replace(
        phase=Phase.FAILED, reason="Stopped", message="late", epoch=leader.election.epoch
    )
    cluster.store.patch("flyerjobs", "a", {"status": late.to_object()}, "default", "status")
    cluster.edit("a", suspend=False)  # for which the successor would start the job
    await until(lambda: leader.metrics.rebuilds._value.get() > rebuilds)
    cluster.submit("b", 1)
    await until(lambda: cluster.phase("b") is Phase.RUNNING)
    assert (cluster.phase("a"), cluster.status("a").message) == (Phase.FAILED, "late")
    assert "default/a" not in leader.leader.term.state.jobs


async def test_a_leader_cut_off_from_the_server_stops_by_itself(cluster, until):
    cluster.nodes("AA")
    first = cluster.operator()
    await until(lambda: first.serves)
    cluster.server.faults.dead.add(first.name)
    await until(lambda: not first.election.leads)
    try:
        first.election.fence()
    except LeadershipLostError:
        pass
    else:
        raise AssertionError("it may still write")
    second = cluster.operator()
    cluster.submit("a", 2)
    await until(lambda: second.serves and cluster.phase("a") is Phase.RUNNING)
    cluster.server.faults.dead.discard(first.name)
    cluster.finish("a")
    await until(lambda: cluster.phase("a") is Phase.SUCCEEDED)
    assert second.serves
    assert not first.serves


async def test_a_deleted_lease_does_not_reset_the_epoch(cluster, until):
    cluster.nodes("AA")
    first = cluster.operator()
    await until(lambda: first.serves)
    cluster.submit("a", 2)
    await until(lambda: cluster.phase("a") is Phase.RUNNING)
    epoch = cluster.status("a").epoch
    first.kill()
    cluster.store.delete("leases", "flyer-operator", "fireflyer-system")
    second = cluster.operator()
    await until(lambda: second.serves)
    cluster.finish("a")
    await until(lambda: cluster.phase("a") is Phase.SUCCEEDED)
    assert cluster.status("a").epoch > epoch


class Brief:
    """A term that loses the right to write, or fails, as soon as it serves."""

    def __init__(self, error):
        self.error = error
        self.served = False

    async def run(self):
        async with asyncio.TaskGroup():
            self.served = True
            raise self.error


class Elected:
    """At least four times."""

    terms = 0

    async def acquire(self):
        self.terms += 1
        if self.terms > 4:
            raise EndedError
        return self.terms

    async def hold(self):
        await asyncio.Event().wait()

    async def raise_epoch(self, least):
        return least

    def fence(self):
        return 1.0

    async def release(self):
        pass


class EndedError(Exception):
    pass


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (LeadershipLostError("late"), [0.2, 0.2, 0.2, 0.2]),
        (ValueError("a bug"), [0.2, 0.4, 0.8, 1.6]),
    ],
)
async def test_a_term_that_served_restarts_soon_unless_it_failed(
    connect, monkeypatch, error, expected
):
    pauses, sleep = [], asyncio.sleep

    async def noted(seconds):
        pauses.append(seconds)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", noted)
    api, election = connect(), Elected()
    cache = ClusterCache(api, lambda _: None)
    for kind in cache.caches:
        kind.synced.set()
    leader = Leader(api, election, cache, lambda *_: Brief(error), Metrics())
    with pytest.raises(EndedError):
        await leader.run()
    assert pauses == expected
