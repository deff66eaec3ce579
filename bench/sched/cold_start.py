"""Cold start: a new leader starts on a cluster with a long history.

10,000 jobs, 2,000 nodes and 20,000 pods would take minutes to create, so they are written into etcd
as the API server stores them, and read back through it. The jobs' statuses are the engine's own:
it is run here until the nodes are full, so that the operator finds nothing to correct.

With a reference, the operator of another source tree starts on the same history, in turns.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import json
import statistics
import time
import urllib.request
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from flyer import engine
from flyer.api import FlyerJob
from flyer.kube.apiserver.resources import FLYERJOBS, NODES, PODS
from flyer.kube.cache.node_view import shape_node
from flyer.kube.pods.names import LABEL_JOB

from bench.sched.audit import OPERATOR
from bench.sched.figures import Figure
from bench.sched.loads import NAMESPACE, flyer_job, peer_pod
from bench.sched.starts import collect, is_binding
from bench.sched.testbed import TAKEOVER_SECONDS, TestbedError
from testcluster import kwok

if TYPE_CHECKING:
    from pathlib import Path

    from bench.sched.audit import Write
    from bench.sched.testbed import Testbed

__all__ = ["ColdStart", "History"]

# etcd accepts 128 operations per transaction.
_BATCH: Final = 120
_CREATED: Final = "2026-01-01T00:00:00Z"
MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class History:
    """The cluster's contents before the operator starts."""

    nodes: int = 2_000
    gang_of: int = 10
    queued: int = 8_400
    ended: int = 1_400
    attempts: int = 3
    """Number of running gangs, whose pods exist."""

    @property
    def running(self) -> int:
        """Gangs with nodes; the nodes of two gangs remain free."""
        return self.nodes // self.gang_of - 2

    @property
    def jobs(self) -> int:
        """In all."""
        return self.running + self.queued + self.ended

    @property
    def pods(self) -> int:
        """In all."""
        return self.gang_of * (self.running * self.attempts + self.ended)


class ColdStart:
    """Measurement on a testbed without other nodes.

    `reference`: the source tree of another operator, which is the figures' peer.
    """

    def __init__(self, testbed: Testbed, history: History, reference: Path | None = None) -> None:
        self.testbed, self.history, self.reference = testbed, history, reference
        label = f"{history.jobs:,} jobs, {history.nodes:,} nodes"
        killed = f"leader killed, {history.jobs:,} jobs: serving"
        self.serving = Figure(f"cold, {label}: serving", "s", 6.0)
        self.memory = Figure(f"cold, {label}: peak memory", "MiB", 320.0)
        self.first = Figure(f"cold, {label}: a gang bound", "s")
        self.decided = Figure(f"cold, {label}: a job's nodes stored", "s")
        self.leader = Figure(killed, "s", TAKEOVER_SECONDS)
        self.figures = [self.serving, self.memory, self.first, self.decided, self.leader]
        self.details: dict[str, Any] = {}

    async def load(self) -> None:
        """Write the history."""
        objects = await asyncio.to_thread(_objects, self.history)
        await asyncio.to_thread(self._store, objects)
        expected = {
            NODES: self.history.nodes,
            PODS: self.history.pods,
            FLYERJOBS: self.history.jobs,
        }
        for kind, count in expected.items():
            count_stored = 0
            async for page in self.testbed.api.pages(kind):
                count_stored += len(page.items)
            if count_stored != count:
                raise TestbedError(f"{count_stored} {kind.plural} of {count} are there")

    async def round(self) -> None:
        """Start an operator, then jobs that have room; the same with the reference.

        The order changes with each round: the first start meets an API server with cold caches.
        """
        sources = [None] if self.reference is None else [None, self.reference]
        if len(self.serving.values) % 2:
            sources.reverse()
        for source in sources:
            values = await self._start(source)
            for figure, value in zip(self.figures, values, strict=True):
                (figure.values if source is None else figure.peer).append(value)

    async def _start(self, source: Path | None) -> list[float]:
        """The values of all figures, of the operator of one source tree."""
        operator = self.testbed.start_operator(source=source)
        started_at = time.monotonic()
        while not await asyncio.to_thread(operator.leads):
            if time.monotonic() > started_at + 120:
                raise TestbedError(f"not serving within 120 s; logs are in {self.testbed.logs}")
            await asyncio.sleep(0.05)
        serving = time.monotonic() - started_at
        self.testbed.audit.skip()
        jobs = [flyer_job("first", self.history.gang_of, priority="high")]
        writes = await self._submit(jobs[0])
        created_at = min(write.received_at for write in writes if write.client == "bench")
        bound_after = max(write.done_at for write in writes if is_binding(write)) - created_at
        memory = operator.peak_bytes() / MIB
        decided = []
        for number in range(self.history.gang_of):
            jobs.append(flyer_job(f"next-{number}", 1, priority="high"))
            writes += (added := await self._submit(jobs[-1]))
            decided.append(_decided_seconds(added))
        name = "cold start" if source is None else "cold start, reference"
        self.details[f"{name}: a job's nodes stored"] = [round(value, 3) for value in decided]
        self.details[f"{name}: writes"] = sum(
            write.client == OPERATOR and write.stored and write.kind != "leases" for write in writes
        )
        self.details[f"{name}: CPU seconds"] = operator.cpu_seconds()
        leader = await self.testbed.succeed(operator, source=source)
        self.testbed.operators[-1].end()
        await self._remove([job["metadata"]["name"] for job in jobs])
        return [serving, memory, bound_after, statistics.median(decided), leader]

    async def _submit(self, job: dict[str, Any]) -> list[Write]:
        """Create a job; the writes until its pods are bound."""
        await self.testbed.create_all(FLYERJOBS, [job])
        return await collect(self.testbed, job["spec"]["nodes"])

    async def _remove(self, names: list[str]) -> None:
        """Remove these jobs and their pods, without an operator."""
        for name in names:
            await self.testbed.api.delete(FLYERJOBS, name, NAMESPACE)
        selector = f"{LABEL_JOB} in ({','.join(names)})"

        async def none_remain() -> bool:
            await self.testbed.api.delete_all(
                PODS, NAMESPACE, labelSelector=selector, gracePeriodSeconds="0"
            )
            return not await self.testbed.api.list(PODS, NAMESPACE, labelSelector=selector)

        await self.testbed.until("the jobs' pods are gone", none_remain)

    def _store(self, objects: list[tuple[str, dict[str, Any]]]) -> None:
        url = f"http://127.0.0.1:{self.testbed.state.ports['etcd']}/v3/kv/txn"
        for first in range(0, len(objects), _BATCH):
            puts = [
                {"requestPut": {"key": _coded(key), "value": _coded(json.dumps(value))}}
                for key, value in objects[first : first + _BATCH]
            ]
            request = urllib.request.Request(url, json.dumps({"success": puts}).encode())
            with urllib.request.urlopen(request, timeout=60) as response:
                response.read()


def _decided_seconds(writes: list[Write]) -> float:
    """From the arrival of a job to the answer of the first write of its status."""
    created_at = min(write.received_at for write in writes if write.client == "bench")
    name = next(write.name for write in writes if write.client == "bench")
    return -created_at + min(
        write.done_at
        for write in writes
        if write.client == OPERATOR and write.kind == "flyerjobs/status" and write.name == name
    )


def _coded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _objects(history: History) -> list[tuple[str, dict[str, Any]]]:
    """Keys of etcd with their values."""
    pods: list[tuple[str, dict[str, Any]]] = []
    nodes = [_node(index, history) for index in range(history.nodes)]
    jobs = [_job(f"running-{n}", history, "normal") for n in range(history.running)]
    # The remaining nodes are too few for these.
    jobs += [_job(f"queued-{n}", history, "low", 3) for n in range(history.queued)]
    statuses = _settled(nodes, jobs)
    example = statuses["running-0"]
    for job in jobs:
        name = job["metadata"]["name"]
        job["status"] = statuses[name]
        if name.startswith("running"):
            pods += _pods(job, history)
    for number in range(history.ended):
        job = _job(f"ended-{number}", history, "normal")
        job["status"] = {
            **{key: example[key] for key in ("epoch", "assignment", "history")},
            "phase": "Succeeded", "reason": "Complete", "message": "all ranks exited",
        }  # fmt: skip
        jobs.append(job)
        pods += _pods(job, history)
    path = f"/registry/fireflyer.dev/flyerjobs/{NAMESPACE}"
    result = [(f"/registry/minions/{node['metadata']['name']}", node) for node in nodes]
    result += [(f"{path}/{item['metadata']['name']}", item) for item in jobs]
    return (
        result + pods
    )  # after their jobs: otherwise the garbage collector deletes them as orphans


def _metadata(name: str, namespace: str = "") -> dict[str, Any]:
    metadata = {"name": name, "uid": str(uuid.uuid4()), "creationTimestamp": _CREATED}
    return {**metadata, "namespace": namespace} if namespace else metadata


def _node(index: int, history: History) -> dict[str, Any]:
    node = kwok.manifest(kwok.spec(index, history.nodes, 20))
    node["metadata"] |= _metadata(node["metadata"]["name"])
    del node["metadata"]["annotations"]
    ready = {
        "type": "Ready", "status": "True", "reason": "KubeletReady",
        "lastHeartbeatTime": _CREATED, "lastTransitionTime": _CREATED,
    }  # fmt: skip
    node["status"] = {**node["status"], "conditions": [ready]}
    return node


def _job(name: str, history: History, priority: str, times: int = 1) -> dict[str, Any]:
    job = flyer_job(name, history.gang_of * times, priority=priority)
    job["metadata"] |= {**_metadata(name, NAMESPACE), "generation": 1}
    return job


def _settled(nodes: list[dict[str, Any]], jobs: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Statuses as the engine leaves them when all gangs that fit run."""
    node_objects = [shape_node(node).node for node in nodes]
    now = time.time()
    state = engine.rebuild(node_objects, [FlyerJob.model_validate(job) for job in jobs], now, 1)
    state, _ = engine.step(state, [engine.Tick()], now)
    started = [
        engine.GangStarted(job.key, job.status.history.attempt)
        for job in state.jobs.values()
        if job.status.phase == "Starting"
    ]
    state, _ = engine.step(state, started, now)
    state, _ = engine.step(state, [engine.Tick()], now)
    return {
        key.partition("/")[2]: job_state.status.to_object() for key, job_state in state.jobs.items()
    }


def _pods(job: dict[str, Any], history: History) -> list[tuple[str, dict[str, Any]]]:
    """Pods of all attempts; pods of the latest one run if the job runs."""
    runs = job["status"]["phase"] == "Running"
    attempts = range(history.attempts if runs else 1)
    result = []
    for attempt in attempts:
        lives = runs and attempt == 0
        for rank, node in enumerate(job["status"]["assignment"]["nodes"]):
            name = f"{job['metadata']['name']}-{1 if lives else 10 + attempt}-{rank}"
            pod = copy.deepcopy(peer_pod(name))
            pod["metadata"] = _pod_metadata(job, name, 1 if lives else 0, rank)
            pod["spec"] |= {"nodeName": node["name"], "schedulerName": "flyer"}
            pod["status"] = {"phase": "Running" if lives else "Succeeded", "podIP": "10.0.0.1"}
            result.append((f"/registry/pods/{NAMESPACE}/{name}", pod))
    return result


def _pod_metadata(job: dict[str, Any], name: str, attempt: int, rank: int) -> dict[str, Any]:
    owner = {
        "apiVersion": job["apiVersion"], "kind": job["kind"], "name": job["metadata"]["name"],
        "uid": job["metadata"]["uid"], "controller": True, "blockOwnerDeletion": True,
    }  # fmt: skip
    labels = {
        "fireflyer.dev/job": job["metadata"]["name"],
        "fireflyer.dev/attempt": str(attempt),
        "fireflyer.dev/node-rank": str(rank),
    }
    return {**_metadata(name, NAMESPACE), "labels": labels, "ownerReferences": [owner]}
