"""Random histories: a small cluster with every kind of fault; invariants checked after each step.

A seed determines a history. It calls `step` directly, with a driver that answers in random order,
so that tens of thousands of histories take minutes. `Simulation` is slower and more realistic.
"""

from __future__ import annotations

import functools
import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flyer.api import FlyerJob, FlyerJobStatus, Phase, Priority, QuotaSubject, illegal
from flyer.engine import (
    CheckpointReported,
    Commit,
    EngineState,
    Event,
    Failed,
    GangStarted,
    JobRemoved,
    JobSubmitted,
    Killed,
    Node,
    NodeEmptied,
    NodeLost,
    NodeObserved,
    NodeRemoved,
    PodExited,
    ProgressReported,
    Quota,
    QuotaObserved,
    QuotaRemoved,
    Released,
    SchedulerSettings,
    Start,
    StartFailed,
    StartPending,
    StartRefused,
    Stop,
    StreamLost,
    StreamRestored,
    Succeeded,
    SuspendReceived,
    TeamObserved,
    rebuild,
    step,
)
from flyer.sim.invariants import Violation
from flyer.sim.liveness import idle_although_wanted
from flyer.sim.necessity import preempted_in_vain
from flyer.sim.samples import sample_job

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from flyer.engine import Action

__all__ = ["SETTINGS", "History"]

SETTINGS = SchedulerSettings(
    failure_window_seconds=2.0,
    start_deadline_seconds=20.0,
    stop_retry_seconds=2.0,
    stop_deadline_seconds=10.0,
    same_zone_layout_seconds=5.0,
    refused_backoff_seconds=3.0,
    refused_backoff_seconds_max=6.0,
    refusal_cooldown_seconds=6.0,
    refusal_cooldown_seconds_max=6.0,
    backoff_seconds_max=4.0,
    time_slice_seconds=60.0,
    unsaved_slices=2,
    preemption_delay_seconds=0.2,
)
# Time within which a job that could run must start.
_PATIENCE_SECONDS = 30.0
_PLACES = (
    (None, None), (None, None), ("a100", None), ("v100", None), ("a100", "A"),
)  # fmt: skip
"""Node class and zone of a job."""
PREEMPTION = {
    "checkpointGracePeriod": "2s", "maxCheckpointGracePeriod": "4s", "minRuntime": "3s",
}  # fmt: skip
# The liveness check takes as long as a step: it runs in every fourth history.
_WATCHED_EVERY = 4
_RESERVING = (Phase.RESERVED, Phase.DRAINING, Phase.STARTING, Phase.RUNNING)
_LIVE = (Phase.STARTING, Phase.RUNNING, Phase.SUSPENDING)
_OF_OBJECTS = (
    JobSubmitted, JobRemoved, NodeObserved, NodeLost, NodeRemoved, QuotaObserved, QuotaRemoved,
)  # fmt: skip
_PRIORITIES = ("low", "normal", "normal", "high", "auto")
_USERS = ("anna", "ben")
_SUBJECTS = {
    QuotaSubject.USER: _USERS,
    QuotaSubject.QUEUE: ("default",),
    QuotaSubject.NAMESPACE: ("default",),
    QuotaSubject.TEAM: ("red",),
}


class History:
    """One history. `run` raises a Violation that names the seed and the step."""

    def __init__(self, seed: int, steps: int = 12) -> None:
        self.seed = seed
        self._steps = steps
        self._random = random.Random(seed)  # noqa: S311 - a simulation's
        self.now = 1_800_000_000.0
        self.nodes = self._make_nodes()
        self.quotas: dict[str, Quota] = {}
        self.store: dict[str, FlyerJob] = {}
        self.pods: set[tuple[str, int, str]] = set()  # job, attempt, node
        self.refusing: set[str] = set()  # jobs whose pods are refused
        self._inbox: list[Event] = []
        self._gone: dict[str, FlyerJob] = {}
        self._count = 0
        self.epoch = 1
        self.teams: dict[str, str] = {}
        self._idle_since: dict[str, float] = {}
        self.state: EngineState = rebuild(self.nodes.values(), (), self.now, 1, SETTINGS)

    def run(self) -> int:
        """Run the history. Returns the number of engine steps."""
        done = 0
        try:
            for _ in range(self._steps):
                for _ in range(self._random.randint(1, 3)):
                    self._random.choice(_DEEDS)(self)
                done += self._advance(self._random.choice((0.1, 0.5, 2.0, 7.0, 40.0)))
                if self.seed % _WATCHED_EVERY == 0:
                    self._watch()
            done += self._settle_down()
        except Violation as violation:
            raise Violation(f"seed {self.seed}, step {done}: {violation}") from violation
        except Exception as error:
            raise Violation(f"seed {self.seed}, step {done}: {error!r}") from error
        return done

    # -- the cluster ---------------------------------------------------------------------------

    def _make_nodes(self) -> dict[str, Node]:
        found = {}
        for node_class in ("a100", "v100")[: self._random.randint(1, 2)]:
            for zone in "AB"[: self._random.randint(1, 2)]:
                for index in range(self._random.randint(1, 3)):
                    name = f"{node_class[0]}{zone.lower()}{index}"
                    found[name] = Node(name, zone, f"{zone}{index // 2}", node_class, 2)
        return found

    def _advance(self, seconds: float) -> int:
        """Advance the time; the driver answers the engine's actions until none remain."""
        self.now += seconds
        events = self._take()
        for done in range(1, 40):
            self._step(events)
            if not self._inbox:
                return done
            self.now += 0.05
            events = self._take()
        raise Violation("the engine does not converge")

    def _take(self) -> list[Event]:
        """The arrived events. Only reports of different pods may be reordered."""
        events, self._inbox = self._inbox, []
        if self._random.random() < 0.2:
            objects = [event for event in events if isinstance(event, _OF_OBJECTS)]
            reports = [item for item in events if not isinstance(item, _OF_OBJECTS)]
            self._random.shuffle(reports)
            return objects + reports
        return events

    def _step(self, events: Sequence[Event]) -> None:
        before = self.state
        self.state, actions = step(before, events, self.now)
        if why := preempted_in_vain(before, self.state):
            raise Violation(why)
        for action in actions:
            self._do(action)
        self._check()

    def _do(self, action: Action) -> None:
        match action:
            case Commit(job, status):
                self._commit(job, status)
            case Start():
                self._start(action)
            case Stop(job, attempt, nodes):
                for name in nodes:
                    self.pods.discard((job, attempt, name))
                    if self._stands(name):
                        self._inbox.append(NodeEmptied(name, job, attempt))
            case _:
                pass

    def _commit(self, key: str, status: FlyerJobStatus) -> None:
        stored = self.store.get(key)
        if stored is None:
            return  # the object was deleted
        if stored.status is not None and (why := illegal(stored.status, status)):
            raise Violation(f"{key}: the API server would refuse this commit: {why}")
        self.store[key] = stored.replace(status=status)

    def _start(self, start: Start) -> None:
        key, attempt, names = start.job, start.attempt, start.assignment.names
        if len(names) != self.state.jobs[key].spec.nodes:
            raise Violation(f"{key} starts in part: {names}")
        for other, number, name in self.pods:
            if name in names and (other, number) != (key, attempt):
                raise Violation(f"{key} starts on {name}, which {other} still occupies")
        if key in self.refusing:
            self._inbox.append(StartRefused(key, attempt, "a quota is full"))
            return
        fate = self._random.random()
        if fate < 0.06:
            self._inbox.append(StartFailed(key, attempt, "no sandbox", names[:1]))
        elif fate < 0.1:
            self._inbox.append(StartFailed(key, attempt, "no image", names, job_fault=True))
        elif fate < 0.15:
            self._inbox.append(StartPending(key, attempt, names[-1:]))
        else:
            self._inbox.append(GangStarted(key, attempt))
        self.pods |= {(key, attempt, name) for name in names}

    def _stands(self, name: str) -> bool:
        state = self.state.nodes.get(name)
        return state is None or not state.lost

    # -- events --------------------------------------------------------------------------------

    def _job(self) -> str | None:
        return self._random.choice(sorted(self.store)) if self.store else None

    def _node(self) -> Node:
        return self.nodes[self._random.choice(sorted(self.nodes))]

    def _live(self) -> tuple[str, FlyerJobStatus] | None:
        live = [key for key, job in self.state.jobs.items() if job.status.phase in _LIVE]
        if not live:
            return None
        key = self._random.choice(sorted(live))
        return key, self.state.jobs[key].status

    def _submit(self) -> None:
        if sum(not _over(job) for job in self.store.values()) >= 7:
            return
        self._count += 1
        draw = self._random
        job = _template(
            draw.choice((1, 1, 2, 3, 4)),
            draw.choice(_PRIORITIES),
            draw.choice(_PLACES),
            draw.choice(("Never", "LastResort")),
            draw.choice((None, None, "10s")),
            draw.choice((0, 2, 10)),
            draw.choice(_USERS),
        )
        name = f"job-{self._count}"
        metadata = job.metadata.replace(name=name, uid=f"uid-{self._count}", generation=1)
        self.store[f"default/{name}"] = job.replace(metadata=metadata)
        if draw.random() < 0.1:
            self.refusing.add(f"default/{name}")
        self._inbox.append(JobSubmitted(self.store[f"default/{name}"]))

    def _edit(self) -> None:
        """A user changes the priority, or suspends, or resumes."""
        key = self._job()
        if key is None:
            return
        job = self.store[key]
        changes: dict[str, Any] = self._random.choice(
            (
                {"priority": Priority(self._random.choice(_PRIORITIES))},
                {"suspend": not job.spec.suspend},
            )
        )
        metadata = job.metadata.replace(generation=(job.metadata.generation or 0) + 1)
        self.store[key] = job.replace(spec=job.spec.replace(**changes), metadata=metadata)
        self._inbox.append(JobSubmitted(self.store[key]))

    def _remove(self) -> None:
        """Delete an object; it may return with the same uid and its stored status."""
        key = self._job()
        if key is not None:
            self._gone[key] = self.store.pop(key)
            self._inbox.append(JobRemoved(key))

    def _return_job(self) -> None:
        if self._gone:
            key = self._random.choice(sorted(self._gone))
            self.store[key] = self._gone.pop(key)
            self._inbox.append(JobSubmitted(self.store[key]))

    def _report(self) -> None:
        found = self._live()
        if found is None:
            return
        key, status = found
        attempt, draw = status.history.attempt, self._random
        number = draw.randint(1, 50)
        events: tuple[Event, ...] = (
            CheckpointReported(key, attempt, number, "/c"),
            CheckpointReported(key, attempt, number, "/c"),
            ProgressReported(key, attempt, number),
            SuspendReceived(key, attempt),
            Released(key, attempt),
            StreamLost(key, attempt),
            StreamRestored(key, attempt),
        )
        self._inbox.append(draw.choice(events))

    def _exit(self) -> None:
        """End pods: successfully, by a failure of the program, or killed."""
        found = self._live()
        if found is None or found[1].assignment is None:
            return
        key, status = found
        attempt, names = status.history.attempt, list(found[1].assignment.names)
        outcome = self._random.choice(
            (Succeeded(), Succeeded(), Failed(1, "boom"), Killed(9), Killed(11), Killed(0))
        )
        ended = names if isinstance(outcome, Succeeded) else names[:1]
        for name in ended:
            if (key, attempt, name) in self.pods and self._stands(name):
                self.pods.discard((key, attempt, name))
                self._inbox += [
                    PodExited(key, attempt, name, outcome),
                    NodeEmptied(name, key, attempt),
                ]

    def _fault(self) -> None:
        node = self._node()
        changed = replace(node, ready=False, reason="Unhealthy (Xid79)", fault="Xid79")
        if self._random.random() < 0.5:
            changed = node
        self._inbox.append(NodeObserved(changed))

    def _drain(self) -> None:
        """An administrator drains the node, or its health becomes unknown."""
        drained = "drained by anna: a new disk"
        changes: dict[str, Any] = self._random.choice(
            (
                {"drain": drained, "ready": False, "reason": drained},
                {"unproven": "Unknown (AgentSilent)"},
            )
        )
        self._inbox.append(NodeObserved(replace(self._node(), **changes)))

    def _lose(self) -> None:
        self._inbox.append(NodeLost(self._node().name, "PowerLost"))

    def _delete_node(self) -> None:
        self._inbox.append(NodeRemoved(self._node().name, lost=self._random.random() < 0.7))

    def _return_node(self) -> None:
        """The node returns, without processes."""
        node = self._node()
        known = self.state.nodes.get(node.name)
        if known is not None and known.lost:
            for pod in [pod for pod in self.pods if pod[2] == node.name]:
                self.pods.discard(pod)
            for key, job in self.state.jobs.items():
                for item in job.status.occupied:
                    if item.name == node.name:
                        self._inbox.append(NodeEmptied(item.name, key, item.attempt))
        self._inbox.append(NodeObserved(node))

    def _limit(self) -> None:
        draw = self._random
        total = draw.random() < 0.2
        kind = draw.choice((QuotaSubject.USER, QuotaSubject.USER, *QuotaSubject))
        quota = Quota(
            draw.choice(("q1", "q2")),
            "*" if total else draw.choice(("*", *_SUBJECTS[kind])),
            draw.choice(("*", "high", "low")),
            draw.choice(("*", "a100")),
            draw.randint(0, 5),
            draw.choice((None, self.now + 20.0)),
            kind,
            total,
        )
        self.quotas[quota.name] = quota
        self._inbox.append(QuotaObserved(quota))

    def _assign_team(self) -> None:
        team = self._random.choice(("", "red", "blue"))
        self.teams = {"default": team} if team else {}
        self._inbox.append(TeamObserved("default", team))

    def _unlimit(self) -> None:
        for name in list(self.quotas):
            del self.quotas[name]
            self._inbox.append(QuotaRemoved(name))

    def _crash(self) -> None:
        """Restart the scheduler from the stored objects; the driver reports its observations."""
        self.epoch += 1
        known = self.state.nodes
        nodes = [known[name].node if name in known else node for name, node in self.nodes.items()]
        # `Simulation` tests the round trip of objects through their text.
        jobs = [job for job in self.store.values() if not _over(job)]
        self.state = rebuild(
            nodes, jobs, self.now, self.epoch, SETTINGS, self.quotas.values(), teams=self.teams
        )
        self._inbox = [
            event
            for event in self._inbox
            if isinstance(event, (JobRemoved, QuotaRemoved, TeamObserved))
        ]
        for name, state in known.items():
            if state.lost:
                self._inbox.append(NodeLost(name, "PowerLost"))
        self.pods = {pod for pod in self.pods if pod[0] in self.store}
        for job in jobs:
            self._inbox += self._sight(job)

    def _sight(self, job: FlyerJob) -> list[Event]:
        status = job.status
        if status is None:
            return [JobSubmitted(job)]
        found: list[Event] = []
        attempt = status.history.attempt
        for occupied_node in status.occupied:
            lives = (job.key, occupied_node.attempt, occupied_node.name) in self.pods
            to_start = status.phase is Phase.STARTING and occupied_node.attempt == attempt
            if not lives and not to_start and self._stands(occupied_node.name):
                found.append(NodeEmptied(occupied_node.name, job.key, occupied_node.attempt))
        return found

    # -- invariants ----------------------------------------------------------------------------

    def _check(self) -> None:
        owner: dict[str, str] = {}
        crossing = []
        for key, job in self.state.jobs.items():
            status = job.status
            if status.phase not in _RESERVING or status.assignment is None:
                continue
            for name in status.assignment.names:
                if name in owner:
                    raise Violation(f"{name} is reserved for {owner[name]} and {key}")
                owner[name] = key
            if len(status.assignment.zones) > 1:
                crossing.append(key)
        if len(crossing) > 1:
            raise Violation(f"{crossing} cross zones at once")
        live: dict[str, tuple[str, int]] = {}
        for pod_job, attempt, name in self.pods:
            known = live.setdefault(name, (pod_job, attempt))
            if known != (pod_job, attempt) and self._stands(name):
                raise Violation(f"{name} serves {known} and {(pod_job, attempt)}")
        for key, job in self.state.jobs.items():
            stored = self.store.get(key)
            if stored is not None and not job.removed and stored.status != job.status:
                raise Violation(f"{key}: the state is not what is stored")

    def _watch(self) -> None:
        """No job could run at every check during the whole patience."""
        idle = idle_although_wanted(self.state, self.now)
        self._idle_since = {key: self._idle_since.get(key, self.now) for key in idle}
        for key, since in self._idle_since.items():
            if self.now - since > _PATIENCE_SECONDS:
                raise Violation(f"for {self.now - since:g} s {idle[key]}")

    def _settle_down(self) -> int:
        """Without further faults every job that can run starts in time, and no process remains."""
        done = self._advance(0.1)
        until = self.now + _PATIENCE_SECONDS
        while self.now < until:
            done += self._advance(self._random.choice((3.0, 5.0)))
        for why in idle_although_wanted(self.state, self.now).values():
            raise Violation(why)
        for key, job in self.state.jobs.items():
            if job.status.phase is Phase.RUNNING and not job.removed:
                pods = {name for pod_job, _, name in self.pods if pod_job == key}
                if not pods and not job.status.exits:
                    raise Violation(f"{key} is Running without pods")
        return done


def _over(job: FlyerJob) -> bool:
    status = job.status
    ended = status is not None and status.phase in (Phase.SUCCEEDED, Phase.FAILED)
    return ended and status is not None and not status.occupied


@functools.cache
def _template(
    nodes: int,
    priority: str,
    place: tuple[str | None, str | None],
    cross: str,
    active_deadline: str | None,
    max_restarts: int,
    user: str,
) -> FlyerJob:
    node_class, zone = place
    optional = {"nodeClass": node_class, "zone": zone, "activeDeadline": active_deadline}
    return sample_job(
        "job", nodes, user=user, priority=priority, crossZone=cross, maxRestarts=max_restarts,
        progressDeadline="50s", preemption=PREEMPTION,
        **{name: value for name, value in optional.items() if value is not None},
    )  # fmt: skip


_DEEDS: tuple[Callable[[History], None], ...] = (
    History._submit,
    History._submit,
    History._submit,
    History._edit,
    History._remove,
    History._return_job,
    History._report,
    History._report,
    History._report,
    History._exit,
    History._fault,
    History._drain,
    History._lose,
    History._delete_node,
    History._return_node,
    History._return_node,
    History._limit,
    History._unlimit,
    History._assign_team,
    History._crash,
)
