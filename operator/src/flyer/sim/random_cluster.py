"""Random driver of the engine: a small cluster that answers each action, in random order.

A name may be used again: the driver submits a new object once the engine has forgotten the earlier
one, while stops and reports of the earlier one may still be on their way. After each step the
invariants of the state and of the nodes are checked.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, NamedTuple

from flyer.api import FlyerJob, Phase, illegal
from flyer.engine import (
    Commit,
    EngineState,
    Event,
    GangStarted,
    JobRemoved,
    JobSubmitted,
    Node,
    NodeEmptied,
    NodeLost,
    NodeObserved,
    NodeRemoved,
    PodExited,
    Quota,
    QuotaObserved,
    QuotaRemoved,
    SchedulerSettings,
    Start,
    StartFailed,
    StartPending,
    StartRefused,
    Stop,
    TeamObserved,
    rebuild,
    step,
)
from flyer.sim.invariants import Violation
from flyer.sim.necessity import preempted_in_vain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flyer.engine import Action

__all__ = ["SETTINGS", "Pod", "RandomCluster", "is_over"]

SETTINGS = SchedulerSettings(
    failure_window_seconds=2.0,
    start_deadline_seconds=20.0,
    stop_retry_seconds=2.0,
    stop_deadline_seconds=10.0,
    same_zone_layout_seconds=5.0,
    start_backoff_seconds=1.0,
    refused_backoff_seconds=3.0,
    refused_backoff_seconds_max=6.0,
    refusal_cooldown_seconds=6.0,
    refusal_cooldown_seconds_max=6.0,
    backoff_seconds_max=4.0,
    time_slice_seconds=60.0,
    unsaved_slices=2,
    preemption_delay_seconds=0.2,
)
_RESERVING = (Phase.RESERVED, Phase.DRAINING, Phase.STARTING, Phase.RUNNING)
_OF_OBJECTS = (
    JobSubmitted, JobRemoved, NodeObserved, NodeLost, NodeRemoved, QuotaObserved, QuotaRemoved,
)  # fmt: skip
# Read again by a rebuild; all other events of a driver that continues are delivered after it.
_READ_BY_REBUILD = (JobSubmitted, NodeObserved, NodeLost, NodeRemoved, QuotaObserved)


class Pod(NamedTuple):
    """The processes of one attempt on one node. `uid`: of the object that controls it."""

    job: str
    attempt: int
    node: str
    uid: str


class RandomCluster:
    """Nodes, stored objects and pods, and the state of the engine that schedules them."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._random = random.Random(seed)  # noqa: S311 - a simulation's
        self.now = 1_800_000_000.0
        self.nodes = self._make_nodes()
        self.quotas: dict[str, Quota] = {}
        self.store: dict[str, FlyerJob] = {}
        self.pods: set[Pod] = set()
        self.refusing: set[str] = set()  # jobs whose pods are refused
        self._inbox: list[Event] = []
        self._delays = True  # whether stops and reports may be delayed
        self._late_stops: list[Stop] = []
        self._late_reports: list[Event] = []
        self._exited: set[tuple[str, int, str]] = set()  # reported exits: uid, attempt, node
        self._uids: dict[str, str] = {}  # objects of the engine's jobs, by key
        self._ended: set[Pod] = set()  # observed by this driver
        self._waiting: set[str] = set()  # names of objects that wait for an earlier one to end
        self.epoch = 1
        self.teams: dict[str, str] = {}
        self.state: EngineState = rebuild(self.nodes.values(), (), self.now, 1, SETTINGS)

    def _make_nodes(self) -> dict[str, Node]:
        nodes = {}
        for node_class in ("a100", "v100")[: self._random.randint(1, 2)]:
            for zone in "AB"[: self._random.randint(1, 2)]:
                for index in range(self._random.randint(1, 3)):
                    name = f"{node_class[0]}{zone.lower()}{index}"
                    nodes[name] = Node(name, zone, f"{zone}{index // 2}", node_class, 2)
        return nodes

    def _advance(self, seconds: float) -> int:
        """Advance the time; the driver answers the engine's actions until none remain."""
        self.now += seconds
        late_stops, self._late_stops = self._late_stops, []
        for stop in late_stops:
            self._stop(stop)
        events = self._take()
        for steps in range(1, 40):
            self._step(events)
            if not self._inbox:
                return steps
            self.now += 0.05
            events = self._take()
        raise Violation("the engine does not converge")

    def _take(self) -> list[Event]:
        """The arrived events. Only reports of different pods may be reordered."""
        events, self._inbox = self._delay([*self._late_reports, *self._inbox]), []
        self._exited |= {
            (event.uid, event.attempt, event.node)
            for event in events if isinstance(event, (PodExited, NodeEmptied))
        }  # fmt: skip
        if self._random.random() < 0.2:
            objects = [event for event in events if isinstance(event, _OF_OBJECTS)]
            reports = [item for item in events if not isinstance(item, _OF_OBJECTS)]
            self._random.shuffle(reports)
            return objects + reports
        return events

    def _delay(self, events: Sequence[Event]) -> list[Event]:
        """The events that arrive now. All reports about one object may be delayed."""
        uids = sorted({uid for event in events if (uid := _uid_of_report(event))})
        delayed = self._random.choice(uids) if uids and self._random.random() < 0.15 else None
        if delayed is None or not self._delays:
            self._late_reports = []
            return list(events)
        self._late_reports = [event for event in events if _uid_of_report(event) == delayed]
        return [event for event in events if _uid_of_report(event) != delayed]

    def _offer(self, key: str) -> None:
        """Submit an object, or let it wait until the engine has forgotten the earlier one."""
        uid = self.store[key].metadata.uid or ""
        if self._uids.setdefault(key, uid) == uid:
            self._inbox.append(JobSubmitted(self.store[key]))
        else:
            self._waiting.add(key)

    def _step(self, events: Sequence[Event]) -> None:
        before = self.state
        self.state, actions = step(before, events, self.now)
        if why := preempted_in_vain(before, self.state):
            raise Violation(why)
        for action in actions:
            self._do(action)
        submitted = {event.job.key for event in events if isinstance(event, JobSubmitted)}
        for key in sorted((before.jobs.keys() | submitted) - self.state.jobs.keys()):
            self._ended = {pod for pod in self._ended if pod.job != key}
            self._uids.pop(key, None)
            if key in self._waiting:
                self._waiting.discard(key)
                if key in self.store:
                    self._offer(key)
        self._check()

    def _do(self, action: Action) -> None:
        match action:
            case Commit():
                self._commit(action)
            case Start():
                self._start(action)
            case Stop():
                if self._delays and self._random.random() < 0.1:
                    self._late_stops.append(action)
                else:
                    self._stop(action)
            case _:
                pass

    def _stop(self, stop: Stop) -> None:
        for name in stop.nodes:
            self._end(Pod(stop.job, stop.attempt, name, stop.uid))
            if self._stands(name):
                self._inbox.append(NodeEmptied(name, stop.job, stop.attempt, uid=stop.uid))

    def _end(self, pod: Pod) -> None:
        self.pods.discard(pod)
        self._ended.add(pod)

    def _commit(self, commit: Commit) -> None:
        key, status = commit.job, commit.status
        stored = self.store.get(key)
        if stored is None or stored.metadata.uid != commit.uid:
            return  # the object was deleted
        if status.reason == "Removed":
            raise Violation(f"{key} is ended by the removal of another object")
        for exited in status.exits:
            if (commit.uid, status.history.attempt, exited.node) not in self._exited:
                raise Violation(f"{key} has the exit of another object's pod on {exited.node}")
        if stored.status is not None and (why := illegal(stored.status, status)):
            raise Violation(f"{key}: the API server would refuse this commit: {why}")
        self.store[key] = stored.replace(status=status)

    def _start(self, start: Start) -> None:
        key, attempt, names = start.job, start.attempt, start.assignment.names
        stored, uid = self.store.get(key), start.uid
        if stored is None or stored.metadata.uid != uid:
            return  # the object was deleted
        if len(names) != self.state.jobs[key].spec.nodes:
            raise Violation(f"{key} starts in part: {names}")
        for pod in self.pods:
            if pod.node in names and (pod.uid, pod.attempt) != (uid, attempt):
                raise Violation(f"{key} starts on {pod.node}, which {pod} still occupies")
        if key in self.refusing:
            self._inbox.append(
                StartRefused(key, attempt, "refused", self._random.random() < 0.5, uid=uid)
            )
            return
        fate = self._random.random()
        if fate < 0.06:
            self._inbox.append(StartFailed(key, attempt, "no sandbox", names[:1], uid=uid))
        elif fate < 0.1:
            self._inbox.append(
                StartFailed(key, attempt, "no image", names, job_fault=True, uid=uid)
            )
        elif fate < 0.15:
            self._inbox.append(StartPending(key, attempt, names[-1:], uid=uid))
        else:
            self._inbox.append(GangStarted(key, attempt, uid=uid))
        # Sent again after a rebuild: pods that have ended since are not replaced.
        self.pods |= {Pod(key, attempt, name, uid) for name in names} - self._ended

    def _stands(self, name: str) -> bool:
        state = self.state.nodes.get(name)
        return state is None or not state.lost

    def _crash(self) -> None:
        """Another process leads: reports on their way to the former one are lost."""
        self.epoch += 1
        self._inbox = [
            event
            for event in self._inbox
            if isinstance(event, (JobRemoved, QuotaRemoved, TeamObserved))
        ]
        self._late_reports = []
        self._ended.clear()
        self._rebuild()

    def _rebuild(self) -> None:
        """Rebuild the engine from the stored objects; the driver reports its observations."""
        states = self.state.nodes
        nodes = [states[name].node if name in states else node for name, node in self.nodes.items()]
        # `Simulation` tests the round trip of objects through their text.
        jobs = [job for job in self.store.values() if not is_over(job)]
        self.state = rebuild(
            nodes, jobs, self.now, self.epoch, SETTINGS, self.quotas.values(), teams=self.teams
        )
        self._uids = {job.key: job.metadata.uid or "" for job in jobs}
        self._waiting.clear()
        self._inbox = [event for event in self._inbox if not self._is_superseded(event)]
        for name, state in states.items():
            if state.lost:
                self._inbox.append(NodeLost(name, "PowerLost"))
        # Pods of deleted objects are deleted before their nodes are used.
        uids = {job.metadata.uid for job in self.store.values()}
        self.pods = {pod for pod in self.pods if pod.uid in uids}
        for job in jobs:
            self._inbox += self._sight(job)

    def _is_superseded(self, event: Event) -> bool:
        """Whether the rebuild has read what the event reports, or newer facts."""
        if isinstance(event, JobRemoved):
            stored = self.store.get(event.job)
            return stored is not None and stored.metadata.uid == event.uid  # it has returned
        return isinstance(event, _READ_BY_REBUILD)

    def _sight(self, job: FlyerJob) -> list[Event]:
        status = job.status
        if status is None:
            return []
        events: list[Event] = []
        attempt, uid = status.history.attempt, job.metadata.uid or ""
        for occupied_node in status.occupied:
            lives = Pod(job.key, occupied_node.attempt, occupied_node.name, uid) in self.pods
            to_start = status.phase is Phase.STARTING and occupied_node.attempt == attempt
            if not lives and not to_start and self._stands(occupied_node.name):
                events.append(
                    NodeEmptied(occupied_node.name, job.key, occupied_node.attempt, uid=uid)
                )
        return events

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
        live: dict[str, Pod] = {}
        for pod in self.pods:
            occupant = live.setdefault(pod.node, pod)
            if occupant != pod and self._stands(pod.node):
                raise Violation(f"{pod.node} serves {occupant} and {pod}")
        for key, job in self.state.jobs.items():
            stored = self.store.get(key)
            if stored is None or stored.metadata.uid != job.uid or job.removed:
                continue
            if stored.status != job.status:
                raise Violation(f"{key}: the state is not what is stored")


def _uid_of_report(event: Event) -> str:
    """The object about whose attempts the event reports; empty: no report."""
    return "" if isinstance(event, JobRemoved) else getattr(event, "uid", "")


def is_over(job: FlyerJob) -> bool:
    """Whether the job has ended and occupies no node."""
    status = job.status
    ended = status is not None and status.phase in (Phase.SUCCEEDED, Phase.FAILED)
    return ended and status is not None and not status.occupied
