"""Nodes of the in-memory cluster, which run bound pods by script in a few milliseconds each.

They write into the store directly, so that the API server counts only calls of the components under
test. They also bind ungated pods, as kube-scheduler does.
"""

from __future__ import annotations

import asyncio
import copy
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Self

from fakekube.errors import ApiRefusal
from fakekube.nodes.exits import KILLED, TERMINATED, Exit

if TYPE_CHECKING:
    from collections.abc import Callable

    from fakekube.apiserver.store import Store
    from fakekube.apiserver.tables import Change, Object
    from fakekube.nodes.containers import Containers

__all__ = ["Kubelets", "node_object", "wanted_node"]

START_SECONDS: Final = 0.002
TERM_SECONDS: Final = 1.0
"""Maximum time between SIGTERM and SIGKILL, even with a longer grace period."""


def node_object(
    name: str,
    zone: str,
    *,
    leaf: str = "",
    node_class: str = "default",
    gpus: int = 8,
    dedicated: bool = True,
    address: str = "",
) -> Object:
    """A ready node with Fire-Flyer's labels. Without an address it cannot be probed."""
    labels = {
        "kubernetes.io/hostname": name,
        "topology.kubernetes.io/zone": zone,
        "fireflyer.dev/zone": zone,
        "fireflyer.dev/node-class": node_class,
    }
    spec: dict[str, Any] = {}
    if leaf:
        labels["fireflyer.dev/leaf"] = leaf
    if dedicated:
        labels["fireflyer.dev/dedicated"] = "true"
        taint = {"key": "fireflyer.dev/dedicated", "value": "true", "effect": "NoSchedule"}
        spec["taints"] = [taint]
    resources = {"cpu": "64", "memory": "512Gi", "pods": "110", "fireflyer.dev/gpu": str(gpus)}
    return {
        "metadata": {"name": name, "labels": labels},
        "spec": spec,
        "status": {
            "capacity": resources,
            "allocatable": resources,
            "conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady"}],
            "addresses": [{"type": "InternalIP", "address": address}] if address else [],
        },
    }


class Kubelets:
    """All nodes.

    `exits(pod)` is called when a pod starts. It returns an Exit that happens after `seconds`, or
    None for a pod that runs until `finish`. With `containers`, pods have processes, which may also
    end by themselves; a pod's status follows them.
    """

    def __init__(
        self,
        store: Store,
        *,
        exits: Callable[[Object], tuple[float, Exit] | None] = lambda _: None,
        start_seconds: float = START_SECONDS,
        term_seconds: float = START_SECONDS,
        containers: Containers | None = None,
    ) -> None:
        self.store = store
        self.containers = containers
        self.exits = exits
        self.start_seconds = start_seconds
        self.term_seconds = term_seconds
        self.end_report_seconds = 0.0  # delay of a container's end in its status
        self.end_report_delay: Callable[[], float] = lambda: self.end_report_seconds
        self.stopped_nodes: set[str] = set()  # their kubelets are dead
        self.stuck_nodes: set[str] = set()  # their pods never end
        self.refuses_start: set[str] = set()  # their pods stay Pending
        self._tasks: set[asyncio.Task[None]] = set()
        self._started: set[str] = set()
        self._ending: set[str] = set()
        self._concluding: dict[str, asyncio.Task[None]] = {}  # main containers that have ended
        self._addresses = 0

    async def __aenter__(self) -> Self:
        self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def open(self) -> None:
        """Start to run bound pods."""
        self.store.table("pods", "").watchers.add(self._changed)
        for pod in self.store.all("pods"):
            self._look(pod)

    async def close(self) -> None:
        """Stop all pods."""
        self.store.table("pods", "").watchers.discard(self._changed)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.containers is not None:
            await self.containers.close()

    # -- calls of tests ------------------------------------------------------------------------

    def add_node(self, name: str, zone: str, **details: Any) -> Object:
        """Add a node."""
        return self.store.create("nodes", node_object(name, zone, **details))

    def finish(self, namespace: str, name: str, end: Exit | None = None) -> None:
        """End the pod's container; the kubelet updates the status later."""
        seconds = self.end_report_delay() if self.containers is None else 0.0
        if seconds:
            self._spawn(self._finish_later(seconds, namespace, name, end))
        else:
            self._finish(namespace, name, end)

    async def _finish_later(
        self, seconds: float, namespace: str, name: str, end: Exit | None
    ) -> None:
        await asyncio.sleep(seconds)
        self._finish(namespace, name, end)

    def _finish(self, namespace: str, name: str, end: Exit | None) -> None:
        pod = self.store.find("pods", name, namespace)
        deaf = self.stopped_nodes | self.stuck_nodes
        if pod is None or pod["spec"].get("nodeName") in deaf:
            return  # the kubelet is stopped
        if pod["status"]["phase"] in ("Pending", "Running"):
            self._end(pod, end or Exit())

    def lose_node(self, name: str) -> None:
        """Lose the node: its kubelet stops and the node becomes NotReady."""
        self.stopped_nodes.add(name)
        self._drop_containers(name)
        self.set_ready(name, ready=False)

    def cut_node(self, name: str) -> None:
        """Cut the node off; its connections stay open. Kubernetes has not noticed yet."""
        self.stopped_nodes.add(name)
        for pod in self.store.all("pods"):
            if self.containers is not None and pod["spec"].get("nodeName") == name:
                self.containers.cut(pod["metadata"]["uid"])

    def answers(self, address: str) -> bool:
        """Whether a live node has this address."""
        return any(
            {"type": "InternalIP", "address": address} in node["status"].get("addresses", ())
            for node in self.store.all("nodes")
            if node["metadata"]["name"] not in self.stopped_nodes
        )

    def _drop_containers(self, name: str) -> None:
        for pod in self.store.all("pods"):
            if self.containers is not None and pod["spec"].get("nodeName") == name:
                self.containers.drop(pod["metadata"]["uid"])

    def return_node(self, name: str) -> None:
        """Reboot the node: nothing runs on it, and its kubelet reports that."""
        self.stopped_nodes.discard(name)
        self._drop_containers(name)
        for pod in self.store.all("pods"):
            if pod["spec"].get("nodeName") != name:
                continue
            if "deletionTimestamp" in pod["metadata"]:
                self._remove(pod)
            elif pod["status"]["phase"] not in ("Succeeded", "Failed"):
                self._end(pod, replace(KILLED, reason="Error", message="the node was restarted"))
        self.set_ready(name, ready=True)

    def set_ready(self, name: str, *, ready: bool) -> None:
        """Write the node's Ready condition and the taint that the node controller adds."""
        node = copy.deepcopy(self.store.get("nodes", name))
        condition = {
            "type": "Ready",
            "status": "True" if ready else "Unknown",
            "reason": "KubeletReady" if ready else "NodeStatusUnknown",
        }
        node["status"]["conditions"] = [condition]
        self.store.replace("nodes", name, node, subresource="status")
        taints = [
            taint
            for taint in node["spec"].get("taints", [])
            if taint["key"] != "node.kubernetes.io/unreachable"
        ]
        if not ready:
            taints.append({"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"})
        self.store.patch("nodes", name, {"spec": {"taints": taints}})

    # -- inside --------------------------------------------------------------------------------

    def _changed(self, change: Change) -> None:
        pod = change.after.object
        if change.deleted:
            self._started.discard(pod["metadata"]["uid"])
            if self.containers is not None:
                self.containers.drop(pod["metadata"]["uid"])
            return
        self._look(pod)

    def _look(self, pod: Object) -> None:
        uid, spec = pod["metadata"]["uid"], pod["spec"]
        if not spec.get("nodeName"):
            node = wanted_node(pod)
            if node and spec["schedulerName"] == "default-scheduler":
                self._spawn(self._schedule(pod, node))
            return
        if "deletionTimestamp" in pod["metadata"]:
            if uid not in self._ending:
                self._ending.add(uid)
                self._spawn(self._terminate(pod))
        elif uid not in self._started and pod["status"]["phase"] == "Pending":
            self._started.add(uid)
            self._spawn(self._run(pod))

    async def _schedule(self, pod: Object, node: str) -> None:
        await asyncio.sleep(0)
        try:
            self.store.bind(
                pod["metadata"]["namespace"],
                pod["metadata"]["name"],
                {"target": {"name": node}, "metadata": {"uid": pod["metadata"]["uid"]}},
            )
        except ApiRefusal:
            return  # deleted or already bound

    async def _run(self, pod: Object) -> None:
        await asyncio.sleep(self.start_seconds)
        node = pod["spec"]["nodeName"]
        current = self._current(pod)
        silent = node in self.stopped_nodes | self.refuses_start
        if current is None or silent or "deletionTimestamp" in current["metadata"]:
            return
        self._addresses += 1
        # On the loopback, so that connections of the pod's containers can have it as their source.
        address = f"127.1.{self._addresses // 250 % 250}.{self._addresses % 250 + 1}"
        if self.containers is not None:
            self.containers.start(current, address, lambda end: self._exited(pod, end))
        self._write(current, {
            "phase": "Running",
            "podIP": address,
            "conditions": [{"type": "PodScheduled", "status": "True"},
                           {"type": "Ready", "status": "True"}],
            "containerStatuses": [{
                "name": current["spec"]["containers"][0]["name"], "ready": True,
                "state": {"running": {"startedAt": self._timestamp()}},
            }],
        })  # fmt: skip
        plan = self.exits(current)
        if plan is not None:
            await asyncio.sleep(plan[0])
            current = self._current(pod)
            if current is not None and node not in self.stopped_nodes:
                self._end(current, plan[1])

    async def _terminate(self, pod: Object) -> None:
        grace = pod["metadata"].get("deletionGracePeriodSeconds", 30)
        await asyncio.sleep(min(self.term_seconds, grace))
        node = pod["spec"]["nodeName"]
        self._ending.discard(pod["metadata"]["uid"])
        if self._current(pod) is None or node in self.stopped_nodes | self.stuck_nodes:
            return
        await self._terminate_containers(pod, min(grace, TERM_SECONDS))
        current = self._current(pod)
        if current is not None and current["status"]["phase"] == "Running":
            self._write_end(current, TERMINATED)
        self._remove(pod)

    async def _terminate_containers(self, pod: Object, seconds: float) -> None:
        if self.containers is None:
            return
        uid = pod["metadata"]["uid"]
        await self.containers.terminate(uid, seconds)
        if (concluding := self._concluding.get(uid)) is not None:
            await asyncio.wait([concluding])

    def _exited(self, pod: Object, end: Exit) -> None:
        """The pod's main container has ended."""
        uid = pod["metadata"]["uid"]
        task = self._concluding[uid] = self._spawn(self._conclude(pod, end))
        task.add_done_callback(lambda _: self._concluding.pop(uid, None))

    async def _conclude(self, pod: Object, end: Exit) -> None:
        """Stop the sidecar after the main container; then the pod has ended."""
        assert self.containers is not None, "one of its containers has ended"
        await asyncio.sleep(self.end_report_delay())
        if pod["spec"]["nodeName"] in self.stopped_nodes | self.stuck_nodes:
            return
        await self.containers.stop(pod["metadata"]["uid"])
        if (current := self._current(pod)) is not None:
            self._write_end(current, end)

    def _remove(self, pod: Object) -> None:
        if self._current(pod) is not None:
            name, namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
            self.store.delete("pods", name, namespace, {"gracePeriodSeconds": 0})

    def _end(self, pod: Object, end: Exit) -> None:
        if self.containers is None or not self.containers.exit(pod["metadata"]["uid"], end):
            self._write_end(pod, end)

    def _write_end(self, pod: Object, end: Exit) -> None:
        if pod["status"]["phase"] in ("Succeeded", "Failed"):
            return
        terminated: dict[str, Any] = {
            "exitCode": end.status,
            "reason": end.reason or ("Completed" if not end.status else "Error"),
            "finishedAt": self._timestamp(),
        }
        if end.signal:
            terminated["signal"] = end.signal
        if end.message:
            terminated["message"] = end.message
        name = pod["spec"]["containers"][0]["name"]
        self._write(pod, {
            **pod["status"],
            "phase": "Failed" if end.status or end.signal else "Succeeded",
            "containerStatuses": [
                {"name": name, "ready": False, "state": {"terminated": terminated}}
            ],
        })  # fmt: skip

    def _write(self, pod: Object, status: dict[str, Any]) -> None:
        name, namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
        current = self._current(pod)
        if current is not None:
            value = {**current, "status": status}
            self.store.replace("pods", name, value, namespace, "status")

    def _current(self, pod: Object) -> Object | None:
        metadata = pod["metadata"]
        current = self.store.find("pods", metadata["name"], metadata["namespace"])
        return current if current and current["metadata"]["uid"] == metadata["uid"] else None

    def _timestamp(self) -> str:
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.store.clock()))

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def wanted_node(pod: Object) -> str:
    """The node that an ungated pod's affinity names."""
    if pod["spec"].get("schedulingGates"):
        return ""
    affinity = pod["spec"].get("affinity", {}).get("nodeAffinity", {})
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution", {})
    for term in required.get("nodeSelectorTerms", []):
        for match_field in term.get("matchFields", []):
            if match_field["key"] == "metadata.name" and match_field["operator"] == "In":
                return str(match_field["values"][0])
    return ""
