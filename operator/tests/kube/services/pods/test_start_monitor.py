"""A kubelet's reason why a pod does not start reaches the job, and its nodes are released."""

import copy

import pytest
from flyer.api import Phase
from flyer.kube.apiserver import LeaseSettings
from flyer.kube.pods.pod_problems import pod_problem
from flyer.kube.services.pods import start_monitor

from fakekube import Fault

LEASE = LeaseSettings(
    namespace="fireflyer-system", duration_seconds=300, renew_seconds=200, retry_seconds=0.1
)


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(start_monitor, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(start_monitor, "CONFIRM_SECONDS", 0.1)
    monkeypatch.setattr(start_monitor, "STUCK_SECONDS", 0.1)
    monkeypatch.setattr(start_monitor, "LOOK_SECONDS", 0.02)


def waiting(reason, message="", container="trainer"):
    state = {"name": container, "state": {"waiting": {"reason": reason, "message": message}}}
    return {"phase": "Pending", "containerStatuses": [state]}


def write(cluster, pod, status):
    value = {**copy.deepcopy(pod), "status": status}
    name = pod["metadata"]["name"]
    cluster.store.replace("pods", name, value, "default", "status")


def refuse(cluster, status):
    """From now on kubelets do not run pods, but report this reason."""

    def look(change):
        pod = change.after.object
        node, pod_status = pod["spec"].get("nodeName"), pod["status"]
        fresh = pod_status["phase"] == "Pending" and "containerStatuses" not in pod_status
        if not change.deleted and node and fresh and len(pod_status) < 3:
            write(cluster, pod, status(node))

    cluster.store.table("pods").watchers.add(look)


def messages_of(cluster, name):
    events = cluster.store.all("events")
    return [event["message"] for event in events if event["involvedObject"]["name"] == name]


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("ErrImagePull", 'failed to resolve "x/y:1": not found'),
        ("ImagePullBackOff", "manifest unknown"),
        ("InvalidImageName", "couldn't parse image name"),
        ("CreateContainerConfigError", 'secret "wandb" not found'),
        ("ErrImagePull", "dial tcp: lookup registry.exmaple.com: no such host"),
    ],
)
async def test_a_failure_caused_by_the_job_is_reported_and_releases_its_nodes(
    cluster, until, reason, message
):
    cluster.nodes("AA")
    cluster.kubelets.refuses_start |= {"a0", "a1"}
    cluster.operator(LEASE, backoff_seconds=5.0, backoff_seconds_max=5.0)
    refuse(cluster, lambda _node: waiting(reason, message))
    cluster.submit("bad", 2, maxRestarts=1)
    await until(
        lambda: any(reason in event and message in event for event in messages_of(cluster, "bad")),
        20,
    )
    await until(lambda: not cluster.status("bad").occupied)
    status = cluster.status("bad")
    assert status.eviction.reason == "StartFailed"
    assert reason in status.eviction.message
    assert not status.history.avoid
    await until(lambda: cluster.phase("bad") is Phase.FAILED)
    assert message in cluster.status("bad").message


async def test_a_failure_caused_by_one_node_is_attributed_to_it(cluster, until):
    cluster.nodes("AAA")
    cluster.kubelets.refuses_start.add("a0")
    cluster.operator(LEASE)
    timeout = waiting("ErrImagePull", "dial tcp: i/o timeout")
    refuse(cluster, lambda node: timeout if node == "a0" else {"phase": "Pending"})
    cluster.submit("job", 2)
    await until(lambda: cluster.phase("job") is Phase.RUNNING)
    assert "a0" not in cluster.status("job").assignment.names


async def test_a_kubelet_that_rejects_a_pod_is_avoided(cluster, until):
    cluster.nodes("AAA")
    cluster.kubelets.refuses_start.add("a0")
    cluster.operator(LEASE)
    refused = {"phase": "Failed", "reason": "OutOfmemory", "message": "Node didn't have enough"}
    refuse(cluster, lambda node: refused if node == "a0" else {"phase": "Pending"})
    cluster.submit("job", 2)
    await until(lambda: cluster.phase("job") is Phase.RUNNING)
    assert "a0" not in cluster.status("job").assignment.names
    assert any("OutOfmemory" in event for event in messages_of(cluster, "job"))


async def test_a_missing_claim_is_named(cluster, until):
    cluster.nodes("A")
    cluster.kubelets.refuses_start.add("a0")
    cluster.operator(LEASE)
    volume = {"name": "data", "persistentVolumeClaim": {"claimName": "lost"}}
    container = {"name": "trainer", "image": "i", "command": ["t"]}
    cluster.submit("job", template={"spec": {"containers": [container], "volumes": [volume]}})
    await until(
        lambda: any(
            "claimName" in event and "lost" in event for event in messages_of(cluster, "job")
        ),
        20,
    )


CONTAINER = {"name": "trainer", "image": "i", "command": ["t"]}


async def test_a_claims_name_reaches_no_object_of_others(cluster, until):
    cluster.nodes("A")
    cluster.kubelets.refuses_start.add("a0")
    pod = {"metadata": {"name": "theirs"}, "spec": {"containers": [CONTAINER]}}
    pod["status"] = {"phase": "Secretly"}
    cluster.store.create("namespaces", {"metadata": {"name": "other"}})
    cluster.store.create("pods", pod, "other")
    cluster.operator(LEASE)
    name = "../../other/pods/theirs"
    volume = {"name": "data", "persistentVolumeClaim": {"claimName": name}}
    cluster.submit("job", template={"spec": {"containers": [CONTAINER], "volumes": [volume]}})
    await until(lambda: any(" claim" in item for item in messages_of(cluster, "job")))
    assert not any("Secretly" in event for event in messages_of(cluster, "job"))
    gets = [call for call in cluster.server.faults.calls if call.verb == "get"]
    assert not any(get.name == "theirs" for get in gets)


@pytest.mark.parametrize(
    ("volume", "message", "words"),
    [
        (
            {"name": "key", "secret": {"secretName": "wandb"}},
            'MountVolume.SetUp failed for volume "key" : secret "wandb" not found',
            'spec.template.spec.volumes[0].secret.secretName: secret "wandb" not found in default',
        ),
        (
            {"name": "c", "projected": {"sources": [{"configMap": {"name": "conf"}}]}},
            'MountVolume.SetUp failed for volume "c" : [configmap "conf" not found, x]',
            'spec.template.spec.volumes[0].projected.sources: configmap "conf" not found',
        ),
    ],
)
async def test_a_missing_object_of_a_volume_is_named(cluster, until, volume, message, words):
    cluster.nodes("A")
    cluster.kubelets.refuses_start.add("a0")
    cluster.operator(LEASE, refused_backoff_seconds=30.0)
    spec = {"containers": [CONTAINER], "volumes": [volume]}
    cluster.submit("job", template={"spec": spec}, maxRestarts=0)
    await until(lambda: cluster.pods("job"))
    pod = cluster.pods("job")[0]["metadata"]
    cluster.store.create("events", {
        "metadata": {"name": "e"}, "reason": "FailedMount", "message": message, "type": "Warning",
        "involvedObject": {"kind": "Pod", "name": pod["name"], "uid": pod["uid"]},
    }, "default")  # fmt: skip
    await until(lambda: cluster.phase("job") is Phase.FAILED)
    assert words in cluster.status("job").message
    assert not cluster.status("job").history.avoid


async def test_other_mount_failures_are_retried_by_the_kubelet(cluster, until):
    """A restarting driver is back in time; an existing secret is not the job's fault."""
    cluster.nodes("A")
    cluster.kubelets.refuses_start.add("a0")
    cluster.operator(LEASE)
    volume = {"name": "key", "secret": {"secretName": "wandb"}}
    cluster.submit("job", template={"spec": {"containers": [CONTAINER], "volumes": [volume]}})
    await until(lambda: cluster.pods("job"))
    pod = cluster.pods("job")[0]["metadata"]
    for name, reason, text in (
        ("e", "FailedMount", 'MountVolume.MountDevice failed for volume "pvc-1" : not found'),
        ("f", "FailedMount", 'MountVolume.SetUp failed for volume "x" : secret "y" not found'),
        ("g", "Pulled", 'volume "key" : secret "wandb" not found'),
    ):
        cluster.store.create("events", {
            "metadata": {"name": name}, "reason": reason, "message": text,
            "involvedObject": {"kind": "Pod", "name": pod["name"], "uid": pod["uid"]},
        }, "default")  # fmt: skip
    calls = cluster.server.faults.calls
    call_count = len(calls)
    await until(
        lambda: (
            sum(call.verb == "list" and call.resource == "events" for call in calls[call_count:])
            > 20
        ),
        20,
    )
    assert cluster.status("job").history.attempt == 1
    assert cluster.phase("job") is Phase.STARTING


def test_a_repeatedly_crashing_sidecar_of_the_job_is_attributed_to_the_job():
    status = {"phase": "Pending", "initContainerStatuses": [
        {"name": "proxy", "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "x"}}}
    ]}  # fmt: skip
    assert pod_problem({"status": status}).job_fault
    status["initContainerStatuses"][0]["name"] = "flyer-sidecar"
    assert not pod_problem({"status": status}).job_fault


async def test_a_conflict_of_a_create_costs_no_restart(cluster, until):
    """A ResourceQuota that several API servers count answers so."""
    cluster.nodes("AAAA")
    cluster.operator(LEASE)
    cluster.submit("first")
    await until(lambda: cluster.phase("first") is Phase.RUNNING)
    cluster.server.faults.add(
        Fault("refuse", verb="create", resource="pods", code=409, reason="Conflict", times=4)
    )
    cluster.submit("job", 3)
    await until(lambda: cluster.phase("job") is Phase.RUNNING)
    assert cluster.status("job").history.attempt == 1


@pytest.mark.parametrize(("code", "reason"), [(503, "x"), (401, "Unauthorized"), (403, "role")])
async def test_an_outage_during_a_start_costs_no_restart(cluster, until, code, reason):
    cluster.nodes("AA")
    cluster.operator(LEASE, refused_backoff_seconds=1000.0)  # which is for full quotas
    cluster.submit("first")
    await until(lambda: cluster.phase("first") is Phase.RUNNING)
    fault = Fault("refuse", verb="create", resource="pods", code=code, reason=reason, times=10**6)
    cluster.server.faults.add(fault)
    cluster.submit("job")
    await until(lambda: cluster.status("job").history.refusals)
    fault.times = 0
    await until(lambda: cluster.phase("job") is Phase.RUNNING)
    assert cluster.status("job").history.restarts == 0


def test_failures_of_injected_containers_are_never_attributed_to_the_job():
    status = waiting("ErrImagePull", "not found", container="flyer-sidecar")
    assert pod_problem({"status": status}).job_fault is False
    assert pod_problem({"status": {"phase": "Running"}}) is None
    assert pod_problem({"status": waiting("ContainerCreating")}) is None


async def test_the_node_whose_pod_does_not_come_up_by_the_deadline_is_avoided(
    cluster, until, monkeypatch
):
    monkeypatch.setattr(start_monitor, "PENDING_SECONDS", 0.1)
    cluster.nodes("AAA")
    cluster.kubelets.refuses_start.add("a0")  # no status has the reason
    cluster.operator(LEASE, start_deadline_seconds=3.0)
    cluster.submit("job", 2)
    await until(lambda: cluster.phase("job") is Phase.RUNNING, 60)
    status = cluster.status("job")
    assert "a0" not in status.assignment.names
    assert status.history.attempt == 2
    assert status.eviction.reason == "PodsReadyTimeout"
    assert "a0" in status.eviction.message
