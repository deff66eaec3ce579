"""Nodes of a real API server without kubelets: writes the statuses that kubelets would write."""

from __future__ import annotations

import asyncio
import contextlib
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from flyer.kube.apiserver import Cache
from flyer.kube.apiserver.errors import ApiError
from flyer.kube.apiserver.resources import NODES, PODS
from flyer.kube.pods.names import LABEL_ATTEMPT, LABEL_JOB

from fakekube.nodes.exits import Exit
from fakekube.nodes.kubelets import node_object, wanted_node

if TYPE_CHECKING:
    from flyer.kube.apiserver import Api

__all__ = ["ApiNodes"]

BEAT_SECONDS = 3.0


class ApiNodes:
    """Runs bound pods by writing their statuses, and acts as kube-scheduler."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._nodes: dict[str, list[dict[str, Any]]] = {}  # conditions
        self._address = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._started: set[str] = set()
        self._finishing: set[tuple[str, str | None, str | None]] = set()
        self.pods = Cache(api, PODS, lambda value: value, self._changed)

    @property
    def store(self) -> ApiNodes:
        """The pods, for `FakeGateway`."""
        return self

    async def run(self) -> None:
        """Run until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.pods.run())
            group.create_task(self._beat())

    async def _beat(self) -> None:
        """Report that the nodes are alive; otherwise the control plane marks them as lost."""
        while True:
            now = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
            for name, conditions in list(self._nodes.items()):
                reported = [{**condition, "lastHeartbeatTime": now} for condition in conditions]
                with contextlib.suppress(ApiError):
                    status = {"conditions": reported}
                    await self._api.merge(NODES, name, {"status": status}, subresource="status")
            await asyncio.sleep(BEAT_SECONDS)

    async def add(self, name: str, zone: str, node_class: str, *, dedicated: bool = True) -> None:
        """Create a ready node with a separate class."""
        node = node_object(name, zone, node_class=node_class, dedicated=dedicated)
        status = node.pop("status")
        node["apiVersion"], node["kind"] = "v1", "Node"
        await self._api.create(NODES, node)
        await self._api.merge(NODES, name, {"status": status}, subresource="status")
        self._nodes[name] = status["conditions"]

    def find(self, plural: str, name: str, namespace: str) -> dict[str, Any] | None:
        """The pod; other resources are not stored."""
        assert plural == "pods", plural
        return self.pods.get(namespace, name)

    def finish_job(self, namespace: str, job: str, attempt: int) -> None:
        """End all pods of a job's attempt successfully, including those that do not run yet."""
        self._finishing.add((namespace, job, str(attempt)))
        for pod in self.pods.values():
            self._finish_if_asked(pod)

    def _finish_if_asked(self, pod: dict[str, Any]) -> None:
        metadata = pod["metadata"]
        labels = metadata.get("labels") or {}
        attempt = (metadata["namespace"], labels.get(LABEL_JOB), labels.get(LABEL_ATTEMPT))
        running = (pod.get("status") or {}).get("phase") == "Running"
        if attempt in self._finishing and running:
            self.finish(metadata["namespace"], metadata["name"], Exit())

    def finish(self, namespace: str, name: str, end: Exit) -> None:
        """End a pod."""
        state = {"terminated": {"exitCode": end.status, "reason": "Completed"}}
        phase = "Failed" if end.status else "Succeeded"
        statuses = [{"name": "trainer", "state": state, "image": "i", "imageID": "i",
                     "ready": False, "restartCount": 0}]  # fmt: skip
        self._do(self._status(namespace, name, {"phase": phase, "containerStatuses": statuses}))

    def _changed(self, _key: Any, _before: Any, pod: dict[str, Any] | None) -> None:
        if pod is None:
            return
        metadata, spec = pod["metadata"], pod["spec"]
        namespace, name, uid = metadata["namespace"], metadata["name"], metadata["uid"]
        if "deletionTimestamp" in metadata:
            self._do(self._api.delete(PODS, name, namespace, uid=uid, grace_seconds=0))
        elif not spec.get("nodeName"):
            node = wanted_node(pod)
            if node:
                target = {"apiVersion": "v1", "kind": "Node", "name": node}
                binding = {"apiVersion": "v1", "kind": "Binding", "target": target,
                           "metadata": {"name": name}}  # fmt: skip
                self._do(self._api.post(PODS, name, namespace, "binding", binding))
        elif pod["status"]["phase"] == "Pending" and uid not in self._started:
            self._started.add(uid)
            self._address += 1
            address = f"10.0.0.{self._address}"
            status = {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]}
            self._do(self._status(namespace, name, status))
        else:
            self._finish_if_asked(pod)

    async def _status(self, namespace: str, name: str, status: dict[str, Any]) -> None:
        await self._api.merge(PODS, name, {"status": status}, namespace, "status")

    def _do(self, work: Any) -> None:
        async def quietly() -> None:
            with contextlib.suppress(ApiError):
                await work

        task = asyncio.create_task(quietly())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
