"""Measurements of a full cluster: idle cost, preemption, node loss and leader failover."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from flyer.kube.apiserver.resources import FLYERJOBS, NODES, PODS

from bench.sched.audit import OPERATOR, Write, by_kind
from bench.sched.figures import Figure
from bench.sched.loads import NAMESPACE, flyer_job
from bench.sched.starts import collect, is_binding
from bench.sched.testbed import TAKEOVER_SECONDS, TestbedError

if TYPE_CHECKING:
    from bench.sched.node_simulator import NodeSimulator
    from bench.sched.starts import Sizes
    from bench.sched.testbed import Testbed

__all__ = ["Shares"]

IDLE_SECONDS = 30.0
SETTLE_SECONDS = 2.0
DETECTION = "40 s until Kubernetes says so, by its defaults (node-monitor-grace-period)"


class Shares:
    """One testbed's rounds."""

    def __init__(self, testbed: Testbed, simulator: NodeSimulator, sizes: Sizes) -> None:
        self.testbed, self.simulator, self.sizes = testbed, simulator, sizes
        nodes = sizes.gangs * sizes.gang_of
        self.idle = Figure("idle writes", "a minute", 0, note="the Lease is counted separately")
        self.lease = Figure("renewals of the Lease", "a minute")
        self.signals = Figure(f"{nodes} nodes reclaimed: all signals", "s", 2.0)
        self.excess = Figure(f"{nodes} nodes reclaimed: too many", "nodes", 0)
        self.restart = Figure(f"{nodes} nodes reclaimed: all bound again", "s")
        self.part_excess = Figure("half of them reclaimed: too many", "nodes", 0)
        self.suspend_writes = Figure("writes of a suspend", "writes", 3)
        self.node = Figure("node's loss known to gang bound", "s", 10.0, note=DETECTION)
        self.leader = Figure("leader killed to successor serving", "s", TAKEOVER_SECONDS)
        self.lost = Figure("leader killed: decisions lost or redone", "jobs", 0)
        self.figures = [
            self.idle, self.lease, self.signals, self.excess, self.part_excess, self.restart,
            self.suspend_writes, self.node, self.leader, self.lost,
        ]  # fmt: skip
        self.details: dict[str, Any] = {}

    # -- preempted gangs -----------------------------------------------------------------------

    async def reclaim_round(self) -> None:
        """Low-priority gangs everywhere; then a large job of a high priority."""
        await self._fill()
        await self._idle()
        await self._half()
        await self.testbed.empty()
        await self._fill()
        free = self.sizes.nodes - self.sizes.gangs * self.sizes.gang_of
        victims = await self._reclaim("large", self.sizes.nodes)
        self.excess.values.append(victims - (self.sizes.nodes - free))
        await self.testbed.empty()

    async def _half(self) -> None:
        of, free = self.sizes.gang_of, self.sizes.nodes - self.sizes.gangs * self.sizes.gang_of
        gangs = self.sizes.gangs // 2
        await self.simulator.send("ignore")
        self.simulator.suspended.clear()
        job = flyer_job("half", free + gangs * of, priority="high")
        await self.testbed.create_all(FLYERJOBS, [job])
        await self.testbed.until(
            "half are signalled", lambda: len(self.simulator.suspended) >= gangs * of
        )
        await asyncio.sleep(SETTLE_SECONDS)
        self.part_excess.values.append(len(self.simulator.suspended) - gangs * of)

    async def _fill(self) -> None:
        await self.simulator.send("hold", "cooperate", "go")
        count, of = self.sizes.gangs, self.sizes.gang_of
        jobs = [flyer_job(f"low-{number}", of, priority="low") for number in range(count)]
        await self.testbed.create_all(FLYERJOBS, jobs)
        await self.simulator.until_running(count * of)
        await asyncio.sleep(SETTLE_SECONDS)

    async def _idle(self) -> None:
        self.testbed.audit.skip()
        await asyncio.sleep(IDLE_SECONDS)
        own = [write for write in self.testbed.audit.read() if write.client == OPERATOR]
        leases = [write for write in own if write.kind == "leases"]
        self.idle.values.append((len(own) - len(leases)) * 60 / IDLE_SECONDS)
        self.lease.values.append(len(leases) * 60 / IDLE_SECONDS)
        self.details["idle, but for the Lease"] = by_kind(
            write for write in own if write.kind != "leases"
        )

    async def _reclaim(self, name: str, nodes: int) -> int:
        """Nodes that were taken from other jobs."""
        self.simulator.suspended.clear()
        self.testbed.audit.skip()
        await self.testbed.create_all(FLYERJOBS, [flyer_job(name, nodes, priority="high")])
        writes = await collect(self.testbed, nodes)
        started_at = min(
            write.received_at
            for write in writes
            if (write.client, write.kind) == ("bench", "flyerjobs")
        )
        signals = [at - started_at for at in self.simulator.suspended.values()]
        if not signals:
            raise TestbedError("no sidecar was asked to suspend")
        self.signals.values.append(max(signals))
        bound_at = max(write.done_at for write in writes if is_binding(write))
        self.restart.values.append(bound_at - started_at)
        await asyncio.sleep(SETTLE_SECONDS)
        writes += self.testbed.audit.read()
        own = [write for write in writes if write.client == OPERATOR and write.stored]
        victims = [write for write in own if write.name.startswith("low-") and _of_job(write)]
        self.suspend_writes.values.append(len(victims) / self.sizes.gangs)
        self.details["reclaim"] = by_kind(own)
        self.details["reclaim: writes for victims"] = by_kind(victims)
        return len(signals)

    # -- a node that dies ----------------------------------------------------------------------

    async def node_round(self) -> None:
        """One node of a running gang becomes NotReady, as the node controller writes it."""
        of = min(64, self.sizes.gang)
        await self.simulator.send("hold", "ignore", "go")
        await self.testbed.create_all(FLYERJOBS, [flyer_job("gang", of)])
        await self.simulator.until_running(of)
        await asyncio.sleep(SETTLE_SECONDS)
        job = await self.testbed.api.get(FLYERJOBS, "gang", NAMESPACE)
        victim = job["status"]["assignment"]["nodes"][of // 2]["name"]
        await self.simulator.send(f"lose {victim}")
        # kwok must release the node, or it would report it Ready again immediately.
        annotations = {"kwok.x-k8s.io/node": None}
        await self.testbed.api.merge(NODES, victim, {"metadata": {"annotations": annotations}})
        await asyncio.sleep(1.0)
        self.testbed.audit.skip()
        ready = {"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown"}
        status = {"status": {"conditions": [ready]}}
        await self.testbed.api.merge(NODES, victim, status, subresource="status")
        writes = await collect(self.testbed, of)
        started_at = min(
            write.received_at
            for write in writes
            if (write.client, write.kind) == ("bench", "nodes/status")
        )
        bound_at = max(write.done_at for write in writes if is_binding(write))
        self.node.values.append(bound_at - started_at)
        self.details["node lost"] = by_kind(write for write in writes if write.client == OPERATOR)
        await self.simulator.send("hold")
        back = {"metadata": {"annotations": {"kwok.x-k8s.io/node": "fake"}}}
        await self.testbed.api.merge(NODES, victim, back)
        await self.testbed.empty()
        await self.testbed.all_ready()

    # -- a leader that dies --------------------------------------------------------------------

    async def leader_round(self) -> None:
        """SIGKILL the leader while jobs arrive; a second process is on standby."""
        await self._fill()
        of = self.sizes.gang_of
        free = self.sizes.nodes - self.sizes.gangs * of
        late = [flyer_job(f"late-{number}", of, priority="low") for number in range(free // of)]

        async def arrive() -> None:
            await self.testbed.create_all(FLYERJOBS, late)
            await asyncio.sleep(0.1)  # in the middle of their start

        self.leader.values.append(await self.testbed.succeed(self.testbed.operators[-1], arrive))
        await self.simulator.until_running((self.sizes.gangs + len(late)) * of)
        await asyncio.sleep(SETTLE_SECONDS)
        jobs = await self.testbed.api.list(FLYERJOBS, NAMESPACE)
        pods = await self.testbed.api.list(PODS, NAMESPACE)
        redone = [
            job["metadata"]["name"]
            for job in jobs
            if job["status"]["phase"] != "Running" or job["status"]["history"]["attempt"] != 1
        ]
        node_names = [pod["spec"]["nodeName"] for pod in pods]
        self.lost.values.append(len(redone) + len(node_names) - len(set(node_names)))
        self.details["leader killed: jobs that were not kept"] = redone
        await self.simulator.send("hold")
        await self.testbed.empty()


def _of_job(write: Write) -> bool:
    return write.kind.partition("/")[0] in ("flyerjobs", "events") or write.verb == "delete"
