"""Events for the engine on their way there: some at once, some together with what follows them.

Each step may cost writes. What comes in bursts (acknowledgements, exits, nodes that join) waits a
moment for the rest of its burst. A job that leaves is waited for: its release, its exits and its
nodes go together once the last node is empty, and cost one commit. An event that somebody waits
for takes along what has gathered.

A release may wait because losing it costs nothing: its sidecar tells it again, and a rank that
released ends with a status that says so. What it has saved does not wait.

New and edited FlyerJobs are taken a few at a time, round-robin by namespace, so that thousands of
jobs of one user do not make one step long. So that they do not cost as many steps, new ones of one
namespace are gathered after each step that took some. Nothing else waits for them.
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
    LifeStateSet,
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
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from flyer.engine import Event, JobState

__all__ = ["GATHER_SECONDS", "LEAVE_SECONDS", "SUBMITTED_MAX", "Inbox", "Leaving", "leaving"]

GATHER_SECONDS: Final = 0.2
# A job that has released its nodes is waited for so long: a kubelet says within two seconds that a
# pod has ended, and hundreds at once a busy API server in twice that. What it has not left by then
# is taken from it.
LEAVE_SECONDS: Final = 4.0
SUBMITTED_MAX: Final = 64
"""New jobs that one step takes, and edited ones."""
EDITED_EACH: Final = 8
"""Of these, edited ones of one namespace: each may be a write that the next step waits for."""
SUBMITTED_STEPS: Final = 5.0
SUBMITTED_SECONDS_MAX: Final = 0.2
"""New jobs of a namespace are gathered for so many times what a step with new jobs takes."""
_PATIENT: Final = (
    CheckpointReported, LifeStateSet, LogObserved, NodeEmptied, NodeObserved, PodExited,
    ProgressReported, Released, StartPending, StreamLost, StreamRestored, SuspendReceived,
)  # fmt: skip
_OF_LEAVING: Final = (NodeEmptied, PodExited, Released)


@dataclass(frozen=True, slots=True)
class Leaving:
    """A job that is asked to leave: the nodes that it still occupies, and how long it may."""

    nodes: frozenset[str]
    seconds_left: float  # until its deadline; infinite when that has been judged


def leaving(job: JobState | None, now: float) -> Leaving | None:
    """Whether it is."""
    suspension = job.status.suspension if job is not None else None
    if job is None or suspension is None:
        return None
    nodes = frozenset(one.name for one in job.status.occupied)
    return Leaving(nodes, math.inf if suspension.expired else suspension.deadline - now)


@dataclass(slots=True)
class _Held:
    due_at: float
    events: list[Event] = field(default_factory=list)
    emptied: set[str] = field(default_factory=set)


class _Submitted:
    """Submissions, and removals of jobs whose submission has not been taken, by namespace."""

    def __init__(self) -> None:
        self._by_namespace: OrderedDict[str, OrderedDict[str, list[Event]]] = OrderedDict()
        self._rest_until: dict[str, float] = {}  # of namespaces whose jobs were just taken

    def __contains__(self, key: str) -> bool:
        """Whether something of the job is queued here."""
        return key in self._by_namespace.get(_namespace(key), ())

    def add(self, key: str, event: Event) -> None:
        """Queue an event of this job."""
        jobs = self._by_namespace.setdefault(_namespace(key), OrderedDict())
        events = jobs.setdefault(key, [])
        if events and _is_edit(events[-1], event):
            events.pop()  # nobody has seen it yet
        events.append(event)

    def due_at(self) -> float:
        """When the next ones may be taken; in the past: now."""
        rests = self._rest_until
        return min((rests.get(one, 0.0) for one in self._by_namespace), default=math.inf)

    def take(
        self, count: int, now: float, *, rest_seconds: float = 0.0, each: int = sys.maxsize
    ) -> Iterator[Event]:
        """The events of so many jobs at most, of namespaces that do not rest; these rest then.

        Of one namespace those of `each` jobs.
        """
        self._rest_until = {one: until for one, until in self._rest_until.items() if until > now}
        due = [one for one in self._by_namespace if one not in self._rest_until]
        taken: Counter[str] = Counter()
        while count and due:
            namespace = due.pop(0)
            jobs = self._by_namespace.pop(namespace)
            _, events = jobs.popitem(last=False)
            if jobs:
                self._by_namespace[namespace] = jobs  # behind the other namespaces
                taken[namespace] += 1
                if taken[namespace] < each:
                    due.append(namespace)
            if rest_seconds:
                self._rest_until[namespace] = now + rest_seconds
            yield from events
            count -= 1

    def take_all(self) -> Iterator[Event]:
        """Those of all jobs."""
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


class Inbox:
    """A queue with one reader. `leaving_of` says whether a job is asked to leave its nodes.

    `knows` says whether the engine has a job: a submission of one is a wish of its owner.
    """

    def __init__(
        self,
        leaving_of: Callable[[str], Leaving | None],
        knows: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self._leaving_of = leaving_of
        self._knows = knows
        self._events: list[Event] = []
        self._submitted = _Submitted()
        self._edited = _Submitted()
        self._rest_seconds = 0.0
        self._took_submitted = False
        self._held: dict[str, _Held] = {}
        self._emptied: set[NodeEmptied] = set()  # among the events, held ones too
        self._due_at = float("inf")  # of the loop's clock
        self._changed = asyncio.Event()

    def tell(self, event: Event) -> None:
        """Queue a fact. That a node is empty is said again and again, and queued once."""
        if self._submit(event):
            return
        if isinstance(event, NodeEmptied):
            if event in self._emptied:
                return
            self._emptied.add(event)
        if isinstance(event, _OF_LEAVING):
            job = self._leaving_of(event.job)
            if job is not None:
                self._hold(event, job)
                return
        self._events.append(event)
        self._due(GATHER_SECONDS if isinstance(event, _PATIENT) else 0.0)

    def _submit(self, event: Event) -> bool:
        """Whether the event is queued as a submission, or behind one."""
        if isinstance(event, JobSubmitted):
            key = event.job.key
        elif isinstance(event, JobRemoved):
            key = event.job
        else:
            return False
        queue = next((one for one in (self._edited, self._submitted) if key in one), None)
        if queue is None:
            if isinstance(event, JobRemoved):
                return False
            queue = self._edited if self._knows(key) else self._submitted
        queue.add(key, event)
        self._due(queue.due_at() - asyncio.get_running_loop().time())
        return True

    def stepped(self, seconds: float) -> None:
        """A step with what was taken took so long."""
        if self._took_submitted:
            self._rest_seconds = min(SUBMITTED_STEPS * seconds, SUBMITTED_SECONDS_MAX)

    def keep(self, events: list[Event]) -> None:
        """Begin anew with these; they are due at once."""
        self._events = list(events)
        self._submitted, self._edited = _Submitted(), _Submitted()
        self._held.clear()
        self._emptied.clear()
        self._due_at = 0.0
        self._changed.set()

    def take(self) -> list[Event]:
        """All that has gathered, but for what is held of jobs that have not left yet.

        Of submissions it takes those of so many jobs.
        """
        now = asyncio.get_running_loop().time()
        for job in [job for job, held in self._held.items() if held.due_at <= now]:
            self._events += self._held.pop(job).events
        edited = self._edited.take(SUBMITTED_MAX, now, each=EDITED_EACH)
        rest_seconds = self._rest_seconds
        submitted = list(self._submitted.take(SUBMITTED_MAX, now, rest_seconds=rest_seconds))
        self._took_submitted = bool(submitted)
        return self._taken([*edited, *submitted])

    def take_all(self) -> list[Event]:
        """All, whether due or not."""
        for held in self._held.values():
            self._events += held.events
        self._held.clear()
        return self._taken([*self._edited.take_all(), *self._submitted.take_all()])

    def _taken(self, submitted: list[Event]) -> list[Event]:
        # A removal that is not among the submissions was told before them.
        events, self._events = [*self._events, *submitted], []
        self._emptied = {
            one for held in self._held.values() for one in held.events
            if isinstance(one, NodeEmptied)
        }  # fmt: skip
        dues = (held.due_at for held in self._held.values())
        self._due_at = min(*dues, self._edited.due_at(), self._submitted.due_at())
        return events

    @property
    def due_seconds(self) -> float:
        """Until something is to be taken."""
        return max(0.0, self._due_at - asyncio.get_running_loop().time())

    async def wait(self, seconds: float) -> None:
        """Until something is due, for so long at most."""
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
        held = self._held.get(event.job)
        if held is None:
            # Told before its deadline: who released in time is not killed for being late.
            seconds = min(LEAVE_SECONDS, max(0.0, job.seconds_left - GATHER_SECONDS))
            now = asyncio.get_running_loop().time()
            held = self._held[event.job] = _Held(now + seconds)
        if isinstance(event, Released):
            self._join(event.job, held)
        if isinstance(event, NodeEmptied):
            held.emptied.add(event.node)
        held.events.append(event)
        if job.nodes <= held.emptied:
            self._events += self._held.pop(event.job).events
            self._due(GATHER_SECONDS)
        else:
            self._due(held.due_at - asyncio.get_running_loop().time())

    def _join(self, job: str, held: _Held) -> None:
        """Said in one breath, the acknowledgement waits with the release."""
        for one in self._events:
            if isinstance(one, SuspendReceived) and one.job == job:
                self._events.remove(one)
                held.events.append(one)
                return

    def _due(self, delay_seconds: float) -> None:
        due_at = asyncio.get_running_loop().time() + delay_seconds
        if due_at < self._due_at:
            self._due_at = due_at
            self._changed.set()
