"""Starts of gangs and small jobs, alternating between the operator and kube-scheduler."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flyer.kube.apiserver.resources import FLYERJOBS, PODS

from bench.sched.audit import OPERATOR, PEER, Write, by_kind
from bench.sched.figures import Figure
from bench.sched.loads import NAMESPACE, flyer_job, peer_gang, peer_pod
from bench.sched.testbed import PODGROUPS, TestbedError
from testcluster import kwok

if TYPE_CHECKING:
    from bench.sched.node_simulator import NodeSimulator
    from bench.sched.testbed import Testbed

__all__ = ["Sizes", "Starts", "collect", "is_binding", "since"]

SETTLE_SECONDS = 1.5
"""Time after the last binding in which later events and statuses are counted, too."""


LOOK_SECONDS = 20.0
"""Interval of reading the pods while answered bindings are missing."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the loads, in nodes."""

    nodes: int = 520
    nodes_per_leaf: int = 20
    gang: int = 512
    gangs: int = 50
    gang_of: int = 10
    small: int = 500


def is_binding(write: Write) -> bool:
    """Whether a pod was bound."""
    return write.kind == "pods/binding" and write.code == 201 and write.namespace == NAMESPACE


async def collect(
    testbed: Testbed, count: int, seconds: float = 90.0, writes: list[Write] | None = None
) -> list[Write]:
    """Collect writes until this number of pods is bound."""
    bindings = [] if writes is None else writes
    ends_at = time.monotonic() + seconds
    looks_at = time.monotonic() + LOOK_SECONDS
    while sum(map(is_binding, bindings)) < count:
        if time.monotonic() > looks_at:
            # An overloaded server may answer 504 to a binding that succeeded, so read the pods.
            bound_count = sum(
                "nodeName" in pod["spec"] for pod in await testbed.api.list(PODS, NAMESPACE)
            )
            if bound_count >= count:
                break
            looks_at = time.monotonic() + LOOK_SECONDS
        if time.monotonic() > ends_at:
            bound_count = sum(map(is_binding, bindings))
            raise TestbedError(
                f"{bound_count} of {count} pods are bound after {seconds:g} s; "
                f"logs are in {testbed.logs}"
            )
        await asyncio.sleep(0.05)
        bindings += testbed.audit.read()
    return bindings


def since(writes: list[Write], started_at: float) -> float:
    """Seconds from `started_at` to the last binding."""
    return max(write.done_at for write in writes if is_binding(write)) - started_at


class Starts:
    """Rounds of starts on one testbed."""

    def __init__(self, testbed: Testbed, simulator: NodeSimulator, sizes: Sizes) -> None:
        self.testbed, self.simulator, self.sizes = testbed, simulator, sizes
        n, of = sizes.gang, sizes.gang_of
        self.gang = Figure(f"gang of {n}: created to bound", "s", 1.0, of_peer=True)
        self.gang_writes = Figure(f"gang of {n}: writes", "writes", 0.5, of_peer=True)
        self.start_writes = Figure(f"start of {n} nodes: writes beyond 2n", "writes", 4)
        self.gangs = Figure(f"{sizes.gangs} gangs of {of}, one leaf each", "s", 1.0, of_peer=True)
        self.gangs_writes = Figure(
            f"{sizes.gangs} gangs of {of}: writes", "writes", 0.5, of_peer=True
        )
        self.crossings = Figure(f"{sizes.gangs} gangs: zone crossings", "gangs", 0)
        self.leaves = Figure(f"{sizes.gangs} gangs: most leaves of one", "leaves", 1)
        self.admitted = Figure("single-node jobs admitted", "jobs/s", 100, more=True)
        self.small = Figure("single-node jobs bound", "jobs/s", more=True)
        self.figures = [
            self.gang, self.gang_writes, self.start_writes, self.gangs, self.gangs_writes,
            self.crossings, self.leaves, self.admitted, self.small,
        ]  # fmt: skip
        self.details: dict[str, Any] = {}

    # -- one gang ------------------------------------------------------------------------------

    async def gang_round(self) -> None:
        """One gang over nearly all nodes: ours, then the peer's."""
        n = self.sizes.gang
        await self.simulator.send("hold")
        writes, started_at = await self._own_gangs("gang", [flyer_job("gang", n)], n)
        self.gang.values.append(since(writes, started_at))
        # A pod's containers take seconds to start before its sidecar connects to the gateway.
        await self.simulator.send("ignore", "go")
        await self.simulator.until_running(n)
        await asyncio.sleep(SETTLE_SECONDS)
        writes += self.testbed.audit.read()
        own = [write for write in writes if write.client == OPERATOR and self._counts(write)]
        self.start_writes.values.append(len(own) - 2 * n)
        self.gang_writes.values.append(len(own) + 1)  # and the user's write
        self.details["gang, ours"] = by_kind(own)
        self.details["gang, ours: reviews"] = by_kind(
            write for write in writes if write.client == OPERATOR and not write.stored
        )
        await self.simulator.send("hold")
        await self.testbed.empty()
        peer_result = await self._peers([peer_gang("gang", n, one_leaf=False)], n)
        self.gang.peer.append(peer_result[0])
        self.gang_writes.peer.append(len(peer_result[1]))
        self.details["gang, kube-scheduler"] = by_kind(peer_result[1])
        await self.testbed.empty()

    # -- many gangs ----------------------------------------------------------------------------

    async def gangs_round(self) -> None:
        """Gangs that fit into one leaf each; as many as there are leaves to fill."""
        count, of = self.sizes.gangs, self.sizes.gang_of
        await self.simulator.send("hold")
        jobs = [flyer_job(f"gang-{number}", of) for number in range(count)]
        writes, started_at = await self._own_gangs("gangs", jobs, count * of)
        self.gangs.values.append(since(writes, started_at))
        await self.simulator.send("ignore", "go")
        await self.simulator.until_running(count * of)
        await asyncio.sleep(SETTLE_SECONDS)
        writes += self.testbed.audit.read()
        own = [write for write in writes if write.client == OPERATOR and self._counts(write)]
        self.gangs_writes.values.append(len(own) + count)
        self.details["gangs, ours"] = by_kind(own)
        zones, leaves = await self._spread()
        self.crossings.values.append(sum(zone_count > 1 for zone_count in zones))
        self.leaves.values.append(max(leaves))
        await self.simulator.send("hold")
        await self.testbed.empty()
        gangs = [peer_gang(f"gang-{number}", of, one_leaf=True) for number in range(count)]
        seconds, peer_writes = await self._peers(gangs, count * of)
        self.gangs.peer.append(seconds)
        self.gangs_writes.peer.append(len(peer_writes))
        self.details["gangs, kube-scheduler"] = by_kind(peer_writes)
        await self.testbed.empty()

    async def _spread(self) -> tuple[list[int], list[int]]:
        """Zones and leaves of each job."""
        place = {}
        for index in range(self.sizes.nodes):
            node = kwok.spec(index, self.sizes.nodes, self.sizes.nodes_per_leaf)
            place[node.name] = (node.zone, node.leaf)
        zones, leaves = [], []
        for job in await self.testbed.api.list(FLYERJOBS, NAMESPACE):
            names = [item["name"] for item in job["status"]["assignment"]["nodes"]]
            zones.append(len({place[name][0] for name in names}))
            leaves.append(len({place[name][1] for name in names}))
        return zones, leaves

    # -- small jobs ----------------------------------------------------------------------------

    async def small_round(self) -> None:
        """Single-node jobs, all created together."""
        count = self.sizes.small
        await self.simulator.send("hold")
        jobs = [flyer_job(f"small-{number}", 1) for number in range(count)]
        writes, started_at = await self._own_gangs("small jobs", jobs, count)
        self.admitted.values.append(count / (_admitted_at(writes) - started_at))
        self.small.values.append(count / since(writes, started_at))
        own = [write for write in writes if write.client == OPERATOR and self._counts(write)]
        self.details["small jobs, ours, until bound"] = by_kind(own)
        await self.testbed.empty()
        await self.testbed.start_peer_once()
        self.testbed.audit.skip()
        await self.testbed.create_all(
            PODS, [peer_pod(f"small-{number}") for number in range(count)]
        )
        writes = await collect(self.testbed, count)
        started_at = min(write.received_at for write in writes if _creates(write, "pods"))
        self.small.peer.append(count / since(writes, started_at))
        await self.testbed.end_peer()
        await self.testbed.empty()

    # -- both ----------------------------------------------------------------------------------

    async def _own_gangs(
        self, name: str, jobs: list[dict[str, Any]], pods: int
    ) -> tuple[list[Write], float]:
        self.testbed.audit.skip()
        async with self.testbed.costs.of(f"{name}, ours: costs", self.details):
            await self.testbed.create_all(FLYERJOBS, jobs)
            writes = await collect(self.testbed, pods)
        return writes, min(write.received_at for write in writes if _creates(write, "flyerjobs"))

    async def _peers(
        self, gangs: list[tuple[dict[str, Any], list[dict[str, Any]]]], pods: int
    ) -> tuple[float, list[Write]]:
        await self.testbed.start_peer_once()
        self.testbed.audit.skip()
        await self.testbed.create_all(PODGROUPS, [group for group, _ in gangs])
        await self.testbed.create_all(PODS, [pod for _, members in gangs for pod in members])
        writes = await collect(self.testbed, pods)
        started_at = min(write.received_at for write in writes if _creates(write, "podgroups"))
        seconds = since(writes, started_at)
        await asyncio.sleep(SETTLE_SECONDS)
        writes += self.testbed.audit.read()
        await self.testbed.end_peer()
        counted = [
            write for write in writes if write.client in (PEER, "bench") and self._counts(write)
        ]
        return seconds, counted

    def _counts(self, write: Write) -> bool:
        """Whether the write was stored and belongs to the load, not to the Lease or the cleanup."""
        return write.stored and write.kind != "leases" and "delete" not in write.verb


def _admitted_at(writes: list[Write]) -> float:
    """Time of the last job's assignment: a job's first status write assigns its nodes."""
    first: dict[str, float] = {}
    for write in writes:
        if write.client == OPERATOR and write.kind == "flyerjobs/status" and write.stored:
            first[write.name] = min(write.done_at, first.get(write.name, write.done_at))
    return max(first.values())


def _creates(write: Write, kind: str) -> bool:
    return write.client == "bench" and write.verb == "create" and write.kind == kind
