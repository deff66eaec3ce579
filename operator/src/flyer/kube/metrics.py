"""Metrics of the operator, with the prefix `flyer_`. Labels are bounded: never a job or a pod."""

from __future__ import annotations

import time
from collections import Counter as Tally
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from flyer.api import FlyerJobStatus, Phase
from flyer.api.phases import ENDED
from flyer.api.waiting import PENDING_EVALUATION, PENDING_REASONS, PODS_REFUSED
from flyer.engine.state.jobs import HOLDING
from flyer.engine.state.removal_budget import removal_budgets

if TYPE_CHECKING:
    from collections.abc import Iterable

    from flyer.engine import EngineState

__all__ = ["EVICTION_REASONS", "Metrics"]

EVICTION_REASONS: Final = (
    "Preempted", "Suspended", "Requeued", "NodeDrained", "Yielded", "NodeFailures", "HardwareFault",
    "PodKilled", "StartFailed", "PodsReadyTimeout", "ProgressDeadlineExceeded", "ObjectVanished",
    PODS_REFUSED,
)  # fmt: skip
_DECISION_SECONDS: Final = (0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_WAIT_SECONDS: Final = (1, 5, 15, 60, 300, 900, 3600, 4 * 3600, 24 * 3600)
_CALL_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_EXPOSED_RATIOS: Final = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75)
SERVER_FAILS: Final = 500
# Finished jobs are forgotten, so a gauge of them would always be 0; counters have them.
_GAUGE_PHASES: Final = tuple(phase for phase in Phase if not phase.ended)


class Metrics:
    """All metrics of the operator, in one registry."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        registry = self.registry = registry or CollectorRegistry()
        self.jobs = Gauge(
            "flyer_jobs",
            "Unfinished jobs, by phase (for finished jobs see flyer_jobs_ended_total)",
            ["phase"],
            registry=registry,
        )
        self.queued_nodes = Gauge(
            "flyer_queued_nodes", "Nodes requested by waiting jobs", registry=registry
        )
        self.waiting_jobs = Gauge(
            "flyer_waiting_jobs", "Waiting jobs, by pending reason", ["reason"], registry=registry
        )
        self.waiting_nodes = Gauge(
            "flyer_waiting_nodes",
            "Nodes requested by waiting jobs, by pending reason",
            ["reason"],
            registry=registry,
        )
        self.nodes = Gauge(
            "flyer_nodes", "Nodes, by zone and state", ["zone", "state"], registry=registry
        )
        self.removals = Gauge(
            "flyer_node_removals",
            "Nodes, by node class and removal state: budget (maximum removed without hard "
            "evidence), spent (removed), held (in use because the budget is spent), defective "
            "(removed with hard evidence; more of them than the budget indicate a mass failure)",
            ["node_class", "state"],
            registry=registry,
        )
        self.gang_nodes = Gauge("flyer_gang_nodes", "Nodes assigned to gangs", registry=registry)
        self.occupancy = Gauge(
            "flyer_node_occupancy_ratio",
            "Nodes assigned to gangs divided by usable nodes",
            registry=registry,
        )
        self.token = Gauge(
            "flyer_cross_zone_token_held",
            "1 while a job holds the cross-zone token",
            registry=registry,
        )
        self.decision_seconds = Histogram(
            "flyer_decision_duration_seconds",
            "Duration of one engine step",
            registry=registry,
            buckets=_DECISION_SECONDS,
        )
        self.waited_seconds = Histogram(
            "flyer_job_wait_seconds",
            "Time from queued to running",
            registry=registry,
            buckets=_WAIT_SECONDS,
        )
        self.exposed_ratio = Histogram(
            "flyer_step_exposed_ratio",
            "Share of a step's time for which a job waited for communication, once for each stored "
            "progress of the jobs that report it",
            registry=registry,
            buckets=_EXPOSED_RATIOS,
        )
        self.gangs_started = Counter("flyer_gangs_started", "Gangs started", registry=registry)
        self.evictions = Counter(
            "flyer_evictions",
            "Gangs evicted before completion, by reason",
            ["reason"],
            registry=registry,
        )
        self.lost_node_seconds = Counter(
            "flyer_lost_node_seconds",
            "Node time whose work was lost, in seconds, by reason",
            ["reason"],
            registry=registry,
        )
        self.gang_node_seconds = Counter(
            "flyer_gang_node_seconds",
            "Node time of finished attempts, in seconds",
            registry=registry,
        )
        self.jobs_ended = Counter(
            "flyer_jobs_ended", "Finished jobs, by phase", ["phase"], registry=registry
        )
        self.rebuilds = Counter(
            "flyer_scheduler_rebuilds", "Rebuilds of the scheduler's state", registry=registry
        )
        self.faults = Counter(
            "flyer_job_faults",
            "Quarantined jobs (status: rejected by the API server; job: the scheduler failed) and "
            "dropped events (event)",
            ["kind"],
            registry=registry,
        )
        self.quarantined_jobs = Gauge(
            "flyer_jobs_quarantined",
            "Jobs in quarantine until their retry",
            registry=registry,
        )
        self.watch_age_seconds = Gauge(
            "flyer_watch_age_seconds",
            "Time since the last event from the API server, in seconds",
            ["resource"],
            registry=registry,
        )
        self.leader = Gauge("flyer_leader", "1 while this process is the leader", registry=registry)
        self.epoch = Gauge(
            "flyer_leader_epoch", "Fencing epoch of this process's term", registry=registry
        )
        self.calls = Counter(
            "flyer_api_requests",
            "Requests to the API server, by response code",
            ["verb", "resource", "code"],
            registry=registry,
        )
        self.call_seconds = Histogram(
            "flyer_api_request_duration_seconds",
            "Duration of requests to the API server",
            ["verb"],
            registry=registry,
            buckets=_CALL_SECONDS,
        )
        self._latest: tuple[EngineState, str] | None = None  # not evaluated yet
        self._answering_since: float | None = None
        self._counted: set[tuple[str, str]] = set()  # every observed zone and state of nodes
        for reason in EVICTION_REASONS:
            self.evictions.labels(reason)
            self.lost_node_seconds.labels(reason)
        for kind in ("status", "job", "event"):
            self.faults.labels(kind)
        for phase in _GAUGE_PHASES:
            self.jobs.labels(phase.value).set(0)
        for reason in PENDING_REASONS:
            self.waiting_jobs.labels(reason).set(0)
            self.waiting_nodes.labels(reason).set(0)
        for phase in ENDED:
            self.jobs_ended.labels(phase.value)

    def called(self, verb: str, resource: str, code: int, seconds: float) -> None:
        """Count one try of a call; code 0: no response."""
        self.calls.labels(verb, resource, str(code) if code else "none").inc()
        if verb == "watch":
            return
        self.call_seconds.labels(verb).observe(seconds)
        if not code or code >= SERVER_FAILS:
            self._answering_since = None
        elif self._answering_since is None:
            self._answering_since = time.monotonic()

    def answering_seconds(self) -> float:
        """Time for which the API server has responded without failure; 0 while it fails."""
        return 0.0 if self._answering_since is None else time.monotonic() - self._answering_since

    def decided(self, seconds: float) -> None:
        """Count one engine step."""
        self.decision_seconds.observe(seconds)

    def committed(self, before: FlyerJobStatus | None, after: FlyerJobStatus) -> None:
        """Count a stored status."""
        before = before or FlyerJobStatus()
        if after.phase is Phase.RUNNING and before.phase is not Phase.RUNNING:
            self.gangs_started.inc()
            running_at = after.assignment.running_at if after.assignment else None
            if running_at is not None and after.history.queued_at is not None:
                self.waited_seconds.observe(max(0.0, running_at - after.history.queued_at))
        exposed = after.progress.exposed_percent if after.progress else None
        if exposed is not None and after.progress != before.progress:
            self.exposed_ratio.observe(exposed / 100)
        if after.eviction is not None and after.eviction != before.eviction:
            reason = after.eviction.reason
            self.evictions.labels(reason).inc()
            self.lost_node_seconds.labels(reason).inc(_lost_node_seconds(before, after))
        if after.phase.ended and not before.phase.ended:
            self.jobs_ended.labels(after.phase.value).inc()
        if before.phase in HOLDING and after.phase not in HOLDING:
            self.gang_node_seconds.inc(_had(before))

    def observe(self, state: EngineState, holder: str) -> None:
        """Record the state after a step. Gauges are computed on demand, because steps are many."""
        self._latest = (state, holder)

    def count(self) -> None:
        """Compute the gauges after the latest step."""
        if self._latest is None:
            return
        (state, holder), self._latest = self._latest, None
        phases = Tally(job.status.phase for job in state.jobs.values())
        for phase in _GAUGE_PHASES:
            self.jobs.labels(phase.value).set(phases[phase])
        jobs: Tally[str] = Tally()
        nodes: Tally[str] = Tally()
        for job in state.jobs.values():
            if job.status.phase is Phase.QUEUED:
                reason = job.status.pending.reason if job.status.pending else PENDING_EVALUATION
                jobs[reason] += 1
                nodes[reason] += job.spec.nodes
        for reason in PENDING_REASONS:
            self.waiting_jobs.labels(reason).set(jobs[reason])
            self.waiting_nodes.labels(reason).set(nodes[reason])
        self.queued_nodes.set(nodes.total())
        used_nodes = sum(len(job.status.occupied) for job in state.jobs.values())
        self.gang_nodes.set(used_nodes)
        for removal in removal_budgets(state):
            levels = {
                "budget": removal.budget,
                "spent": len(removal.out),
                "held": len(removal.held),
                "defective": len(removal.defective),
            }
            for level, count in levels.items():
                self.removals.labels(removal.node_class, level).set(count)
        tally: Tally[tuple[str, str]] = Tally()
        for node in state.nodes.values():
            name = "lost" if node.lost else "ready" if node.eligible else "notReady"
            tally[(node.node.zone, name)] += 1
        self._counted |= tally.keys()
        for zone, name in self._counted:  # a state without nodes is set to 0
            self.nodes.labels(zone, name).set(tally[(zone, name)])
        usable = sum(count for (_, name), count in tally.items() if name == "ready")
        self.occupancy.set(min(1.0, used_nodes / usable) if usable else 0.0)
        self.token.set(1 if holder else 0)

    def set_watch_ages(self, ages: Iterable[tuple[str, float]]) -> None:
        """Set the age of each cache."""
        for resource, seconds in ages:
            self.watch_age_seconds.labels(resource).set(seconds)


def _had(status: FlyerJobStatus) -> float:
    """Node seconds of the finished attempt."""
    assignment = status.assignment
    if assignment is None or assignment.running_at is None:
        return 0.0
    return len(assignment.nodes) * max(0.0, time.time() - assignment.running_at)


def _lost_node_seconds(before: FlyerJobStatus, after: FlyerJobStatus) -> float:
    """Node seconds since the last durable checkpoint of the finished attempt.

    That checkpoint may be part of the same commit: a job checkpoints just before it leaves.
    """
    assignment, eviction = before.assignment, after.eviction
    if assignment is None or assignment.running_at is None or eviction is None:
        return 0.0
    saved_at = after.checkpoint.time if after.checkpoint else 0.0
    return len(assignment.nodes) * max(0.0, eviction.time - max(saved_at, assignment.running_at))
