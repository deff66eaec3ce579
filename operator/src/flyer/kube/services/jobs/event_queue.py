"""Work queue of engine events: delivers urgent events immediately and batches the others.

Each step may cost writes. Events that arrive in bursts (acknowledgements, exits, joining nodes)
wait briefly for the rest of their burst. The events of a job that is leaving its nodes (release,
exits, empty nodes) are held until its last node is empty, so that they cost one commit. An urgent
event also delivers all events batched so far.

Holding a release is safe: if the process dies, the sidecar reports it again, and a rank that
released exits with a status that says so. Checkpoint reports are not held.

New and edited FlyerJobs are taken a few at a time, round-robin by namespace, so that thousands of
jobs of one user do not prolong one step. New jobs of one namespace are batched after each step
that took some, so that they do not cost one step each. Other events never wait for them.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from flyer.engine import (
    CheckpointReported,
    JobRemoved,
    JobSubmitted,
    LogObserved,
    NodeEmptied,
    NodeObserved,
    PodExited,
    ProgressReported,
    Released,
    StartPending,
    StreamLost,
    StreamRestored,
    SuspendReceived,
    UserStateSet,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from flyer.engine import Event, JobState

__all__ = ["GATHER_SECONDS", "LEAVE_SECONDS", "SUBMITTED_MAX", "EventQueue", "Leaving", "leaving"]

GATHER_SECONDS: Final = 0.2
# Hold time for a job that has released its nodes: a kubelet reports within two seconds that a pod
# has terminated; for hundreds of pods, a busy API server takes twice as long. Pods that are still
# running after this time are deleted.
LEAVE_SECONDS: Final = 4.0
SUBMITTED_MAX: Final = 64
"""Maximum number of new jobs per step; the same for edited jobs."""
EDITED_EACH: Final = 8
"""Edited jobs of one namespace per step: each may cost a write that delays the next step."""
SUBMITTED_STEPS: Final = 5.0
SUBMITTED_SECONDS_MAX: Final = 0.2
"""Batch time for new jobs of a namespace, as a multiple of the time of a step with new jobs."""
_BATCHED: Final = (
    CheckpointReported, UserStateSet, LogObserved, NodeEmptied, NodeObserved, PodExited,
    ProgressReported, Released, StartPending, StreamLost, StreamRestored, SuspendReceived,
)  # fmt: skip
_FROM_LEAVING_JOBS: Final = (NodeEmptied, PodExited, Released)


@dataclass(frozen=True, slots=True)
class Leaving:
    """A job that is asked to leave: the nodes that it still occupies, and its remaining time."""

    nodes: frozenset[str]
    seconds_left: float  # until its deadline; infinite once the engine has acted on the deadline


def leaving(job: JobState | None, now: float) -> Leaving | None:
    """The leaving state of a job; None: it is not asked to leave."""
    suspension = job.status.suspension if job is not None else None
    if job is None or suspension is None:
        return None
    nodes = frozenset(node.name for node in job.status.occupied)
    return Leaving(nodes, math.inf if suspension.expired else suspension.deadline - now)


@dataclass(slots=True)
class _Held:
    due_at: float
    events: list[Event] = field(default_factory=list)
    emptied: set[str] = field(default_factory=set)


class _Submitted:
    """Submissions by namespace, and removals of jobs whose submission has not been taken."""

    def __init__(self) -> None:
        self._by_namespace: OrderedDict[str, OrderedDict[str, list[Event]]] = OrderedDict()
        self._rest_until: dict[str, float] = {}  # namespaces whose jobs were just taken

    def __contains__(self, key: str) -> bool:
        """Whether an event of the job is queued here."""
        return key in self._by_namespace.get(_namespace(key), ())

    def add(self, key: str, event: Event) -> None:
        """Queue an event of this job."""
        jobs = self._by_namespace.setdefault(_namespace(key), OrderedDict())
        events = jobs.setdefault(key, [])
        if events and _is_edit(events[-1], event):
            events.pop()  # superseded before it was taken
        events.append(event)

    def due_at(self) -> float:
        """When the next events may be taken; a time in the past means now."""
        rests = self._rest_until
        return min((rests.get(name, 0.0) for name in self._by_namespace), default=math.inf)

    def take(
        self, count: int, now: float, *, rest_seconds: float = 0.0, each: int = sys.maxsize
    ) -> Iterator[Event]:
        """The events of at most `count` jobs, of at most `each` per namespace.

        Namespaces that rest are skipped; the others rest for `rest_seconds` afterwards.
        """
        self._rest_until = {name: until for name, until in self._rest_until.items() if until > now}
        namespaces = [name for name in self._by_namespace if name not in self._rest_until]
        counts: Counter[str] = Counter()
        while count and namespaces:
            namespace = namespaces.pop(0)
            jobs = self._by_namespace.pop(namespace)
            _, events = jobs.popitem(last=False)
            if jobs:
                self._by_namespace[namespace] = jobs  # behind the other namespaces
                counts[namespace] += 1
                if counts[namespace] < each:
                    namespaces.append(namespace)
            if rest_seconds:
                self._rest_until[namespace] = now + rest_seconds
            yield from events
            count -= 1

    def take_all(self) -> Iterator[Event]:
        """The events of all jobs."""
        self._rest_until.clear()
        return self.take(sys.maxsize, 0.0)


def _namespace(key: str) -> str:
    return key.partition("/")[0]


def _is_edit(before: Event, after: Event) -> bool:
    """Whether both submit the same object."""
    return (
        isinstance(before, JobSubmitted)
        and isinstance(after, JobSubmitted)
        and before.job.metadata.uid == after.job.metadata.uid
    )


class EventQueue:
    """A queue with one reader. `leaving_of` returns the leaving state of a job.

    `is_known` returns whether the engine has a job: a submission of a known job is an edit.
    """

    def __init__(
        self,
        leaving_of: Callable[[str], Leaving | None],
        is_known: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self._leaving_of = leaving_of
        self._is_known = is_known
        self._events: list[Event] = []
        self._submitted = _Submitted()
        self._edited = _Submitted()
        self._rest_seconds = 0.0
        self._took_submitted = False
        self._held: dict[str, _Held] = {}
        self._emptied: set[NodeEmptied] = set()  # queued or held
        self._due_at = float("inf")  # by the loop's clock
        self._changed = asyncio.Event()

    def add(self, event: Event) -> None:
        """Queue an event. A repeated NodeEmptied is queued once."""
        if self._submit(event):
            return
        if isinstance(event, NodeEmptied):
            if event in self._emptied:
                return
            self._emptied.add(event)
        if isinstance(event, _FROM_LEAVING_JOBS):
            job = self._leaving_of(event.job)
            if job is not None:
                self._hold(event, job)
                return
        self._events.append(event)
        self._due(GATHER_SECONDS if isinstance(event, _BATCHED) else 0.0)

    def _submit(self, event: Event) -> bool:
        """Queue a submission, or a removal behind one. Returns whether the event was queued."""
        if isinstance(event, JobSubmitted):
            key = event.job.key
        elif isinstance(event, JobRemoved):
            key = event.job
        else:
            return False
        queue = next((each for each in (self._edited, self._submitted) if key in each), None)
        if queue is None:
            if isinstance(event, JobRemoved):
                return False
            queue = self._edited if self._is_known(key) else self._submitted
        queue.add(key, event)
        self._due(queue.due_at() - asyncio.get_running_loop().time())
        return True

    def record_step(self, seconds: float) -> None:
        """Report the duration of the step that processed the events taken last."""
        if self._took_submitted:
            self._rest_seconds = min(SUBMITTED_STEPS * seconds, SUBMITTED_SECONDS_MAX)

    def reset(self, events: list[Event]) -> None:
        """Replace all queued events by these, which are due immediately."""
        self._events = list(events)
        self._submitted, self._edited = _Submitted(), _Submitted()
        self._held.clear()
        self._emptied.clear()
        self._due_at = 0.0
        self._changed.set()

    def take(self) -> list[Event]:
        """The queued events, without those held for leaving jobs, and a share of submissions."""
        now = asyncio.get_running_loop().time()
        for job in [job for job, entry in self._held.items() if entry.due_at <= now]:
            self._events += self._held.pop(job).events
        edited = self._edited.take(SUBMITTED_MAX, now, each=EDITED_EACH)
        rest_seconds = self._rest_seconds
        submitted = list(self._submitted.take(SUBMITTED_MAX, now, rest_seconds=rest_seconds))
        self._took_submitted = bool(submitted)
        return self._taken([*edited, *submitted])

    def take_all(self) -> list[Event]:
        """All events, whether due or not."""
        for entry in self._held.values():
            self._events += entry.events
        self._held.clear()
        return self._taken([*self._edited.take_all(), *self._submitted.take_all()])

    def _taken(self, submitted: list[Event]) -> list[Event]:
        # A removal that is not among the submissions preceded them.
        events, self._events = [*self._events, *submitted], []
        self._emptied = {
            event for entry in self._held.values() for event in entry.events
            if isinstance(event, NodeEmptied)
        }  # fmt: skip
        dues = (entry.due_at for entry in self._held.values())
        self._due_at = min(*dues, self._edited.due_at(), self._submitted.due_at())
        return events

    @property
    def due_seconds(self) -> float:
        """Time until the next event is due."""
        return max(0.0, self._due_at - asyncio.get_running_loop().time())

    async def wait(self, seconds: float) -> None:
        """Wait until an event is due, for at most `seconds`."""
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + seconds
        while (until := min(self._due_at, ends_at)) > loop.time():
            self._changed.clear()
            try:
                async with asyncio.timeout_at(until):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def _hold(self, event: NodeEmptied | PodExited | Released, job: Leaving) -> None:
        entry = self._held.get(event.job)
        if entry is None:
            # Delivered before the deadline: a job that released in time must not be killed as late.
            seconds = min(LEAVE_SECONDS, max(0.0, job.seconds_left - GATHER_SECONDS))
            now = asyncio.get_running_loop().time()
            entry = self._held[event.job] = _Held(now + seconds)
        if isinstance(event, Released):
            self._join(event.job, entry)
        if isinstance(event, NodeEmptied):
            entry.emptied.add(event.node)
        entry.events.append(event)
        if job.nodes <= entry.emptied:
            self._events += self._held.pop(event.job).events
            self._due(GATHER_SECONDS)
        else:
            self._due(entry.due_at - asyncio.get_running_loop().time())

    def _join(self, job: str, entry: _Held) -> None:
        """Hold an acknowledgement that arrived together with the release."""
        for event in self._events:
            if isinstance(event, SuspendReceived) and event.job == job:
                self._events.remove(event)
                entry.events.append(event)
                return

    def _due(self, delay_seconds: float) -> None:
        due_at = asyncio.get_running_loop().time() + delay_seconds
        if due_at < self._due_at:
            self._due_at = due_at
            self._changed.set()
