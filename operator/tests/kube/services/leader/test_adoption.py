"""Gangs that run during a rebuild, and their granted grace periods."""

import asyncio
import copy

import pytest
from flyer.api import Phase
from flyer.engine.state.preemption_limits import DEFAULT_LIMITS
from flyer.kube.apiserver import LeaseSettings
from flyer.kube.services.jobs import quota_status

from fakekube.nodes.containers import Behaviour

LEASE = LeaseSettings(
    namespace="fireflyer-system", duration_seconds=300, renew_seconds=200, retry_seconds=0.1
)


def uids(cluster, name):
    return {pod["metadata"]["uid"] for pod in cluster.pods(name)}


async def test_a_job_that_becomes_readable_while_its_gang_runs_is_adopted(cluster, until):
    cluster.nodes("AAA")
    first = cluster.operator(LEASE)
    cluster.submit("job", 2)
    await until(lambda: cluster.phase("job") is Phase.RUNNING)
    pods = uids(cluster, "job")
    await first.end()
    with cluster.store.unchecked():  # stored under an older definition
        cluster.edit("job", progressDeadline="soon")
    second = cluster.operator(LEASE)
    await until(lambda: second.serves)
    assert "default/job" not in second.leader.term.state.jobs
    cluster.edit("job", progressDeadline="30m")
    await until(lambda: "default/job" in second.leader.term.state.jobs)
    cluster.submit("other")
    await until(lambda: cluster.phase("other") is Phase.RUNNING)
    status = cluster.status("job")
    assert (status.phase, status.history.attempt, status.history.restarts) == (Phase.RUNNING, 1, 0)
    assert uids(cluster, "job") == pods
    assert status.assignment.names != cluster.status("other").assignment.names


async def test_nodes_of_an_unreadable_job_are_withheld(cluster, until):
    """Another version may have written its status: its pods keep running."""
    cluster.nodes("AAA")
    first = cluster.operator(LEASE)
    cluster.submit("job", 2)
    await until(lambda: cluster.phase("job") is Phase.RUNNING)
    names = cluster.status("job").assignment.names
    await first.end()
    with cluster.store.unchecked():
        cluster.edit("job", progressDeadline="soon")
    second = cluster.operator(LEASE)
    await until(lambda: second.serves)
    cluster.submit("large", 3)
    cluster.submit("small", 1)
    await until(lambda: cluster.phase("small") is Phase.RUNNING)
    assert not {*cluster.status("small").assignment.names} & {*names}
    cluster.finish("small")
    await until(lambda: cluster.phase("small") is Phase.SUCCEEDED)
    assert "which is quarantined" in cluster.status("large").pending.message
    assert len(cluster.pods("job")) == 2
    cluster.store.delete("flyerjobs", "job", "default")
    await until(lambda: cluster.phase("large") is Phase.RUNNING)


async def test_a_rebuild_has_the_streams_of_running_gangs_reported_again(cluster, until):
    cluster.nodes("A")
    operator = cluster.operator(LEASE)
    cluster.submit("job")
    await until(lambda: cluster.phase("job") is Phase.RUNNING)
    republished = []
    operator.gateway.republish_streams = republished.append
    operator.leader.term.request_rebuild("a test asks for it")
    await until(lambda: republished)
    assert republished == ["default/job"]


@pytest.mark.parametrize("own", [None, 10**6])
async def test_pods_get_the_granted_grace_period(cluster, until, own):
    cluster.containers.behaviour = Behaviour(deaf=True)
    cluster.nodes("A")
    cluster.operator(LEASE)
    container = {"name": "trainer", "image": "i", "command": ["t"]}
    spec = {"containers": [container]} | ({"terminationGracePeriodSeconds": own} if own else {})
    preemption = {
        "checkpointGracePeriod": "100h",
        "maxCheckpointGracePeriod": "200h",
        "minRuntime": "0s",
    }
    cluster.submit("job", template={"spec": spec}, preemption=preemption)
    await until(lambda: cluster.phase("job") is Phase.RUNNING)
    (pod,) = cluster.pods("job")
    assert (
        pod["spec"]["terminationGracePeriodSeconds"] == DEFAULT_LIMITS.max_checkpoint_grace_seconds
    )
    sidecar = cluster.containers.sidecar(pod["metadata"]["uid"]).state
    assert sidecar.start.stop_grace_seconds == DEFAULT_LIMITS.max_checkpoint_grace_seconds
    cluster.edit("job", suspend=True)
    await until(lambda: sidecar.suspend)
    assert 0 < sidecar.suspend.seconds_left <= DEFAULT_LIMITS.checkpoint_grace_seconds


async def test_an_error_while_counting_ends_no_term(cluster, until, monkeypatch):
    failed = asyncio.Event()

    def fail(*_):
        failed.set()
        raise RuntimeError("a count failed")

    cluster.nodes("A")
    operator = cluster.operator(LEASE)
    await until(lambda: operator.serves)
    epoch = operator.leader.term.epoch
    monkeypatch.setattr(quota_status, "INTERVAL_SECONDS", 0.01)
    monkeypatch.setattr(quota_status, "count_zones", fail)
    cluster.submit("job")
    await until(failed.is_set)
    await until(lambda: cluster.phase("job") is Phase.RUNNING)
    assert operator.leader.term.epoch == epoch
    monkeypatch.undo()
    topology = copy.deepcopy(cluster.store.find("flyertopologies", "cluster"))
    assert topology["status"]["zones"]
