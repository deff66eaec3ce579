"""A job is deleted and created again with its name, while its gang and its stops still exist."""

import pytest
from flyer.api import Phase
from flyer.engine import Commit, Start, Stop
from flyer.kube.apiserver import LeaseSettings
from flyer.kube.services.jobs.event_queue import EventQueue

LEASE = LeaseSettings(
    namespace="fireflyer-system", duration_seconds=300, renew_seconds=200, retry_seconds=0.1
)


def uid_of(cluster, name="a"):
    return cluster.store.get("flyerjobs", name, "default")["metadata"]["uid"]


def owners(cluster):
    return {pod["metadata"]["ownerReferences"][0]["uid"] for pod in cluster.pods("a")}


async def recreate_during_a_rebuild(cluster, operator, until):
    """The rebuild observes only the new object; removals are queued before it."""
    term = operator.leader.term
    rebuild = term._rebuild

    async def rebuild_late():
        await until(lambda: operator.cache.job("default/a").uid == uid_of(cluster))
        await rebuild()

    term._rebuild = rebuild_late
    term.request_rebuild("a test asks for it")
    cluster.store.delete("flyerjobs", "a", "default")
    cluster.submit("a")


async def test_a_job_that_is_created_again_during_a_rebuild_runs(cluster, until):
    cluster.nodes("A")
    operator = cluster.operator(LEASE)
    cluster.submit("a")
    await until(lambda: cluster.phase("a") is Phase.RUNNING)
    earlier = uid_of(cluster)
    await recreate_during_a_rebuild(cluster, operator, until)
    await until(lambda: cluster.phase("a") is Phase.RUNNING)
    assert uid_of(cluster) != earlier
    status = cluster.status("a")
    assert (status.history.attempt, status.history.restarts) == (1, 0)
    assert owners(cluster) == {uid_of(cluster)}
    cluster.finish("a")
    await until(lambda: cluster.phase("a") is Phase.SUCCEEDED)


async def test_a_gang_of_a_vanished_job_is_forgotten_by_the_rebuild(cluster, until):
    cluster.nodes("AA")
    operator = cluster.operator(LEASE)
    for name in ("a", "other"):
        cluster.submit(name)
    for name in ("a", "other"):
        await until(lambda name=name: cluster.phase(name) is Phase.RUNNING)
    term, gateway = operator.leader.term, operator.gateway
    rebuild = term._rebuild

    async def rebuild_late():
        await until(lambda: operator.cache.job("default/a") is None)
        await rebuild()

    term._rebuild = rebuild_late
    term.request_rebuild("a test asks for it")
    cluster.store.delete("flyerjobs", "a", "default")
    await until(lambda: set(term._gangs._gangs) == {"default/other"})
    assert set(gateway._gangs) == {"default/other"}
    assert len(gateway._members) == 1


async def test_a_stop_of_an_earlier_object_ends_no_pod_of_the_new_one(cluster, until):
    cluster.nodes("A")
    operator = cluster.operator(LEASE)
    cluster.submit("a")
    await until(lambda: cluster.phase("a") is Phase.RUNNING)
    gangs = operator.leader.term._gangs
    node = cluster.status("a").assignment.names
    for uid in ("earlier", uid_of(cluster)):
        await gangs._stop(Stop("default/a", 1, node, kill=True, reason="Removed", uid=uid), None)
        deleted = any("deletionTimestamp" in pod["metadata"] for pod in cluster.pods("a"))
        assert (deleted or not cluster.pods("a")) == (uid != "earlier")


async def test_a_start_of_an_earlier_object_creates_no_pods(cluster, until):
    cluster.nodes("A")
    operator = cluster.operator(LEASE)
    cluster.submit("a", suspend=True)
    await until(lambda: cluster.phase("a") is Phase.SUSPENDED)
    cluster.submit("b")
    await until(lambda: cluster.phase("b") is Phase.RUNNING)
    term = operator.leader.term
    start = Start("default/a", 1, cluster.status("b").assignment, None, 0, uid="earlier")
    await term._perform(start, set())
    assert not term._gangs._gangs.keys() & {"default/a"}


async def test_a_status_of_an_earlier_object_is_not_stored_on_the_new_one(cluster, until):
    cluster.nodes("A")
    operator = cluster.operator(LEASE)
    cluster.submit("a")
    await until(lambda: cluster.phase("a") is Phase.RUNNING)
    before = cluster.status("a")
    status = before.replace(message="of the earlier object")
    commits = operator.leader.term._commits
    assert not await commits.explain(Commit("default/a", status, uid="earlier"))
    assert cluster.status("a") == before


async def test_every_event_and_stop_of_a_lifecycle_names_its_object(cluster, until, monkeypatch):
    events, add = [], EventQueue.add
    monkeypatch.setattr(
        EventQueue, "add", lambda queue, event: (events.append(event), add(queue, event))
    )
    cluster.nodes("AA")
    cluster.operator(LEASE)
    cluster.submit("a", 2)
    await until(lambda: cluster.phase("a") is Phase.RUNNING)
    cluster.edit("a", suspend=True)
    await until(lambda: cluster.phase("a") is Phase.SUSPENDED)
    cluster.edit("a", suspend=False)
    await until(lambda: cluster.phase("a") is Phase.RUNNING)
    cluster.finish("a")
    await until(lambda: cluster.phase("a") is Phase.SUCCEEDED and not cluster.status("a").occupied)
    uid = uid_of(cluster)
    await until(lambda: any(type(event).__name__ == "JobRemoved" for event in events))
    named = [event for event in events if hasattr(event, "uid")]
    assert {type(event).__name__ for event in named} >= {
        "GangStarted", "SuspendReceived", "CheckpointReported", "Released", "PodExited",
        "NodeEmptied", "JobRemoved",
    }  # fmt: skip
    assert {event.uid for event in named} == {uid}


async def test_nothing_remains_of_deleted_jobs(cluster, until):
    """A tenant may create and delete jobs in a loop."""
    cluster.nodes("A")
    operator = cluster.operator(LEASE)
    await until(lambda: operator.serves)
    term = operator.leader.term
    for _ in range(2):
        cluster.submit("a")
        await until(lambda: cluster.phase("a") is Phase.RUNNING)
        cluster.finish("a")
        await until(lambda: cluster.phase("a") is Phase.SUCCEEDED)
        await until(lambda: not cluster.status("a").occupied)
        (pod,) = cluster.pods("a", living=False)
        cluster.store.delete("flyerjobs", "a", "default")
        await until(lambda: "default/a" not in term.state.jobs)
        cluster.store.delete("pods", pod["metadata"]["name"], "default", {"gracePeriodSeconds": 0})
        await until(lambda: not operator.cache.pods_on("a0"))
    gangs, gateway = term._gangs, operator.gateway
    await until(lambda: not (gangs._gangs or gangs._concluded or gangs._leaving))
    submissions = term._submissions
    kept = (gateway._gangs, gateway._members, gateway._received_at, submissions._uids)
    assert [dict(mapping) for mapping in kept] == [{}] * len(kept)


@pytest.mark.parametrize("times", [12])
async def test_a_tenant_that_recreates_a_job_in_a_loop_gets_the_last_one(cluster, until, times):
    cluster.nodes("AA")
    operator = cluster.operator(LEASE)
    cluster.submit("other")
    await until(lambda: cluster.phase("other") is Phase.RUNNING)
    before = cluster.status("other")
    for number in range(times):
        cluster.submit("a")
        if number % 3 == 0:
            await until(lambda: cluster.phase("a") is not None and cluster.pods("a"))
        if number % 4 == 1:
            operator.leader.term.request_rebuild("a test asks for it")
        if number < times - 1:
            cluster.store.delete("flyerjobs", "a", "default")
    await until(lambda: cluster.phase("a") is Phase.RUNNING)
    await until(lambda: owners(cluster) == {uid_of(cluster)})
    assert cluster.status("other").history == before.history
    assert cluster.phase("other") is Phase.RUNNING
