"""State of one scheduling cycle: a mutable copy of the engine's state, with queries on it."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flyer.api import CrossZone, Priority, quantize
from flyer.engine.state import removal_budget
from flyer.engine.state.engine_state import EngineState
from flyer.engine.state.jobs import HOLDING, RESERVING, JobState
from flyer.engine.state.nodes import Node, NodeState, natural_order

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from flyer.api import Pending
    from flyer.engine.state.engine_state import Incident, TermsOfSpec
    from flyer.engine.state.explanation import Blocker, Detail
    from flyer.engine.state.preemption_limits import PreemptionTerms
    from flyer.engine.state.quotas import Quota


class CycleState:
    """Owned by one call of `step`, which keeps only the state that `freeze` returns."""

    def __init__(self, state: EngineState, now: float) -> None:
        self.epoch = state.epoch
        self.settings = state.settings
        self.now = max(state.now, quantize(now))
        self.nodes: dict[str, NodeState] = dict(state.nodes)
        self.jobs: dict[str, JobState] = dict(state.jobs)
        self.quotas: dict[str, Quota] = dict(state.quotas)
        self.zones = state.zones
        self.quarantined = state.quarantined
        self.teams: dict[str, str] = dict(state.teams)
        self.incidents: list[Incident] = list(state.incidents)
        # The jobs before this step. A change that has caused no action yet can be undone.
        self.previous_jobs: Mapping[str, JobState] = state.jobs
        self._nodes_before = state.nodes
        # Priorities selected for `auto` in this step, and why jobs wait for a quota.
        self.auto_priorities: dict[str, Priority] = {}
        self.quota_blockers: dict[str, list[Blocker]] = {}
        # Jobs with a preemption plan that have not waited for `preemption_delay_seconds` yet.
        self.delayed_preemptions: set[str] = set()
        # Jobs in a pause before their next attempt, by namespace; None: not counted yet.
        self._paused: Counter[str] | None = None
        # The job to explain, and what the cycle found out about it.
        self.explained_job = ""
        self.explained_detail: Detail | None = None
        self.pending_writes = state.pending_writes
        self.remedies = state.remedies
        # A dict, because its order does not depend on hashes.
        self._active = dict.fromkeys(state.jobs if state.active is None else state.active)
        # The queue of the last scheduling pass, and the jobs that changed since.
        self.queue = state.queue
        self.queue_changes = dict.fromkeys(state.queue_changes)
        # Whether an input of scheduling has changed.
        self.changed = False
        self.scheduled_at, self.schedule_due_at = state.scheduled_at, state.schedule_due_at
        # The pending status of jobs that wait behind a job, by its key.
        self.behind_pending: dict[str, Pending] = {}
        self._wake: float | None = None
        self._skip_until: Mapping[str, float] = state.skip_until
        self._skips_allowed = False
        # Next due time of each job that was visited.
        self._due: dict[str, float] = {}
        self._lost: frozenset[str] | None = None
        self._terms: dict[tuple[int, Priority], TermsOfSpec] = {}
        self._terms_before = state.terms
        # The job and the event that are processed now, for JobFault.
        self.current_job = ""
        self.current_event: object | None = None

    def freeze(self) -> EngineState:
        """The state after the step."""
        return EngineState(
            self.epoch, self.settings, self.now, self.nodes, self.jobs, self.quotas, self.zones,
            self.quarantined, self.teams, tuple(self.incidents), self.pending_writes,
            self.scheduled_at, self.schedule_due_at,
            tuple(key for key, job in self.active_jobs().items() if not job.is_only_queued),
            self.queue, tuple(self.queue_changes), self.remedies, self._skippable(), self._terms,
        )  # fmt: skip

    def put(self, job: JobState) -> JobState:
        """Replace a job."""
        previous = self.jobs.get(job.key)
        self.changed = self.changed or previous is None or _affects_scheduling(previous, job)
        return self.put_bookkeeping(job)

    def update(self, key: str, **changes: Any) -> JobState:
        """Change fields of a job's status."""
        job = self.jobs[key]
        job = replace(job, status=job.status.replace(**changes))
        if changes.keys() <= {"progress", "pending"}:
            return self.put_bookkeeping(job)
        return self.put(job)

    def put_bookkeeping(self, job: JobState) -> JobState:
        """Replace a job by a copy with the same inputs of scheduling."""
        self.jobs[job.key] = job
        self._active[job.key] = self.queue_changes[job.key] = None
        return job

    def remove_job(self, key: str) -> None:
        """Remove a job."""
        del self.jobs[key]
        self.queue_changes[key] = None
        self.changed = True

    def active_jobs(self) -> dict[str, JobState]:
        """The jobs that do more than wait in the queue, and those that changed in this step."""
        return {key: self.jobs[key] for key in self._active if key in self.jobs}

    def may_skip(self, job: JobState) -> bool:
        """Whether the job has not changed since it was last visited, and nothing is due for it."""
        due_at = self._skip_until.get(job.key)
        if due_at is None or not self._skips_allowed or job is not self.previous_jobs.get(job.key):
            return False
        if due_at <= self.now:
            return False
        self._due[job.key] = due_at
        if self._wake is None or due_at < self._wake:
            self.wake(due_at)
        return True

    def _skippable(self) -> dict[str, float]:
        """Next due time of jobs whose pods run or have ended, unless they change.

        Only jobs that this step visited and did not change.
        """
        return {
            key: self._due.get(key, math.inf)
            for key, job in self.active_jobs().items()
            if job is self.previous_jobs.get(key)
            and job.is_skippable
            and self._due.get(key) != -math.inf
        }

    def is_schedule_due(self, state: EngineState) -> bool:
        """Whether a scheduling pass could have another result than the last one.

        It could not if its inputs are unchanged and no time that it waits for has passed. `state`
        is the one before this step.
        """
        return (
            self.changed
            or self.now
            >= min(self.schedule_due_at, self.scheduled_at + self.settings.reschedule_seconds)
            or self.zones != state.zones
            or self.quotas != state.quotas
            or self.teams != state.teams
            or self.nodes != state.nodes
        )

    def mark_scheduled(self) -> None:
        """Record that the jobs were scheduled, and until when the result holds without a change."""
        self.scheduled_at = self.now
        self.schedule_due_at = self._wake if self._wake is not None else math.inf

    def wake(self, time: float) -> None:
        """Request a step at `time` at the latest."""
        if self.now < time < math.inf:
            if self._wake is None or time < self._wake:
                self._wake = time
            if self.current_job:
                self._due[self.current_job] = min(time, self._due.get(self.current_job, math.inf))

    def passed(self, time: float) -> bool:
        """Whether this time has passed. If not, a step is requested at it."""
        time = quantize(time)
        self.wake(time)
        if time <= self.now and self.current_job:
            self._due[self.current_job] = -math.inf  # the consequence may depend on other jobs
        return time <= self.now

    @property
    def wake_at(self) -> float | None:
        """The earliest time at which something is due."""
        return self._wake

    def level(self, job: JobState) -> int:
        """Level of the effective priority."""
        return self.priority(job).level

    def priority(self, job: JobState) -> Priority:
        """The priority at which the job holds nodes, otherwise the requested or selected one."""
        if job.status.phase in HOLDING and job.status.priority is not None:
            return job.status.priority
        if job.spec.priority is not Priority.AUTO:
            return job.spec.priority
        return self.auto_priorities.get(job.key, self.settings.auto_priority)

    def terms(self, job: JobState) -> PreemptionTerms:
        """How the job may be preempted: as it requests, within the administrator's limits."""
        priority, limits, spec = self.priority(job), self.zones.limits, job.spec
        terms_key = id(spec), priority
        cached = self._terms.get(terms_key)
        if cached is None or cached[0] is not limits:
            cached = self._terms_before.get(terms_key)
            if cached is None or cached[0] is not limits:
                # The entry keeps the spec alive, so that its id is not reused.
                cached = limits, spec, limits.terms(spec, priority)
            self._terms[terms_key] = cached
        return cached[2]

    def reserved_by(self) -> dict[str, str]:
        """The job that has reserved each node, by node name."""
        return {
            node.name: key
            for key, job in self.active_jobs().items()
            if job.status.phase in RESERVING and job.status.assignment is not None
            for node in job.status.assignment.nodes
        }

    def occupied_by(self) -> dict[str, str]:
        """The job that may still have processes on each node, by node name."""
        active = self.active_jobs().items()
        return {node.name: key for key, job in active for node in job.status.occupied}

    def apply_removal_budget(self) -> None:
        """Apply the removal budget after the events. Lost nodes do not change later in the step."""
        self.nodes = removal_budget.apply_removal_budget(self.nodes, self.zones, self.now)
        self._lost = frozenset(name for name, state in self.nodes.items() if state.lost)
        self._skips_allowed = self.nodes == self._nodes_before

    def is_lost(self, name: str) -> bool:
        """Whether the loss of the node was reported. An unknown node is not lost."""
        if self._lost is not None:
            return name in self._lost
        state = self.nodes.get(name)
        return state is not None and bool(state.lost)

    def overdue_since(self, job: JobState, name: str) -> float | None:
        """When the stop deadline of the job on this node passed; None: it has not passed."""
        stop = job.sent_actions.stops.get(name)
        if stop is None:
            return None
        overdue = quantize(stop[1] + self.settings.stop_deadline_seconds)
        self.wake(overdue)
        return overdue if overdue <= self.now else None

    def has_left(self, job: JobState, name: str) -> bool:
        """Whether no job waits for this one to leave the node: the node is lost or overdue."""
        return self.is_lost(name) or self.overdue_since(job, name) is not None

    def crosses_zones(self, job: JobState) -> bool:
        """Whether processes of one attempt of the job may communicate across zones now."""
        zones: dict[int, str] = {}
        for node in job.status.occupied:
            if (
                not self.is_lost(node.name)
                and zones.setdefault(node.attempt, node.zone) != node.zone
            ):
                return True
        return False

    def paused_jobs(self) -> Counter[str]:
        """The number of jobs in a pause before their next attempt, by namespace."""
        if self._paused is None:
            self._paused = Counter(
                key.partition("/")[0] for key, job in self.jobs.items()
                if (job.status.history.not_before or 0.0) > self.now
            )  # fmt: skip
        return self._paused

    def needs_token(self, job: JobState) -> bool:
        """Whether the job holds or waits for the cross-zone token."""
        assignment = job.status.assignment
        return (
            job.status.phase in RESERVING and assignment is not None and len(assignment.zones) > 1
        )

    def may_cross(self, job: JobState) -> bool:
        """Whether the job may span two zones at all."""
        allowed = job.spec.cross_zone is CrossZone.LAST_RESORT and job.spec.zone is None
        return allowed and self.zones.cross_zone_jobs > 0

    def known_nodes(self) -> Iterator[Node]:
        """Every node that the topology admits, ready or not."""
        for state in self.nodes.values():
            if not state.removed and self.zones.admits(state.node):
                yield state.node

    def usable_nodes(self, job: JobState) -> Iterator[Node]:
        """Every known node of the right class and size, ready or not, in natural order."""
        spec = job.spec
        for node in sorted(self.known_nodes(), key=lambda node: natural_order(node.name)):
            if spec.node_class not in (None, node.node_class) or spec.zone not in (None, node.zone):
                continue
            if node.slots >= spec.ranks_per_node:
                yield node


def _affects_scheduling(previous: JobState, job: JobState) -> bool:
    """Whether an input of scheduling differs, not only `observed` and `sent_actions`."""
    return not (
        previous.status is job.status
        and previous.spec is job.spec
        and previous.sent_actions.stops is job.sent_actions.stops
        and (previous.suspend, previous.requeue, previous.removed)
        == (job.suspend, job.requeue, job.removed)
        and (previous.user, previous.queue, previous.generation)
        == (job.user, job.queue, job.generation)
    )


__all__ = ["CycleState"]
