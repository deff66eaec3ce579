"""The contents of one job or user pod never stop another job."""

import asyncio

import pytest
from flyer.api import Phase
from flyer.kube.apiserver import LeaseSettings
from flyer.kube.services.pods.pod_control import KILL_SECONDS

from fakekube import Fault

LEASE = LeaseSettings(
    namespace="fireflyer-system", duration_seconds=300, renew_seconds=200, retry_seconds=0.1
)
CONTAINER = {"name": "trainer", "image": "i", "command": ["train"]}


def events(cluster, name, reason):
    return [
        event for event in cluster.store.all("events")
        if event["involvedObject"]["name"] == name and event["reason"] == reason
    ]  # fmt: skip


def condition(cluster, name, kind):
    value = cluster.store.find("flyerjobs", name, "default")
    conditions = (value.get("status") or {}).get("conditions") or []
    return next((match for match in conditions if match["type"] == kind), None)


def controller(kind="FlyerJob", name="victim", uid="u", api_version="fireflyer.dev/v1alpha1"):
    return {"apiVersion": api_version, "kind": kind, "name": name, "uid": uid, "controller": True}


def strange_pod(cluster, name, labels, *, owner=None, **spec):
    metadata = {"name": name, "labels": labels, "annotations": {"foreign": ""}}
    if owner:
        metadata["ownerReferences"] = [owner]
    body = {"schedulerName": "default-scheduler", "containers": [{"name": "x"}], **spec}
    return cluster.store.create("pods", {"metadata": metadata, "spec": body}, "default")


async def up(cluster, until, *names, nodes=1):
    for name in names:
        cluster.submit(name, nodes)
    await until(lambda: all(cluster.phase(name) is Phase.RUNNING for name in names))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tolerations", {"key": "gpu", "operator": "Exists"}),
        ("tolerations", [None]),
        ("initContainers", {"name": "a"}),
        ("initContainers", ["x"]),
        ("imagePullSecrets", {"name": "a"}),
        ("containers", [CONTAINER | {"resources": "8"}]),
        ("containers", [CONTAINER | {"volumeMounts": {"name": "a"}}]),
    ],
)
async def test_a_template_of_the_wrong_shape_stops_only_its_own_job(cluster, until, field, value):
    cluster.nodes("AA")
    operator = cluster.operator(LEASE)
    await up(cluster, until, "good")
    term = operator.leader.term
    spec = {"containers": [CONTAINER], field: value}
    cluster.submit("bad", template={"spec": spec})
    await until(lambda: field in cluster.status("bad").message)
    await up(cluster, until, "next")
    assert operator.leader.term is term
    assert not cluster.pods("bad", living=False)


@pytest.mark.parametrize("place", ["report_empty_nodes", "start", "conclude"])
async def test_an_exception_about_one_job_quarantines_it(cluster, until, monkeypatch, place):
    """The job's status reports the error, and other jobs continue."""
    from flyer.kube.services.pods import gangs

    cluster.nodes("AAA")
    operator = cluster.operator(LEASE)
    await up(cluster, until, "a")
    term = operator.leader.term
    whole = getattr(gangs.Gangs, place)

    def fails(self, target, *rest, **named):
        job = getattr(target, "key", None) or getattr(target, "job", target)
        if job == "default/bad":
            raise ZeroDivisionError("spec.colour: 7")
        return whole(self, target, *rest, **named)

    monkeypatch.setattr(gangs.Gangs, place, fails)
    cluster.submit("bad")
    if place == "conclude":
        await until(lambda: cluster.phase("bad") is Phase.RUNNING)
        cluster.finish("bad")
    await until(lambda: condition(cluster, "bad", "Quarantined"))
    reported = condition(cluster, "bad", "Quarantined")
    assert reported["status"] == "True"
    assert "spec.colour: 7" in reported["message"]
    await until(lambda: events(cluster, "bad", "Quarantined"))
    await up(cluster, until, "next")
    assert operator.leader.term is term
    monkeypatch.setattr(gangs.Gangs, place, whole)
    if place != "conclude":
        await until(lambda: cluster.phase("bad") is Phase.RUNNING)
        cluster.finish("bad")
    await until(lambda: cluster.phase("bad") is Phase.SUCCEEDED)
    await until(lambda: condition(cluster, "bad", "Quarantined") is None)


async def test_an_object_that_cannot_be_read_ends_neither_process_nor_term(
    cluster, until, monkeypatch
):
    cluster.nodes("AA")
    operator = cluster.operator(LEASE)
    await up(cluster, until, "a")
    term = operator.leader.term
    shape = operator.cache.jobs._shape

    def fails(value):
        if value["metadata"]["name"] == "bad":
            raise RecursionError
        return shape(value)

    monkeypatch.setattr(operator.cache.jobs, "_shape", fails)
    cluster.submit("bad")
    await up(cluster, until, "next")
    assert operator.leader.term is term
    assert not operator.task.done()


@pytest.mark.parametrize(
    "owner",
    [
        None,
        controller("ReplicaSet", "web", "rs-uid", "apps/v1"),
        controller("FlyerJob", "victim", "other-uid", "example.com/v1"),
    ],
)
@pytest.mark.parametrize("job", ["victim", "no-such-job"])
async def test_a_foreign_pod_is_ignored(cluster, until, owner, job):
    """It is never deleted, blocks no node, and fails no leader."""
    cluster.nodes("AA")
    first = cluster.operator(LEASE)
    await up(cluster, until, "victim")
    attempt = str(cluster.status("victim").history.attempt)
    free = ({"a0", "a1"} - set(cluster.status("victim").assignment.names)).pop()
    labels = {"fireflyer.dev/job": job, "fireflyer.dev/attempt": attempt}
    labels["fireflyer.dev/node-rank"] = "0"
    strange_pod(cluster, "debug", labels, owner=owner, nodeName=free)
    first.kill()
    second = cluster.operator(LEASE)
    cluster.server.store.delete("leases", "flyer-operator", "fireflyer-system")
    await until(lambda: second.serves)
    await up(cluster, until, "next")
    assert cluster.status("next").assignment.names == (free,)
    cluster.finish("victim")
    await until(lambda: cluster.phase("victim") is Phase.SUCCEEDED)
    pod = cluster.store.find("pods", "debug", "default")
    assert "deletionTimestamp" not in pod["metadata"]
    calls = [call for call in cluster.server.faults.calls if call.resource == "pods"]
    assert not [call for call in calls if call.verb == "delete" and call.name == "debug"]


@pytest.mark.parametrize("ended", [False, True])
async def test_a_pod_on_an_unassigned_node_is_deleted(cluster, until, ended):
    """A user can copy a pod's labels and owner: it is deleted, and its node stays in service."""
    cluster.nodes("AA")
    operator = cluster.operator(LEASE)
    await up(cluster, until, "victim")
    free = ({"a0", "a1"} - set(cluster.status("victim").assignment.names)).pop()
    genuine = cluster.pods("victim")[0]
    if ended:
        cluster.finish("victim")
        await until(lambda: cluster.phase("victim") is Phase.SUCCEEDED)
    metadata = genuine["metadata"]
    owner = metadata["ownerReferences"][0]
    strange_pod(cluster, "copy", metadata["labels"], owner=owner, nodeName=free)
    await until(lambda: cluster.store.find("pods", "copy", "default") is None)
    assert cluster.status("victim").history.attempt == 1
    states = operator.leader.term.state.nodes
    assert all(state.node.ready for state in states.values())
    await up(cluster, until, "next")


async def test_a_404_for_the_jobs_ends_none_of_them(cluster, until):
    cluster.nodes("AA")
    operator = cluster.operator(LEASE)
    await up(cluster, until, "a", "b")
    pods = {pod["metadata"]["uid"] for pod in cluster.pods()}
    faults = [
        Fault("refuse", verb=verb, resource="flyerjobs", code=404, reason="NotFound", times=2)
        for verb in ("watch", "list")
    ]
    for fault in faults:
        cluster.server.faults.add(fault)
    cluster.server.expire_watches("flyerjobs")
    await until(lambda: all(fault.seen >= 2 for fault in faults))
    cluster.submit("c")
    cluster.finish("a")
    await until(lambda: cluster.phase("c") is Phase.RUNNING)
    assert cluster.phase("b") is Phase.RUNNING
    assert {pod["metadata"]["uid"] for pod in cluster.pods("b")} < pods
    assert operator.cache.synced


async def test_a_404_at_the_start_makes_no_orphans(cluster, until):
    """An operator that cannot list jobs does not lead: their pods would look like orphans."""
    cluster.nodes("A")
    first = cluster.operator(LEASE)
    await up(cluster, until, "a")
    first.kill()
    unknown = Fault(
        "refuse", verb="list", resource="flyerjobs", code=404, reason="NotFound", times=3
    )
    cluster.server.faults.add(unknown)
    second = cluster.operator(LEASE)
    cluster.server.store.delete("leases", "flyer-operator", "fireflyer-system")
    while not second.serves:
        assert unknown.times == 0 or not second.cache.jobs.synced.is_set()
        await asyncio.sleep(0)
    assert unknown.times == 0
    await asyncio.sleep(0)
    assert cluster.phase("a") is Phase.RUNNING
    assert len(cluster.pods("a")) == 1
    calls = [call for call in cluster.server.faults.calls if call.resource == "pods"]
    assert not [call for call in calls if call.verb == "delete"]


async def test_an_orphan_that_is_being_deleted_is_killed_soon(cluster, until):
    """Its grace period may be minutes, for which it would block its node."""
    cluster.nodes("A")
    first = cluster.operator(LEASE)
    await up(cluster, until, "a")
    await first.end()
    cluster.kubelets.stuck_nodes.add("a0")  # its kubelet does not end the pod
    cluster.store.delete("flyerjobs", "a", "default")
    cluster.store.delete("pods", "a-1-0", "default", {"gracePeriodSeconds": 120})
    cluster.operator(LEASE)
    cluster.store.delete("leases", "flyer-operator", "fireflyer-system")

    def grace_seconds():
        (pod,) = cluster.pods("a")
        return pod["metadata"]["deletionGracePeriodSeconds"]

    await until(lambda: grace_seconds() == KILL_SECONDS)
    calls = [call for call in cluster.server.faults.calls if call.resource == "pods"]
    assert len([call for call in calls if call.verb == "delete"]) == 1


async def test_an_orphan_is_ended_only_when_its_job_is_gone(cluster, until):
    """The cache may be stale: the job itself is read."""
    cluster.nodes("A")
    operator = cluster.operator(LEASE)
    await up(cluster, until, "a")
    operator.cache.jobs._held.clear()
    term = operator.leader.term
    term._state = term._state.__class__(
        term._state.epoch, term._state.settings, term._state.now, term._state.nodes, {}
    )
    view = operator.cache.pods.get("default", "a-1-0")
    operator.cache.listener.pod_changed(view, view)
    gets = [call for call in cluster.server.faults.calls if call.verb == "get" and call.name == "a"]
    await until(lambda: [
        call for call in cluster.server.faults.calls if call.verb == "get" and call.name == "a"
    ] > gets)  # fmt: skip
    await until(lambda: not term._observer._orphans)
    # A queued event of the job lets the engine, whose state was emptied, end the ranks; the pod is
    # still not an orphan.
    calls = [call for call in cluster.server.faults.calls if call.resource == "pods"]
    assert not [call for call in calls if call.verb == "delete"]
