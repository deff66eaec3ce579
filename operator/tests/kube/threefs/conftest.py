"""A StatefulSet and Job controller over the in-memory API server, with a health set by the test."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from typing import TYPE_CHECKING, Any

import pytest
from flyer.api import API_VERSION
from flyer.api.timestamps import format_timestamp
from flyer.kube.threefs.controller import ThreeFSClusters
from flyer.kube.threefs.health import Health, NodeState
from flyer.kube.threefs.settings import ClusterSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from flyer.kube.apiserver import Api

    from fakekube import ApiServer

NAMESPACE = "default"
SPEC: dict[str, Any] = {
    "image": "r/threefs:1",
    "metadata": {"etcd": {"endpoints": ["http://etcd:2379"]}},
    "storage": {"replicas": 4, "replication": 2},
}


class Kubernetes:
    """What the operator does not do: pods of StatefulSets become ready, and Jobs end."""

    def __init__(self, server: ApiServer) -> None:
        self.server = server
        self.store = server.store
        self.broken: set[str] = set()
        """Images that do not start."""
        self.broken_pods: set[str] = set()
        self.health: Health | None = Health(
            4, nodes={node: NodeState(replicas=2) for node in (1, 2, 3, 4)}
        )
        self.asked: list[Sequence[str]] = []
        self.replaced: list[str] = []
        self._created: set[str] = set()
        self.hang: asyncio.Event | None = None
        self.before_health: Callable[[], Awaitable[None]] | None = None
        """Called once, after the pods were read and before the health is."""
        self.paused = False
        """Whether the StatefulSet controller is down."""
        self.refused: set[str] = set()
        """StatefulSets whose pods cannot be created."""
        self.slow: set[str] = set()
        """Pods that run and are not ready."""
        self._clock = 1_800_000_000.0

    async def health_of(self, addresses: Sequence[str]) -> Health | None:
        self.asked.append(addresses)
        if self.hang is not None and not self.hang.is_set():
            self.hang.set()
            await asyncio.Event().wait()
        if before := self.before_health:
            self.before_health = None
            await before()
        return self.health

    def create(self, name: str = "main", namespace: str = NAMESPACE, **spec: Any) -> None:
        value = {
            "apiVersion": API_VERSION, "kind": "ThreeFSCluster",
            "metadata": {"name": name, "namespace": namespace}, "spec": {**SPEC, **spec},
        }  # fmt: skip
        self.store.create("threefsclusters", value, namespace)

    def edit(self, **spec: Any) -> None:
        self.store.patch("threefsclusters", "main", {"spec": spec}, NAMESPACE)

    def status(self, name: str = "main", namespace: str = NAMESPACE) -> dict[str, Any]:
        return self.store.get("threefsclusters", name, namespace).get("status") or {}

    def condition(self, kind: str, name: str = "main", namespace: str = NAMESPACE) -> Any:
        conditions = self.status(name, namespace).get("conditions") or []
        return next((each for each in conditions if each["type"] == kind), {})

    def statuses(self, generation: int) -> list[dict[str, Any]]:
        """All statuses of the cluster that were stored for a generation, in order."""
        stored = [
            change.after.object.get("status") or {}
            for change in self.store.table("threefsclusters").history
        ]
        return [status for status in stored if status.get("observedGeneration") == generation]

    def stateful_set(self, kind: str) -> dict[str, Any]:
        return self.store.get("statefulsets", f"threefs-{kind}", NAMESPACE)

    def pods(self, kind: str = "") -> list[dict[str, Any]]:
        return [
            pod for pod in self.store.all("pods") if f"threefs-{kind}" in pod["metadata"]["name"]
        ]

    async def run(self) -> None:
        """Act on StatefulSets until cancelled."""
        while True:
            for stateful in [] if self.paused else self.store.all("statefulsets"):
                self._reconcile(stateful)
            await asyncio.sleep(0.005)

    def _reconcile(self, stateful: dict[str, Any]) -> None:
        meta, spec = stateful["metadata"], stateful["spec"]
        revision = hashlib.sha256(json.dumps(spec["template"]).encode()).hexdigest()[:10]
        status = {"updateRevision": revision, "observedGeneration": meta["generation"]}
        if stateful.get("status") != status:
            self.store.patch(
                "statefulsets", meta["name"], {"status": status}, meta["namespace"], "status"
            )
        names = {f"{meta['name']}-{ordinal}" for ordinal in range(spec["replicas"])}
        for pod in self.store.all("pods"):
            owner = pod["metadata"].get("ownerReferences", [{}])[0].get("uid")
            if owner != meta["uid"]:
                continue
            name = pod["metadata"]["name"]
            if "deletionTimestamp" in pod["metadata"] or name not in names:
                with contextlib.suppress(Exception):
                    self.store.delete("pods", name, meta["namespace"], {"gracePeriodSeconds": 0})
            names.discard(name)
        for name in [] if meta["name"] in self.refused else sorted(names):
            self._create_pod(stateful, name, revision)

    def _create_pod(self, stateful: dict[str, Any], name: str, revision: str) -> None:
        meta, template = stateful["metadata"], stateful["spec"]["template"]
        if self.store.find("pods", name, meta["namespace"]):
            return
        labels = {**template["metadata"]["labels"], "controller-revision-hash": revision}
        owner = {
            "apiVersion": "apps/v1", "kind": "StatefulSet", "name": meta["name"],
            "uid": meta["uid"], "controller": True,
        }  # fmt: skip
        pod = {
            "apiVersion": "v1", "kind": "Pod", "spec": template["spec"],
            "metadata": {"name": name, "labels": labels, "ownerReferences": [owner]},
        }  # fmt: skip
        self.store.create("pods", pod, meta["namespace"])
        if name in self._created:
            self.replaced.append(name)
        self._created.add(name)
        container = template["spec"]["containers"][0]
        broken = container["image"] in self.broken or name in self.broken_pods
        self._clock += 1
        state = (
            {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
            if broken
            else {"running": {"startedAt": format_timestamp(self._clock)}}
        )
        ready = {
            "type": "Ready", "status": "False" if broken or name in self.slow else "True",
            "lastTransitionTime": format_timestamp(self._clock),
        }  # fmt: skip
        status = {
            "phase": "Running", "podIP": "192.0.2.1", "conditions": [ready],
            "containerStatuses": [{
                "name": container["name"], "state": state, "ready": not broken,
                "image": container["image"], "imageID": "", "restartCount": 0,
            }],
        }  # fmt: skip
        self.store.patch("pods", name, {"status": status}, meta["namespace"], "status")

    def become_ready(self, name: str) -> None:
        """A slow pod becomes ready."""
        self.slow.discard(name)
        self._clock += 1
        ready = {
            "type": "Ready", "status": "True", "lastTransitionTime": format_timestamp(self._clock),
        }  # fmt: skip
        self.store.patch("pods", name, {"status": {"conditions": [ready]}}, NAMESPACE, "status")

    def end_job(self, name: str, kind: str) -> None:
        """A Job ends: Complete or Failed."""
        self._clock += 1
        condition = {
            "type": kind, "status": "True", "lastTransitionTime": format_timestamp(self._clock),
        }  # fmt: skip
        self.store.patch("jobs", name, {"status": {"conditions": [condition]}}, NAMESPACE, "status")


@pytest.fixture
async def kubernetes(api_server: ApiServer) -> AsyncIterator[Kubernetes]:
    kubernetes = Kubernetes(api_server)
    task = asyncio.create_task(kubernetes.run())
    yield kubernetes
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


@pytest.fixture
async def operator(kubernetes: Kubernetes, connect: Any) -> AsyncIterator[ThreeFSClusters]:
    """The controller, running."""
    api: Api = connect("flyer-operator", answer_seconds=30.0, call_seconds=60.0)
    clusters = ThreeFSClusters(api, ClusterSettings(), kubernetes.health_of, 0.02)
    task = asyncio.create_task(clusters.run())
    yield clusters
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
