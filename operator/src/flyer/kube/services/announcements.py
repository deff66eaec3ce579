"""Kubernetes Events about jobs: few, with stable reasons, one at most for a commit.

`announcement` is pure. Events are for people and may be lost: nothing waits for them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from flyer.api import FlyerJobStatus, Phase
from flyer.api.waiting import PENDING_EVALUATION, PODS_REFUSED, WAITING_REASONS
from flyer.kube.client.errors import AlreadyExistsError, ApiError
from flyer.kube.client.resources import JOB_EVENTS
from flyer.kube.services import eventobjects
from flyer.kube.services.eventobjects import EventObjects, EventWrite

if TYPE_CHECKING:
    from flyer.kube.client import Api

__all__ = ["REASONS", "Announcement", "Announcer", "announcement"]

STARTED: Final = "Started"
PREEMPTED: Final = "Preempted"
SUSPENDED: Final = "Suspended"
REQUEUED: Final = "Requeued"
RESTARTED: Final = "Restarted"
COMPLETED: Final = "Completed"
FAILED: Final = "Failed"
NEVER_FITS: Final = "NeverFits"
INVALID: Final = "InvalidJob"
LEFT_ALONE: Final = "LeftAlone"
EVENT_DROPPED: Final = "EventDropped"
REASONS: Final = (
    *WAITING_REASONS,
    STARTED, PREEMPTED, SUSPENDED, REQUEUED, RESTARTED, COMPLETED, FAILED, NEVER_FITS, INVALID,
    LEFT_ALONE, EVENT_DROPPED,
)  # fmt: skip

# Why a gang lost its nodes, where that is no failure of the infrastructure.
_NOT_RESTARTED: Final = {
    "Preempted": PREEMPTED, "Suspended": SUSPENDED, "Requeued": REQUEUED, "Yielded": REQUEUED,
    "NodeDrained": REQUEUED,
    PODS_REFUSED: PODS_REFUSED,
}  # fmt: skip
_WARNINGS: Final = frozenset({RESTARTED, PODS_REFUSED})
_QUEUE_MAX: Final = 1000
WAITING_AT_ONCE: Final = 20.0
WAITING_EACH_SECOND: Final = 1.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Announcement:
    """What is told about one job."""

    reason: str
    message: str
    warning: bool = False


def announcement(before: FlyerJobStatus | None, after: FlyerJobStatus) -> Announcement | None:
    """The most important thing that this commit says, if it is worth telling."""
    before = before or FlyerJobStatus()
    attempt = after.chain.attempt
    if after.phase is not before.phase:
        if after.phase is Phase.SUCCEEDED:
            return Announcement(COMPLETED, after.message)
        if after.phase is Phase.FAILED:
            return Announcement(FAILED, f"{after.reason}: {after.message}", warning=True)
        if after.phase is Phase.RUNNING and after.assignment is not None:
            where = f"{len(after.assignment.nodes)} nodes, zone {after.zones}"
            resumed = f", from step {after.checkpoint.step}" if after.checkpoint else ""
            return Announcement(STARTED, f"attempt {attempt} runs on {where}{resumed}")
    if after.eviction is not None and after.eviction != before.eviction:
        reason = _NOT_RESTARTED.get(after.eviction.reason, RESTARTED)
        lost = after.eviction.lost_steps
        detail = f"; {lost} steps are to be done again" if lost else ""
        return Announcement(reason, f"{after.eviction.message}{detail}", reason in _WARNINGS)
    never = after.pending is not None and after.pending.verdict == "Never"
    known = before.pending is not None and before.pending.verdict == "Never"
    if never and not known and after.pending is not None:
        return Announcement(NEVER_FITS, after.pending.message, warning=True)
    if not never and after.pending is not None and not _is_judged(before) and _is_judged(after):
        return Announcement(after.pending.reason, after.pending.message)
    return None


def _is_judged(status: FlyerJobStatus) -> bool:
    """Whether it was looked at. Told once for each time in the queue: it changes too often."""
    return status.pending is not None and status.pending.reason != PENDING_EVALUATION


class Announcer:
    """Posts events from a queue; when it is full the newest is dropped.

    `instance` is this replica's name, by which events say who reports them.
    """

    def __init__(self, api: Api, instance: str) -> None:
        self._api = api
        self._objects = EventObjects(instance)
        self._queue: asyncio.Queue[EventWrite] = asyncio.Queue(_QUEUE_MAX)
        self._tokens, self._refilled_at = WAITING_AT_ONCE, time.monotonic()

    def tell(self, job: str, uid: str, what: Announcement) -> None:
        """Post it when there is time."""
        if what.reason in WAITING_REASONS and not self._may_tell_of_waiting():
            return  # the job's status and the metrics have it
        write = self._objects.record(job, uid, what, time.time())
        if write is not None:
            self._post(write)

    def _post(self, write: EventWrite) -> None:
        try:
            self._queue.put_nowait(write)
        except asyncio.QueueFull:
            log.warning("an event is dropped: %s/%s", write.namespace, write.name)
            self._objects.lost(write)

    def _may_tell_of_waiting(self) -> bool:
        """A burst of jobs that wait must not cost as many writes."""
        now = time.monotonic()
        grown = (now - self._refilled_at) * WAITING_EACH_SECOND
        self._tokens = min(WAITING_AT_ONCE, self._tokens + grown)
        self._refilled_at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    async def run(self) -> None:
        """Post until cancelled."""
        loop = asyncio.get_running_loop()
        counts_at = loop.time() + eventobjects.WRITE_SECONDS
        while True:
            try:
                async with asyncio.timeout_at(counts_at):
                    write = await self._queue.get()
            except TimeoutError:
                counts_at = loop.time() + eventobjects.WRITE_SECONDS
                for one in self._objects.overdue(time.time()):
                    self._post(one)
                continue
            try:
                if write.repeats:
                    await self._api.merge(JOB_EVENTS, write.name, write.body, write.namespace)
                else:
                    await self._api.create(JOB_EVENTS, write.body, write.namespace)
            except AlreadyExistsError:
                pass  # by ourselves: the answer was lost
            except ApiError as error:
                log.info("an event is not posted: %s", error)
                self._objects.lost(write)
