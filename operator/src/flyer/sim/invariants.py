"""Invariants that hold after every action, in any history.

They are checked against the simulated nodes and pods, not against the engine's state.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from flyer.api import FlyerJobStatus, Phase, SuspendCode, illegal
from flyer.engine import Commit, HoldToken, ReleaseToken, Signal, Start

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flyer.api import FlyerJob
    from flyer.engine import Action, EngineState, JobState, Quota
    from flyer.sim.pods import Cluster, Run

_RESERVING = frozenset({Phase.RESERVED, Phase.DRAINING, Phase.STARTING, Phase.RUNNING})
_ENDED = frozenset({Phase.SUCCEEDED, Phase.FAILED})


class Violation(AssertionError):  # noqa: N818 - what it is
    """An invariant that does not hold."""


class Invariants:
    """Checks one simulation."""

    def __init__(self, cluster: Cluster, store: dict[str, FlyerJob]) -> None:
        self._cluster = cluster
        self._store = store
        self._before: dict[str, FlyerJobStatus] = {}
        self._token: str | None = None
        self._released_at: dict[str, tuple[int, int]] = {}  # attempt, step
        self.lost_steps = 0  # by acknowledged suspends

    def after(self, action: Action) -> None:
        """Check the invariants that this action may violate."""
        match action:
            case Commit(job, status):
                self._history_goes_forward(job, status)
                self._no_node_is_reserved_twice()
            case Start():
                self._a_gang_starts_on_its_own_empty_nodes(action)
                self._nothing_was_lost(action)
            case HoldToken(job):
                _check(self._token in (None, job), f"{job} takes the token of {self._token}")
                self._token = job
            case ReleaseToken(job):
                self._token = None if self._token == job else self._token
            case Signal(job, attempt):
                stored = self._store[job].status
                _check(
                    stored is not None and stored.history.attempt == attempt
                    and stored.phase is Phase.SUSPENDING,
                    f"{job} is signalled without a stored reason",
                )  # fmt: skip
            case _:
                pass
        self._no_node_serves_two_jobs()
        self._one_job_crosses_zones()

    def released(self, run: Run) -> None:
        """Record that a job reported this step as saved and may be killed."""
        self._released_at[run.job] = (run.attempt, run.step)

    def within_quotas(self, state: EngineState, actions: Sequence[Action]) -> None:
        """Every job that received nodes or another priority in this step is within every limit.

        A lowered limit or a lost node does not stop running jobs: they may exceed the limit.
        """
        holders = {key: job for key, job in state.jobs.items() if _held_nodes(job)}
        for key in sorted({action.job for action in actions if isinstance(action, Commit)}):
            job, before = state.jobs.get(key), self._before.get(key)
            if job is None or key not in holders or not job.holding:
                continue
            rank = (job.status.history.attempt, job.status.priority)
            if before is not None and rank == (before.history.attempt, before.priority):
                continue
            for quota in _limits(state, job):
                subject = _name(state, job, quota)
                used = sum(
                    _held_nodes(other)
                    for other in holders.values()
                    if (quota.total or _name(state, other, quota) == subject)
                    and quota in _limits(state, other)
                )
                _check(
                    used <= quota.nodes,
                    f"{key} runs at {job.status.priority} with {used} nodes of {subject} in use, "
                    f"{quota.name} has {quota.nodes}",
                )

    def same_as_stored(self, state: EngineState) -> None:
        """The engine's state of a job equals the stored one."""
        for key, job in state.jobs.items():
            stored = self._store[key].status
            _check(stored == job.status, f"{key}: state {job.status} is not stored {stored}")

    def _no_node_serves_two_jobs(self) -> None:
        for name in self._cluster.machines:
            live = self._cluster.live_jobs_on(name)
            _check(len(live) <= 1, f"node {name} serves {sorted(live)}")

    def _one_job_crosses_zones(self) -> None:
        zones: dict[tuple[str, int], set[str]] = {}
        for pod in self._cluster.pods.values():
            if pod.alive and self._cluster.machines[pod.node].powered:
                zones.setdefault((pod.job, pod.attempt), set()).add(pod.zone)
        crossing = sorted(key for key, job_zones in zones.items() if len(job_zones) > 1)
        _check(len(crossing) <= 1, f"{crossing} cross zones at once")
        for job, _ in crossing:
            _check(self._token == job, f"{job} crosses zones, the token is with {self._token}")

    def _no_node_is_reserved_twice(self) -> None:
        owner: dict[str, str] = {}
        for key, job in self._store.items():
            if job.status is None or job.status.phase not in _RESERVING:
                continue
            assignment = job.status.assignment
            _check(assignment is not None, f"{key} is {job.status.phase} without nodes")
            for name in assignment.names if assignment else ():
                _check(name not in owner, f"{name} is reserved for {owner.get(name)} and {key}")
                owner[name] = key

    def _a_gang_starts_on_its_own_empty_nodes(self, action: Start) -> None:
        stored = self._store[action.job]
        status = stored.status
        _check(
            status is not None and status.assignment == action.assignment
            and status.history.attempt == action.attempt,
            f"{action.job} starts on nodes that are not stored as its own",
        )  # fmt: skip
        assignment = action.assignment
        _check(len(assignment.nodes) == stored.spec.nodes, f"{action.job} starts in part")
        _check(len(set(assignment.names)) == stored.spec.nodes, f"{action.job}: node twice")
        ranks = [node.first_rank for node in assignment.nodes]
        expected = [index * stored.spec.ranks_per_node for index in range(stored.spec.nodes)]
        _check(ranks == expected, f"{action.job}: first ranks {ranks}")
        zones = [node.zone for node in assignment.nodes]
        crossings = sum(a != b for a, b in pairwise(zones))
        _check(crossings == len(set(zones)) - 1 <= 1, f"{action.job}: zones {zones}")
        _check(
            len(assignment.cross_zone_pair) == 2 * crossings,
            f"{action.job}: cross-zone pair {assignment.cross_zone_pair}",
        )
        for name in assignment.names:
            other_pods = {
                (pod.job, pod.attempt)
                for pod in self._cluster.pods_on(name)
                if (pod.job, pod.attempt) != (action.job, action.attempt)
            }
            _check(
                not other_pods,
                f"{action.job} starts on {name}, where {sorted(other_pods)} still are",
            )

    def _nothing_was_lost(self, action: Start) -> None:
        attempt, step = self._released_at.get(action.job, (0, 0))
        if attempt == action.attempt - 1:
            restored = action.restore_from.step if action.restore_from else 0
            self.lost_steps += step - restored
            _check(restored >= step, f"{action.job} saved step {step}, restores {restored}")

    def _history_goes_forward(self, key: str, status: FlyerJobStatus) -> None:
        before = self._before.get(key)
        self._before[key] = status
        if before is None:
            return
        refusal = illegal(before, status)
        _check(not refusal, f"{key}: the API server would refuse this commit: {refusal}")
        old, new = before.history, status.history
        _check(new.attempt in (old.attempt, old.attempt + 1), f"{key}: attempt {new.attempt}")
        _check((new.id, new.submitted_at) == (old.id, old.submitted_at), f"{key}: another history")
        _check(new.restarts >= old.restarts, f"{key}: fewer restarts")
        if new.attempt == old.attempt:
            _check(
                status.suspend_code >= before.suspend_code,
                f"{key}: suspend code {before.suspend_code!r} became {status.suspend_code!r}",
            )
        if before.phase in _ENDED:
            _check(status.phase is before.phase, f"{key}: {before.phase} became {status.phase}")
        if before.phase is Phase.SUSPENDING and status.phase is Phase.QUEUED:
            code = before.suspend_code
            expired = before.suspension is not None and before.suspension.expired
            out = len(before.exits) == len(before.assignment.nodes) if before.assignment else True
            _check(
                expired or out or code is SuspendCode.MAY_SUSPEND or bool(status.eviction),
                f"{key} was evicted without a release, an exit or a deadline",
            )


def _held_nodes(job: JobState) -> int:
    """Nodes that the job holds, except lost ones."""
    return len(job.status.assignment.nodes) if job.holding and job.status.assignment else 0


def _limits(state: EngineState, job: JobState) -> list[Quota]:
    """The limits that apply to a job that holds nodes, by the fields of FlyerQuota."""
    assignment, priority = job.status.assignment, job.status.priority
    if assignment is None or priority is None:
        return []
    quotas = [
        quota
        for quota in state.quotas.values()
        if (quota.expires_at is None or quota.expires_at > state.now)
        and _name(state, job, quota)
        and quota.subject in ("*", _name(state, job, quota))
        and quota.priority in ("*", priority.value)
        and quota.node_class in ("*", assignment.node_class)
    ]
    named = {(item.kind, item.priority, item.node_class) for item in quotas if item.subject != "*"}
    return [
        entry
        for entry in quotas
        if entry.total
        or entry.subject != "*"
        or (entry.kind, entry.priority, entry.node_class) not in named
    ]


def _name(state: EngineState, job: JobState, quota: Quota) -> str:
    """The user, namespace, team or queue of a job, by the kind of the limit."""
    namespace = job.key.partition("/")[0]
    return {
        "user": job.user,
        "namespace": namespace,
        "team": state.teams.get(namespace, ""),
        "queue": job.queue,
    }[quota.kind.value]


def _check(holds: bool, message: str) -> None:  # noqa: FBT001 - as assert
    if not holds:
        raise Violation(message)


__all__ = ["Invariants", "Violation"]
