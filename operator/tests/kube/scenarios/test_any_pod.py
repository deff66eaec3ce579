"""Random templates and pods in sequence at one operator: the next job always starts."""

import contextlib
import os
import random

import pytest
from flyer.api import Phase
from flyer.kube.apiserver import LeaseSettings
from flyer.kube.services.pods import start_monitor, templates

from fakekube.errors import ApiRefusal
from fakekube.generators.pod_templates import any_json, any_template

LEASE = LeaseSettings(
    namespace="fireflyer-system", duration_seconds=300, renew_seconds=200, retry_seconds=0.1
)
# Jobs with an accepted template run. They must not hold all nodes for their minimum runtime.
LIMITS = {"minRuntime": "0s", "checkpointGracePeriod": "1s", "maxCheckpointGracePeriod": "1s"}
SEED = int(os.environ.get("FLYER_SEED", "0")) or random.SystemRandom().randrange(2**32)
API_VERSIONS = ("fireflyer.dev/v1alpha1", "fireflyer.dev/v9", "apps/v1", "v1")
LABELS = (
    "fireflyer.dev/job", "fireflyer.dev/attempt", "fireflyer.dev/node-rank",
    "fireflyer.dev/history",
)  # fmt: skip


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(start_monitor, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(start_monitor, "CONFIRM_SECONDS", 0.1)
    monkeypatch.setattr(templates, "AGAIN_SECONDS", 0.05)


def any_owner(random, jobs):
    job = random.choice(jobs)
    return {
        "apiVersion": random.choice(
            ["fireflyer.dev/v1alpha1", "fireflyer.dev/v9", "apps/v1", "v1"]
        ),
        "kind": random.choice(["FlyerJob", "FlyerJob", "ReplicaSet"]),
        "name": random.choice([job["metadata"]["name"], "missing"]),
        "uid": random.choice([job["metadata"]["uid"], "no-uid"]),
        "controller": random.choice([True, True, False]),
    }


def any_pod(random, number, jobs, nodes):
    job = random.choice(jobs)["metadata"]["name"]
    labels = {name: random.choice([job, "1", "2", "x", ""]) for name in LABELS}
    metadata = {
        "name": random.choice([f"foreign-{number}", f"{job}-{random.randrange(4)}-{number}"]),
        "labels": {**labels, "fireflyer.dev/job": random.choice([job, "missing"])},
        "annotations": {"foreign": ""},
    }
    if random.random() < 0.8:
        metadata["ownerReferences"] = [any_owner(random, jobs)]
    spec = {"containers": [{"name": "x", "image": "i"}]}
    if random.random() < 0.7:
        spec["nodeName"] = random.choice(nodes)
    return {"metadata": metadata, "spec": spec}


def any_job(random, number):
    spec = {"nodes": random.randrange(1, 3), "template": any_template(random), "maxRestarts": 1}
    for name in random.choices(
        ["priority", "nodeClass", "zone", "ranksPerNode", "queue", "progressDeadline",
         "preemption", "collectives", "checkpoint", "suspend", "nodes", "nonsense",
         "managedBy"], k=random.randrange(3),
    ):  # fmt: skip
        spec[name] = any_json(random, 2)
    return {"metadata": {"name": f"any-{number}"}, "spec": spec}


async def _run(cluster, until, cases):
    print(f"FLYER_SEED={SEED}")  # shown on failure
    generator = random.Random(SEED)
    cluster.nodes("AAAA")
    topology = {"metadata": {"name": "cluster"}, "spec": {"limits": LIMITS}}
    cluster.store.create("flyertopologies", topology)
    operator = cluster.operator(LEASE)
    await until(lambda: operator.serves)
    term = operator.leader.term
    names = [node["metadata"]["name"] for node in cluster.store.all("nodes")]
    jobs = []
    for number in range(cases):
        job = any_job(generator, number)
        with contextlib.suppress(ApiRefusal):
            if generator.random() < 0.5:
                jobs.append(cluster.store.create("flyerjobs", job, "default"))
            else:
                with cluster.store.unchecked():  # stored under an older definition
                    jobs.append(cluster.store.create("flyerjobs", job, "default"))
        if number % 2 and jobs:
            pod = any_pod(generator, number, jobs[-20:], names)
            with contextlib.suppress(ApiRefusal), _checked(cluster.store, generator):
                cluster.store.create("pods", pod, "default")
        if number % 25 == 24:
            await _next_starts(cluster, until, f"next-{number}")
            assert operator.leader.term is term
    await _next_starts(cluster, until, "last")
    assert operator.leader.term is term


def _checked(store, generator):
    """Admission webhooks or older servers may accept more."""
    return contextlib.nullcontext() if generator.random() < 0.5 else store.unchecked()


async def _next_starts(cluster, until, name):
    """A valid high-priority job runs among the random ones."""
    cluster.submit(name, 1, priority="extreme-high")
    await until(lambda: cluster.phase(name) is Phase.RUNNING, 60)
    cluster.finish(name)
    await until(lambda: cluster.phase(name) is Phase.SUCCEEDED, 60)
    for value in list(cluster.store.all("flyerjobs", "default")):
        cluster.store.delete("flyerjobs", value["metadata"]["name"], "default")
    for value in list(cluster.store.all("pods", "default")):
        if "foreign" in value["metadata"].get("annotations", {}):
            cluster.store.delete(
                "pods", value["metadata"]["name"], "default", {"gracePeriodSeconds": 0}
            )


async def test_the_next_job_starts_whatever_came_before(cluster, until):
    await _run(cluster, until, 200)


@pytest.mark.soak
@pytest.mark.timeout(3600)
async def test_the_next_job_starts_many_times(cluster, until):
    await _run(cluster, until, 5_000)
