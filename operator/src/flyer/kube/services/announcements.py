"""Records Kubernetes Events of jobs: few, with stable reasons, at most one per commit.

Events are for people and may be lost: nothing waits for them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Final

from flyer.api.waiting import WAITING_REASONS
from flyer.kube.client.errors import AlreadyExistsError, ApiError
from flyer.kube.client.resources import JOB_EVENTS
from flyer.kube.services import eventobjects
from flyer.kube.services.eventobjects import EventObjects, EventWrite

if TYPE_CHECKING:
    from flyer.job_events import JobEvent
    from flyer.kube.client import Api

__all__ = ["Announcer"]

_QUEUE_MAX: Final = 1000
WAITING_AT_ONCE: Final = 20.0
WAITING_EACH_SECOND: Final = 1.0

log = logging.getLogger(__name__)


class Announcer:
    """Posts events from a queue; when it is full the newest is dropped.

    `instance` is this replica's name, by which events say who reports them.
    """

    def __init__(self, api: Api, instance: str) -> None:
        self._api = api
        self._objects = EventObjects(instance)
        self._queue: asyncio.Queue[EventWrite] = asyncio.Queue(_QUEUE_MAX)
        self._tokens, self._refilled_at = WAITING_AT_ONCE, time.monotonic()

    def tell(self, job: str, uid: str, event: JobEvent) -> None:
        """Post it when there is time."""
        if event.reason in WAITING_REASONS and not self._may_tell_of_waiting():
            return  # the job's status and the metrics have it
        write = self._objects.record(job, uid, event, time.time())
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
