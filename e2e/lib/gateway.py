"""Test scheduler with the operator's gateway; sidecars, launchers and tokens are real."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from flyer.api import AssignedNode, Assignment, FlyerJob, FlyerJobStatus, JobHistory
from flyer.engine import Start
from flyer.kube.apiserver import Api, find_access
from flyer.kube.apiserver.resources import PODS
from flyer.kube.apiserver.token_reviews import TokenReviews
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

from e2e.lib.pods import TRAIN_IMAGE
from testcluster.handle import KubectlError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from testcluster.handle import Cluster

__all__ = ["NODES", "SECONDS", "STEPS", "TOKEN", "Control", "controlled"]

NODES = (("node-a1", "A"), ("node-a2", "A"), ("node-b1", "B"))
SECONDS = 90.0
TOKEN = {"serviceAccountToken": {"path": "token", "audience": TOKEN_AUDIENCE}}

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


class Control:
    """The test scheduler and the gateway."""

    def __init__(self, cluster: Cluster, namespace: str, api: Api) -> None:
        self.cluster, self.namespace, self.api = cluster, namespace, api
        self.events: list[Any] = []
        self.reported = asyncio.Event()
        self.registry = CollectorRegistry()
        self.host = str(cluster.state.gateway)
        self.gateway = Gateway(
            enqueue=self._tell,
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
        self.reported.set()
        # No FlyerJob status stores it.
        asyncio.get_running_loop().call_soon(self.gateway.stored, [event])

    async def event(self, kind: type, job: str = "") -> Any:
        """The first of a kind, of this job or of any."""
        async with asyncio.timeout(SECONDS):
            while True:
                for event in self.events:
                    if event.job.endswith(f"/{job}" if job else "") and isinstance(event, kind):
                        return event
                self.reported.clear()
                await self.reported.wait()

    async def start(
        self, name: str, script: str, *arguments: str, token: bool = False
    ) -> list[dict[str, Any]]:
        """Pods of a job on all nodes, bound and expected.

        With a `token` its ranks find one like their sidecars' at /token/token: a user may mount it.
        """
        container: dict[str, Any] = {
            "name": "trainer",
            "image": TRAIN_IMAGE,
            "command": ["python3", "-c", script, *arguments],
        }
        spec: dict[str, Any] = {"containers": [container]}
        if token:
            spec["volumes"] = [{"name": "token", "projected": {"sources": [TOKEN]}}]
            container["volumeMounts"] = [{"name": "token", "mountPath": "/token"}]
        manifest = {
            "apiVersion": "fireflyer.dev/v1alpha1",
            "kind": "FlyerJob",
            "metadata": {"name": name, "namespace": self.namespace},
            "spec": {"nodes": len(NODES), "ranksPerNode": 2, "template": {"spec": spec}},
        }
        owned = self._create_owner(manifest)
        job = FlyerJob.model_validate(manifest)
        job = job.replace(status=FlyerJobStatus(history=JobHistory(id=f"chain-{name}")))
        assigned = tuple(
            AssignedNode(name=node, zone=zone, first_rank=2 * i)
            for i, (node, zone) in enumerate(NODES)
        )
        assignment = Assignment(
            epoch=1, nodes=assigned, cross_zone_pair=("node-a2", "node-b1"), reserved_at=0.0
        )
        start = Start(job.key, 1, assignment, None, 0)
        settings = PodSettings(
            controller_image="docker.io/fireflyer/controller:test",
            collectives_image="docker.io/fireflyer/collectives:test",
            gateway_ca=self.bundle,
            gateway_endpoint=f"{self.host}:{self.gateway.port}",
        )
        placed = {node: PlacedNode(name=node) for node, _ in NODES}
        pods = []
        for pod in build_pods(job, start, placed, settings):
            if not owned:
                del pod["metadata"]["ownerReferences"]  # it would be collected
            pods.append(await self.api.create(PODS, pod, self.namespace))
        identities = [
            PodIdentity(self.namespace, item["metadata"]["name"], item["metadata"]["uid"])
            for item in pods
        ]
        self.gateway.expect(job, start, identities)
        for identity, (node, _) in zip(identities, NODES, strict=True):
            binding = {
                "apiVersion": "v1",
                "kind": "Binding",
                "metadata": {"name": identity.name},
                "target": {"apiVersion": "v1", "kind": "Node", "name": node},
            }
            await self.api.post(PODS, identity.name, self.namespace, "binding", binding)
        return pods

    def _create_owner(self, manifest: dict[str, Any]) -> bool:
        """Make the FlyerJob where the API has that kind, and give the manifest its uid."""
        metadata = manifest["metadata"]
        metadata["uid"] = f"uid-{metadata['name']}"
        kind = ("crd", "flyerjobs.fireflyer.dev")
        if not self.cluster.kubectl("get", *kind, "--ignore-not-found"):
            return False
        unnamed = {key: value for key, value in metadata.items() if key != "uid"}
        self.cluster.apply({**manifest, "metadata": unnamed}, namespace=self.namespace)
        owner = self.cluster.get("flyerjob", metadata["name"], self.namespace)
        metadata["uid"] = owner["metadata"]["uid"]
        return True

    async def watch(self, pods: list[dict[str, Any]], until: type, job: str = "") -> Any:
        """Acts as the pod cache: reports pod addresses and exits until an event arrives."""
        waiting = asyncio.create_task(self.event(until, job))
        concluded: set[str] = set()
        while not waiting.done():
            for item in pods:
                metadata = item["metadata"]
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
            await self._explain(pods)
            raise

    async def _explain(self, pods: list[dict[str, Any]]) -> None:
        print(self.cluster.kubectl("get", "pods", "-o", "wide", "-n", self.namespace))
        for pod in pods:
            for container in ("flyer-sidecar", "trainer"):
                print(pod["metadata"]["name"], container)
                try:
                    print(self.logs(pod, container))
                except KubectlError as error:
                    print(error)
        print(self.cluster.kubectl("events", "-n", self.namespace))

    def logs(self, pod: dict[str, Any], container: str = "trainer") -> str:
        """The log of a container of this pod."""
        name = pod["metadata"]["name"]
        return self.cluster.kubectl("logs", name, "-c", container, "-n", self.namespace)

    def count(self, reason: str) -> float | None:
        """How often the gateway refused for this reason."""
        name = "flyer_gateway_refusals_total"
        return self.registry.get_sample_value(name, {"reason": reason})


@asynccontextmanager
async def controlled(cluster: Cluster, namespace: str, kubeconfig: str) -> AsyncIterator[Control]:
    """A scheduler whose gateway serves, with the access of `kubeconfig`."""
    access = await find_access(kubeconfig)
    async with Api(access, agent="test") as api:
        control = Control(cluster, namespace, api)
        serving = asyncio.create_task(control.gateway.serve())
        yield control
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
