"""Templates are checked before their jobs are queued: a failing one takes no nodes."""

import asyncio

import pytest
from flyer.api import Phase
from flyer.kube.apiserver import LeaseSettings
from flyer.kube.services.pods import templates

from fakekube import Fault

LEASE = LeaseSettings(
    namespace="fireflyer-system", duration_seconds=300, renew_seconds=200, retry_seconds=0.1
)
GPU = "fireflyer.dev/gpu"
CONTAINER = {"name": "trainer", "image": "i", "command": ["train"]}


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(templates, "AGAIN_SECONDS", 0.02)


def template(container=None, **spec):
    return {"spec": {"containers": [CONTAINER | (container or {})], **spec}}


def dry_runs(cluster):
    return [call for call in cluster.server.faults.calls if call.verb == "dryrun"]


async def refused(cluster, until, name="bad"):
    await until(lambda: cluster.status(name).reason == "TemplateRefused")
    status = cluster.status(name)
    assert status.assignment is None
    assert status.pending.verdict == "Never"
    assert status.condition("QuotaReserved").message == status.message
    assert not cluster.pods(name, living=False)
    return status.message


@pytest.mark.parametrize(
    ("body", "field", "remedy"),
    [
        (template({"comand": ["x"]}), "spec.template.spec.containers[0].comand", "command"),
        (template(contianers=[]), "spec.template.spec.contianers", "containers"),
        (template(nodeSelecter={}), "spec.template.spec.nodeSelecter", "nodeSelector"),
        (
            template({"resources": {"limit": {}}}),
            "spec.template.spec.containers[0].resources.limit", "limits",
        ),
        (template({"volumeMount": []}), "spec.template.spec.containers[0].volumeMount", "Mounts"),
        (
            template(volumes=[{"name": "x", "persistentVolumeClam": {}}]),
            "spec.template.spec.volumes[0].persistentVolumeClam", "persistentVolumeClaim",
        ),
        (template(volumeMounts=[]), "spec.template.spec.volumeMounts", "spec.containers[]"),
        (template(nodeName="a0"), "spec.template.spec.nodeName", "remove it"),
        (template(tolerations={"key": "x"}), "spec.template.spec.tolerations", "a list"),
        (
            template(nodeSelector={"disk": "ssd"}),
            "spec.template.spec.nodeSelector",
            "spec.nodeClass",
        ),
        (
            template({"resources": {"requests": {"memory": "900Gi"}}}),
            "of memory", "fireflyer.dev/node-class",
        ),
        (
            template({"resources": {"limits": {"fireflyer.dev/gpu": 9}}}),
            "9 of fireflyer.dev/gpu", "fireflyer.dev/node-class",
        ),
        (
            template({"resources": {"requests": {"memory": "1e45"}}}),
            "of memory", "fireflyer.dev/node-class",
        ),
    ],
)  # fmt: skip
async def test_invalid_templates_are_refused_before_nodes_are_assigned(
    cluster, until, body, field, remedy
):
    cluster.nodes("A")
    cluster.operator(LEASE)
    cluster.submit("bad", template=body)
    reported = await refused(cluster, until)
    assert field in reported
    assert remedy in reported
    cluster.submit("next")
    await until(lambda: cluster.phase("next") is Phase.RUNNING)


async def test_a_corrected_template_runs(cluster, until):
    cluster.nodes("A")
    cluster.operator(LEASE)
    cluster.submit("bad", template=template({"comand": ["x"]}))
    await refused(cluster, until)
    cluster.edit("bad", template=template())
    await until(lambda: cluster.phase("bad") is Phase.RUNNING)
    assert cluster.status("bad").history.attempt == 1


async def test_a_job_runs_once_there_is_a_node_for_it(cluster, until):
    cluster.nodes("A")
    cluster.operator(LEASE)
    cluster.submit("bad", template=template(nodeSelector={"disk": "ssd"}))
    await refused(cluster, until)
    labels = {"metadata": {"labels": {"disk": "ssd"}}}
    cluster.store.patch("nodes", "a0", labels)
    await until(lambda: cluster.phase("bad") is Phase.RUNNING)


@pytest.mark.parametrize(("mode", "runs"), [("WaitForFirstConsumer", False), ("Immediate", True)])
async def test_a_claim_that_binds_late_is_refused_on_dedicated_nodes(cluster, until, mode, runs):
    cluster.nodes("A")
    cluster.operator(LEASE)
    cluster.store.create(
        "storageclasses",
        {
            "metadata": {
                "name": "local",
                "annotations": {"storageclass.kubernetes.io/is-default-class": "true"},
            },
            "volumeBindingMode": mode,
        },
    )
    claim = {"metadata": {"name": "data"}, "spec": {}, "status": {"phase": "Pending"}}
    cluster.store.create("persistentvolumeclaims", claim, "default")
    volume = {"name": "data", "persistentVolumeClaim": {"claimName": "data"}}
    cluster.submit("bad", template=template(volumes=[volume]))
    if runs:
        await until(lambda: cluster.phase("bad") is Phase.RUNNING)
        return
    reported = await refused(cluster, until)
    assert "spec.template.spec.volumes[0].persistentVolumeClaim.claimName" in reported
    assert "Immediate" in reported


async def test_a_job_that_requests_no_gpus_may_get_nodes_with_different_numbers(cluster, until):
    """Each pod requests all GPUs of the node for which it is created."""
    cluster.kubelets.add_node("a0", "A", gpus=8)
    cluster.kubelets.add_node("a1", "A", gpus=4)
    cluster.operator(LEASE)
    cluster.submit("good", 2)
    await until(lambda: cluster.phase("good") is Phase.RUNNING)
    gpus = {
        pod["spec"]["nodeName"]: pod["spec"]["containers"][0]["resources"]["limits"][GPU]
        for pod in cluster.pods("good")
    }
    assert gpus == {"a0": "8", "a1": "4"}
    cluster.submit("bad", template=template({"resources": {"limits": {GPU: "8"}}}))
    assert "request 8" in await refused(cluster, until)


async def test_a_404_leaves_no_job_unsubmitted(cluster, until):
    """Of a replica of the API server that does not know the job or its namespace yet."""
    cluster.nodes("A")
    cluster.operator(LEASE)
    faults = [
        Fault("refuse", verb="get", resource="flyerjobs", name="good", code=404, reason="NotFound"),
        Fault("refuse", verb="dryrun", resource="pods", code=404, reason="NotFound"),
    ]
    for fault in faults:
        cluster.server.faults.add(fault)
    cluster.submit("good")
    await until(lambda: cluster.phase("good") is Phase.RUNNING)
    assert [fault.times for fault in faults] == [0, 0]


async def test_an_outage_refuses_no_template(cluster, until):
    cluster.nodes("A")
    cluster.operator(LEASE)
    fault = Fault("refuse", verb="dryrun", resource="pods", code=503, reason="x", times=3)
    cluster.server.faults.add(fault)
    cluster.submit("good")
    await until(lambda: cluster.phase("good") is Phase.RUNNING)
    assert fault.seen >= 3
    assert cluster.status("good").history.restarts == 0


@pytest.mark.parametrize(
    ("code", "message"), [(403, "exceeded quota"), (400, 'webhook "x" does not support dry run')]
)
async def test_unrelated_errors_refuse_no_template(cluster, until, monkeypatch, code, message):
    from flyer.kube.apiserver import Api
    from flyer.kube.apiserver.errors import error_of

    whole = Api.create

    async def create(self, resource, value, namespace="", **how):
        if how.get("dry_run"):
            raise error_of("create pods", code, "x", message)
        return await whole(self, resource, value, namespace, **how)

    monkeypatch.setattr(Api, "create", create)
    cluster.nodes("A")
    cluster.operator(LEASE)
    cluster.submit("good")
    await until(lambda: cluster.phase("good") is Phase.RUNNING)


async def test_jobs_with_one_template_share_a_check_and_a_new_leader_repeats_none(cluster, until):
    cluster.nodes("A")
    first = cluster.operator(LEASE)
    for number in range(20):
        cluster.submit(f"j{number}")
    await until(lambda: all(cluster.status(f"j{n}").epoch for n in range(20)))
    assert len(dry_runs(cluster)) == 1
    first.kill()
    cluster.store.delete("leases", "flyer-operator", "fireflyer-system")
    second = cluster.operator(LEASE)
    await until(lambda: second.serves)
    await until(lambda: any(cluster.phase(f"j{n}") is Phase.RUNNING for n in range(20)))
    running = [f"j{n}" for n in range(20) if cluster.phase(f"j{n}") is Phase.RUNNING]
    cluster.finish(running[0])
    await until(lambda: cluster.phase(running[0]) is Phase.SUCCEEDED)
    assert len(dry_runs(cluster)) <= 2  # the next job's start reads its template


async def test_many_templates_of_one_namespace_delay_no_other_namespace(cluster, until):
    cluster.nodes("A")
    cluster.operator(LEASE)
    for number in range(100):
        other = {"name": "N", "value": str(number)}
        cluster.submit(f"j{number}", template=template({"env": [other]}), suspend=True)
    cluster.store.create("namespaces", {"metadata": {"name": "other"}})
    cluster.submit("quiet", namespace="other")
    await until(lambda: cluster.status("quiet", "other").epoch)
    namespaces = [dry_run.namespace for dry_run in dry_runs(cluster)]
    assert namespaces.index("other") <= 2 * templates.CONCURRENCY_MAX
    await until(lambda: len(dry_runs(cluster)) >= 101)


async def test_a_template_changed_while_queued_is_checked_before_it_is_built(cluster, until):
    cluster.nodes("A")
    cluster.operator(LEASE)
    cluster.submit("first")
    await until(lambda: cluster.phase("first") is Phase.RUNNING)
    cluster.submit("later")
    await until(lambda: cluster.status("later").epoch)
    cluster.edit("later", template=template({"comand": ["x"]}))
    cluster.finish("first")
    await until(lambda: "comand" in cluster.status("later").message)
    assert not cluster.pods("later", living=False)


@pytest.fixture
async def ssd(cluster, until):
    """A cluster with one node, which has the label that a running job requires."""
    cluster.nodes("A")
    cluster.store.patch("nodes", "a0", {"metadata": {"labels": {"disk": "ssd"}}})
    cluster.operator(LEASE)
    cluster.submit("first", template=template(nodeSelector={"disk": "ssd"}))
    await until(lambda: cluster.phase("first") is Phase.RUNNING)
    return cluster


async def relabel(cluster):
    operator = cluster.operators[0]
    cluster.store.patch("nodes", "a0", {"metadata": {"labels": {"disk": "slow"}}})
    async with asyncio.timeout(60):
        while operator.cache.nodes.get("", "a0").labels["disk"] != "slow":
            await asyncio.sleep(0.002)


async def test_a_template_that_passed_is_checked_again_once_nodes_have_changed(ssd, until):
    await relabel(ssd)
    ssd.submit("bad", template=template(nodeSelector={"disk": "ssd"}))
    assert "nodeSelector" in await refused(ssd, until)


async def test_a_queued_job_gets_no_pods_on_nodes_that_became_unfit(ssd, until):
    ssd.submit("later", template=template(nodeSelector={"disk": "ssd"}))
    await until(lambda: ssd.status("later").epoch)
    await relabel(ssd)
    ssd.finish("first")
    await until(lambda: ssd.status("later").history.refusals)
    status = ssd.status("later")
    assert "spec.template.spec.nodeSelector: requires disk=ssd" in status.eviction.message
    assert status.history.restarts == 0
    assert not ssd.pods("later", living=False)
    ssd.store.patch("nodes", "a0", {"metadata": {"labels": {"disk": "ssd"}}})
    await until(lambda: ssd.phase("later") is Phase.RUNNING)
