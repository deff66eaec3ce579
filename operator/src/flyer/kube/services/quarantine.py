"""Jobs that are left alone, as a term handles them: out of the engine, and marked for their owners.

A job is taken out of the engine's state as it is: that costs a step, in which the others are
scheduled. Only to bring jobs back is everything read again, and `LeftAlone` says how often: some
jobs at a time, and so seldom that rebuilds take a small part of the time however many jobs there
are.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, Final

from flyer import engine
from flyer.api import Condition
from flyer.engine import (
    JobQuarantined,
    JobSubmitted,
    NodeLost,
    NodeObserved,
    Tick,
)
from flyer.kube.client.errors import ApiError
from flyer.kube.services.commits import QUARANTINED

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence

    from flyer.engine import Event
    from flyer.kube.metrics import Metrics
    from flyer.kube.services.apart import LeftAlone
    from flyer.kube.services.commits import Commits
    from flyer.kube.services.nodes import Nodes
    from flyer.kube.services.submissions import Submissions
    from flyer.kube.services.views import JobView
    from flyer.kube.services.world import World

__all__ = ["Quarantine"]

# Facts that a rebuild reads from the caches, newer than any that was told.
_READ_AGAIN: Final = (
    JobSubmitted, NodeLost, NodeObserved, engine.NodeRemoved, engine.QuotaObserved,
    engine.QuotaRemoved, engine.TeamObserved, Tick, engine.ZonesObserved,
)  # fmt: skip
# What of a job that is left alone need not be known later.
_PASSING: Final = (engine.LogObserved, engine.ProgressReported)

log = logging.getLogger(__name__)


class Quarantine:
    """Of one term."""

    def __init__(
        self,
        world: World,
        left: LeftAlone,
        nodes: Nodes,
        commits: Commits,
        submissions: Submissions,
        metrics: Metrics,
        *,
        zones: Callable[[], engine.Zones],
        epoch: Callable[[], int],
        words: Callable[[str, str], str],
        spawn: Callable[[Coroutine[Any, Any, None], str], object],
    ) -> None:
        self._world = world
        self._left = left
        self._nodes = nodes
        self._commits = commits
        self._submissions = submissions
        self._metrics = metrics
        self._zones = zones
        self._epoch = epoch
        self._words = words
        self._spawn = spawn
        # Told, not decided: of jobs that are left alone. What is told again is kept once.
        self._kept: dict[object, Event] = {}
        self._marked: set[str] = set()  # jobs whose status says that they are in quarantine

    # -- out of the engine, and back -----------------------------------------------------------

    def aside(self, events: Sequence[Event]) -> list[Event]:
        """Those that can be decided now. An exit is told once: it waits for its job to be back."""
        now = []
        for one in events:
            job = one.job.key if isinstance(one, JobSubmitted) else getattr(one, "job", "")
            if job not in self._left:
                now.append(one)
            elif not isinstance(one, (*_PASSING, *_READ_AGAIN)):
                self._keep(one)
        return now

    def keep(self, events: Iterable[Event]) -> None:
        """What was told but not decided is told again after the rebuild, unless read anew by it."""
        for one in events:
            if not isinstance(one, _READ_AGAIN):
                self._keep(one)

    def _keep(self, event: Event) -> None:
        mark = _mark_of(event)
        self._kept.pop(mark, None)
        self._kept[mark] = event  # last: what was told in between may be its opposite

    def take_kept(self) -> list[Event]:
        """What can be decided after a rebuild."""
        kept, self._kept = self._kept, {}
        return self.aside(list(kept.values()))

    def taken_out(self, known: Collection[str]) -> list[Event]:
        """What takes those of the engine's jobs out of it that are left alone now."""
        jobs = [job for job in self._left if job in known]
        if not jobs:
            return []
        for job in jobs:
            self._submissions.left(job)
            self._commits.left(job)
        self._metrics.left_alone.set(len(self._left))
        nodes = self._nodes.withhold(self._left.nodes(self._commits.stored))
        return [*map(JobQuarantined, jobs), *nodes, engine.ZonesObserved(self._zones())]

    # -- the condition Quarantined -------------------------------------------------------------

    def begin(self, live: Iterable[JobView]) -> None:
        """The engine was rebuilt from these."""
        self._marked = {view.key for view in live if _is_marked(view)}

    def unmark(self, known: Collection[str]) -> None:
        """A step has judged these jobs: they are in quarantine no more."""
        for key in self._marked:
            if key in known and key not in self._left:
                self.mark(key, None)
        self._marked.clear()

    def mark(self, key: str, why: str | None) -> None:
        """Let the job's own status say that it is in quarantine and why; None: not any more."""
        view = self._world.job(key)
        if view is None:
            return
        condition = None
        if why is not None:
            condition = Condition(
                type=QUARANTINED, status="True", reason="OperatorFault",
                message=self._words(why, key),
                last_transition_time=time.time(),
            )  # fmt: skip
        self._spawn(self._marking(key, view.uid, condition), f"mark {key}")

    async def _marking(self, key: str, uid: str, condition: Condition | None) -> None:
        try:
            await self._commits.mark(key, uid, self._epoch(), condition)
        except ApiError as error:
            log.warning("%s: its condition is not written: %s", key, error)


def _mark_of(event: Event) -> object:
    """Of events with the same mark only the latest counts."""
    match event:
        case engine.CheckpointReported(job=job, attempt=attempt, durable=durable):
            return type(event), job, attempt, durable
        case engine.LifeStateSet(job=job, attempt=attempt):
            return type(event), job, attempt
        case _:
            return event


def _is_marked(view: JobView) -> bool:
    status = view.job.status if view.job is not None else None
    return status is not None and status.condition(QUARANTINED) is not None
