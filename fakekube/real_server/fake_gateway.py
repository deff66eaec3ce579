"""Gateway without sidecars, for a real API server without kubelets, whose pods have no processes.

Tests in memory use the product's gateway and sidecars: see `fakekube.nodes.containers`.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from flyer.engine import (
    CheckpointReported,
    GangStarted,
    PodExited,
    Released,
    SuspendReceived,
)

from fakekube.nodes.exits import Exit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from flyer.api import FlyerJob
    from flyer.engine import Event, Outcome, Signal, Start
    from flyer.kube.gateway import Heartbeat
    from flyer.kube.gateway.identities import PodIdentity

__all__ = ["FakeGateway", "Gang", "PodRunner"]


class PodStore(Protocol):
    """A store of pods."""

    def find(self, plural: str, name: str, namespace: str) -> dict[str, Any] | None:
        """The object, if it exists."""


class PodRunner(Protocol):
    """The runner of the pods: `Kubelets` in memory, or `ApiNodes`."""

    @property
    def store(self) -> PodStore:
        """Its pods."""

    def finish(self, namespace: str, name: str, end: Exit) -> None:
        """End a pod."""


@dataclass(slots=True)
class Gang:
    """An attempt whose pods are expected."""

    job: FlyerJob
    start: Start
    pods: tuple[PodIdentity, ...]
    located: set[str] = field(default_factory=set)
    concluded: set[str] = field(default_factory=set)
    up: bool = False


class FakeGateway:
    """The gateway's interface for pods without processes.

    A gang is up when all its pods have addresses. A signalled gang acknowledges, saves one more
    step and exits, unless `deaf`. Its sidecars repeat their reports to the next leader's gateway:
    `reports`, which all gateways of a cluster share, holds them.
    """

    def __init__(
        self,
        enqueue: Callable[[Event], None],
        kubelets: PodRunner,
        reports: dict[tuple[str, int], list[Event]] | None = None,
    ) -> None:
        self._reports = {} if reports is None else reports
        self.gangs: dict[str, Gang] = {}
        self.signals: list[Signal] = []
        self.deaf = False
        self.heartbeats_of: dict[str, Heartbeat] = {}  # returned by `heartbeats`
        self._enqueue = enqueue
        self._kubelets = kubelets

    async def serve(self) -> None:
        """Run until cancelled."""
        await asyncio.Event().wait()

    def expect(self, job: FlyerJob, start: Start, pods: Sequence[PodIdentity]) -> None:
        """Accept the pods of an attempt."""
        current = self.gangs.get(start.job)
        same_object = current is not None and current.job.metadata.uid == job.metadata.uid
        if current is not None and same_object and current.start.attempt == start.attempt:
            return
        gang = self.gangs[start.job] = Gang(job, start, tuple(pods))
        for event in self._reports.get((start.job, start.attempt), ()):
            self._enqueue(event)
        for pod in pods:
            pod_object = self._kubelets.store.find("pods", pod.name, pod.namespace)
            if pod_object is not None and pod_object["metadata"]["uid"] == pod.uid:
                self._locate(gang, pod.uid, pod_object["status"].get("podIP", ""))

    def locate(self, uid: str, ip: str) -> None:
        """Record a pod's address."""
        for gang in self.gangs.values():
            if any(pod.uid == uid for pod in gang.pods):
                self._locate(gang, uid, ip)

    def _locate(self, gang: Gang, uid: str, ip: str) -> None:
        if ip:
            gang.located.add(uid)
        if not gang.up and len(gang.located) == len(gang.start.assignment.nodes):
            gang.up = True
            uid = gang.job.metadata.uid or ""
            self._enqueue(GangStarted(gang.start.job, gang.start.attempt, uid=uid))

    def report(self, event: Event) -> None:
        """Pass a report of a sidecar on."""
        self._enqueue(event)

    def signal(self, signal: Signal) -> None:
        """Ask the job to checkpoint and release."""
        self.signals.append(signal)
        gang = self._gang(signal.job, signal.attempt, signal.uid)
        if gang is None or self.deaf:
            return
        saved = gang.start.restore_from.step if gang.start.restore_from else 0
        job, attempt, step, uid = signal.job, signal.attempt, saved + 1, signal.uid
        default: list[Event] = [
            SuspendReceived(job, attempt, uid=uid),
            CheckpointReported(job, attempt, step, f"step-{step}", uid=uid),
            Released(job, attempt, uid=uid),
        ]
        # A gang that has saved and released saves no further step if the next leader repeats the
        # request.
        for event in self._reports.setdefault((job, attempt), default):
            self._enqueue(event)
        for pod in gang.pods:
            self._kubelets.finish(pod.namespace, pod.name, Exit())

    def kill(self, job: str, attempt: int, uid: str) -> set[str]:
        """End the attempt's ranks through their launchers, unless they are deaf."""
        gang = self._gang(job, attempt, uid)
        if gang is None or self.deaf:
            return set()
        reported = {pod.uid for pod in gang.pods if pod.uid in gang.located}
        for pod in gang.pods:
            if pod.uid in reported:
                self._kubelets.finish(pod.namespace, pod.name, Exit(137, 9))
        return reported

    async def conclude(self, uid: str, status: Outcome) -> Outcome:
        """Report PodExited, once, for a pod that has ended."""
        for gang in self.gangs.values():
            for rank, pod in enumerate(gang.pods):
                if pod.uid == uid and uid not in gang.concluded:
                    gang.concluded.add(uid)
                    names = gang.start.assignment.names
                    name = names[rank] if len(gang.pods) == len(names) else self._node(pod)
                    start, owner = gang.start, gang.job.metadata.uid or ""
                    self._enqueue(PodExited(start.job, start.attempt, name, status, uid=owner))
        return status

    def _node(self, pod: PodIdentity) -> str:
        current = self._kubelets.store.find("pods", pod.name, pod.namespace)
        return str(current["spec"].get("nodeName", "")) if current else ""

    def forget(self, job: str, attempt: int, uid: str) -> None:
        """The attempts up to this one are over."""
        gang = self.gangs.get(job)
        is_its_own = gang is not None and gang.job.metadata.uid == uid
        if gang is not None and is_its_own and gang.start.attempt <= attempt:
            del self.gangs[job]

    def _gang(self, job: str, attempt: int, uid: str) -> Gang | None:
        gang = self.gangs.get(job)
        is_its_own = gang is not None and gang.job.metadata.uid == uid
        return gang if gang and is_its_own and gang.start.attempt == attempt else None

    def absent(self, job: str) -> list[str]:
        """Names of pods that have no address yet."""
        gang = self.gangs.get(job)
        return [pod.name for pod in gang.pods if pod.uid not in gang.located] if gang else []

    def stored(self, events: Iterable[Event]) -> None:
        """This gateway acknowledges nothing."""

    def republish_streams(self, job: str) -> None:
        """Gangs of this gateway never lose their streams."""

    def heartbeats(self) -> dict[str, Heartbeat]:
        """The latest sign of life of each node."""
        return dict(self.heartbeats_of)
