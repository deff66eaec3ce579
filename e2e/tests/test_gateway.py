"""Gangs on real kubelets with the gateway alone: real tokens, sidecars, launchers and logs.

The scheduler's part (making and binding pods) is played by the test; everything else is what a
cluster runs.
"""

from __future__ import annotations

import asyncio
import re
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
from flyer.api import AssignedNode, Assignment, Chain, FlyerJob, FlyerJobStatus
from flyer.engine import (
    Failed,
    GangStarted,
    PodExited,
    ProgressReported,
    Released,
    Signal,
    Start,
    SuspendReceived,
)
from flyer.kube.client import Api, find_access
from flyer.kube.client.identities import TokenReviews
from flyer.kube.client.resources import PODS
from flyer.kube.gateway import (
    Gateway,
    GatewayMetrics,
    GatewaySettings,
    PodIdentity,
    certificates_of,
    outcome_of,
    renewed,
)
from flyer.kube.pods import TOKEN_AUDIENCE, PlacedNode, PodSettings, build_pods
from prometheus_client import CollectorRegistry

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from e2e.cluster.handle import Cluster

# Images are built and loaded first, which takes minutes on a busy machine.
pytestmark = pytest.mark.timeout(600)

NODES = (("node-a1", "A"), ("node-a2", "A"), ("node-b1", "B"))
SECONDS = 90.0

STEPS = """
import flyer.job, json, os, sys, time
job = flyer.job.current()
topology = json.load(open(os.environ["FLYER_TOPOLOGY"]))
names = ",".join(node["name"] for node in topology["nodes"])
print("at", os.environ["MASTER_ADDR"], os.environ["FLYER_ZONE"], names, flush=True)
step = 0
while not job.suspend_requested():
    step += 1
    if job.rank == 0:
        job.progress(step)
    time.sleep(0.02)
print("asked", time.time(), job.reason, flush=True)
if job.rank != 0:
    time.sleep(60)
job.received()
job.release(step)
"""
FAILING = """
import os, time
if os.environ["RANK"] == "5":
    raise ValueError("seven")
time.sleep(60)
"""
KNOCK = """
import json, socket, ssl, sys
host, port, path, authority = sys.argv[1:]
context = ssl.create_default_context(cadata=authority)
with context.wrap_socket(socket.create_connection((host, int(port))), server_hostname=host) as one:
    token = open(path).read()
    one.sendall(json.dumps({"kind": "hello", "version": 1, "token": token}).encode() + b"\\n")
    print(json.loads(one.makefile().readline())["code"])
"""


class Control:
    """The test's own scheduler, and the gateway."""

    def __init__(self, cluster: Cluster, namespace: str, api: Api) -> None:
        self.cluster, self.namespace, self.api = cluster, namespace, api
        self.events: list[Any] = []
        self.told = asyncio.Event()
        self.registry = CollectorRegistry()
        self.host = str(cluster.state.gateway)
        self.gateway = Gateway(
            tell=self._tell,
            identities=TokenReviews(api),
            settings=GatewaySettings(port=0),
            metrics=GatewayMetrics(self.registry),
        )
        certificates = certificates_of(renewed(None, [self.host], datetime.now(UTC)))
        self.bundle = certificates.bundle
        self.gateway.use(certificates)
        self.gateway.listen()

    def _tell(self, event: Any) -> None:
        self.events.append(event)
        self.told.set()

    async def event(self, kind: type) -> Any:
        async with asyncio.timeout(SECONDS):
            while True:
                for event in self.events:
                    if isinstance(event, kind):
                        return event
                self.told.clear()
                await self.told.wait()

    async def start(self, name: str, script: str) -> list[dict[str, Any]]:
        """Pods of a job on all nodes, bound and expected."""
        job = FlyerJob.model_validate(
            {
                "metadata": {"name": name, "namespace": self.namespace, "uid": f"uid-{name}"},
                "spec": {
                    "nodes": len(NODES),
                    "ranksPerNode": 2,
                    "template": {
                        "spec": {
                            "containers": [
                                {
                                    "name": "trainer",
                                    "image": "docker.io/fireflyer/train:test",
                                    "command": ["python", "-c", script],
                                }
                            ]
                        }
                    },
                },
            }
        )
        job = job.replace(status=FlyerJobStatus(chain=Chain(id=f"chain-{name}")))
        assigned = tuple(
            AssignedNode(name=node, zone=zone, first_rank=2 * i)
            for i, (node, zone) in enumerate(NODES)
        )
        assignment = Assignment(
            epoch=1, nodes=assigned, bridge=("node-a2", "node-b1"), reserved_at=0.0
        )
        start = Start(job.key, 1, assignment, None, 0)
        settings = PodSettings(
            controller_image="docker.io/fireflyer/controller:test",
            collectives_image="docker.io/fireflyer/collectives:test",
            gateway_ca=self.bundle,
            gateway_endpoint=f"{self.host}:{self.gateway.port}",
        )
        placed = {node: PlacedNode(name=node) for node, _ in NODES}
        made = []
        for manifest in build_pods(job, start, placed, settings):
            del manifest["metadata"]["ownerReferences"]  # there is no FlyerJob behind it
            made.append(await self.api.create(PODS, manifest, self.namespace))
        pods = [
            PodIdentity(self.namespace, one["metadata"]["name"], one["metadata"]["uid"])
            for one in made
        ]
        self.gateway.expect(job, start, pods)
        for pod, (node, _) in zip(pods, NODES, strict=True):
            binding = {
                "apiVersion": "v1",
                "kind": "Binding",
                "metadata": {"name": pod.name},
                "target": {"apiVersion": "v1", "kind": "Node", "name": node},
            }
            await self.api.post(PODS, pod.name, self.namespace, "binding", binding)
        return made

    async def watch(self, made: list[dict[str, Any]], until: type) -> Any:
        """Plays the pods cache: tells addresses, and ends of pods, until an event is there."""
        waiting = asyncio.create_task(self.event(until))
        concluded: set[str] = set()
        while not waiting.done():
            for one in made:
                metadata = one["metadata"]
                pod = await self.api.get(PODS, metadata["name"], self.namespace)
                self.gateway.locate(metadata["uid"], pod["status"].get("podIP", ""))
                ended = pod["status"]["phase"] in ("Succeeded", "Failed")
                if ended and metadata["uid"] not in concluded:
                    concluded.add(metadata["uid"])
                    await self.gateway.conclude(metadata["uid"], outcome_of(pod))
            await asyncio.wait([waiting], timeout=0.3)
        try:
            return waiting.result()
        except TimeoutError:
            await self._explain(made)
            raise

    async def _explain(self, made: list[dict[str, Any]]) -> None:
        print(self.cluster.kubectl("get", "pods", "-o", "wide", "-n", self.namespace))
        for one in made:
            for container in ("flyer-sidecar", "trainer"):
                print(one["metadata"]["name"], container)
                try:
                    print(self.logs(one, container))
                except Exception as error:
                    print(error)
        print(self.cluster.kubectl("events", "-n", self.namespace))

    def logs(self, pod: dict[str, Any], container: str = "trainer") -> str:
        name = pod["metadata"]["name"]
        return self.cluster.kubectl("logs", name, "-c", container, "-n", self.namespace)

    def count(self, reason: str) -> float | None:
        name = "flyer_gateway_refusals_total"
        return self.registry.get_sample_value(name, {"reason": reason})


@pytest.fixture(scope="module", autouse=True)
def _images(cluster: Cluster, no_operator: None) -> None:
    cluster.load_images("train", "controller", "collectives")


@pytest.fixture
async def control(cluster: Cluster, namespace: str) -> AsyncIterator[Control]:
    access = await find_access(cluster.kubeconfig)
    async with Api(access, agent="test") as api:
        one = Control(cluster, namespace, api)
        serving = asyncio.create_task(one.gateway.serve())
        yield one
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


async def test_a_gang_starts_is_suspended_and_gives_its_nodes_back(control: Control) -> None:
    began = time.monotonic()
    made = await control.start("gpt", STEPS)
    await control.watch(made, GangStarted)
    print(f"created to running: {time.monotonic() - began:.1f} s")
    await control.event(ProgressReported)
    asked_at = time.time()
    job = f"{control.namespace}/gpt"
    control.gateway.signal(Signal(job, 1, asked_at + 60, "Preempted", "lab/other"))
    await control.event(SuspendReceived)
    print(f"acknowledged after {(time.time() - asked_at) * 1000:.0f} ms")
    await control.event(Released)
    log = control.logs(made[0])
    found = re.search(r"^rank 0 \| asked ([0-9.]+) Preempted by lab/other$", log, re.MULTILINE)
    assert found, log
    print(f"rank 0 knew after {(float(found[1]) - asked_at) * 1000:.0f} ms")
    for node_rank, one in enumerate(made):
        address = (await control.api.get(PODS, made[0]["metadata"]["name"], control.namespace))[
            "status"
        ]["podIP"]
        zone = NODES[node_rank][1]
        line = f"rank {2 * node_rank + 1} | at {address} {zone} node-a1,node-a2,node-b1"
        assert line in control.logs(one)
    for one in made:
        await control.api.delete(PODS, one["metadata"]["name"], control.namespace, grace_seconds=5)


async def test_a_failing_rank_is_told_with_its_traceback(control: Control) -> None:
    made = await control.start("bad", FAILING)
    exited = await control.watch(made, PodExited)
    assert exited.node == "node-b1"
    assert exited.outcome == Failed(1, "rank 5: ValueError: seven")
    log = control.logs(made[2])
    assert "rank 5 | ValueError: seven" in log
    assert "rank 5 on node node-b1: exit status 1" in log
    pod = made[2]["metadata"]["name"]
    for _ in range(int(SECONDS)):
        found = await control.api.get(PODS, pod, control.namespace)
        if found["status"]["phase"] == "Failed":
            break
        await asyncio.sleep(1)
    # What stands in for the sidecar's account says the same.
    assert outcome_of(found) == Failed(1, "rank 5: ValueError: seven")
    for one in made:
        await control.api.delete(PODS, one["metadata"]["name"], control.namespace, grace_seconds=1)


async def test_pods_that_are_not_who_they_should_be_are_refused(control: Control) -> None:
    """Its own token for the API server; a good token of a pod that is in no gang."""
    token = {"serviceAccountToken": {"path": "token", "audience": TOKEN_AUDIENCE}}
    paths = {
        "bad_token": "/var/run/secrets/kubernetes.io/serviceaccount/token",
        "unknown_pod": "/token/token",
    }
    port = str(control.gateway.port)
    for code, path in paths.items():
        name = code.replace("_", "-")
        command = ["python3", "-c", KNOCK, control.host, port, path, control.bundle]
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name},
            "spec": {
                "nodeName": "node-a1",
                "restartPolicy": "Never",
                "tolerations": [{"operator": "Exists"}],
                "volumes": [{"name": "token", "projected": {"sources": [token]}}],
                "containers": [
                    {
                        "name": "main",
                        "image": "docker.io/fireflyer/train:test",
                        "command": command,
                        "volumeMounts": [{"name": "token", "mountPath": "/token"}],
                    }
                ],
            },
        }
        await control.api.create(PODS, pod, control.namespace)
    for code in paths:
        async with asyncio.timeout(SECONDS):
            while control.count(code) != 1:
                await asyncio.sleep(0.2)
