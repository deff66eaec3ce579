"""Event recorder: posts Kubernetes Events of jobs, with stable reasons, at most one per commit.

Events are informational and may be lost: no component waits for them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Final

from flyer.api.waiting import WAITING_REASONS
from flyer.kube.apiserver.errors import AlreadyExistsError, ApiError
from flyer.kube.apiserver.resources import JOB_EVENTS
from flyer.kube.services.jobs import event_series
from flyer.kube.services.jobs.event_series import EventSeries, EventWrite

if TYPE_CHECKING:
    from flyer.job_events import JobEvent
    from flyer.kube.apiserver import Api

__all__ = ["EventRecorder"]

_QUEUE_MAX: Final = 1000
WAITING_EVENTS_BURST: Final = 20.0
WAITING_EVENTS_PER_SECOND: Final = 1.0

log = logging.getLogger(__name__)


class EventRecorder:
    """Posts events from a queue. When it is full, the newest event is dropped.

    `instance` is this replica's name, the `reportingInstance` of its events.
    """

    def __init__(self, api: Api, instance: str) -> None:
        self._api = api
        self._series = EventSeries(instance)
        self._queue: asyncio.Queue[EventWrite] = asyncio.Queue(_QUEUE_MAX)
        self._tokens, self._refilled_at = WAITING_EVENTS_BURST, time.monotonic()

    def record(self, job: str, uid: str, event: JobEvent) -> None:
        """Queue an event."""
        if event.reason in WAITING_REASONS and not self._take_waiting_token():
            return  # the job's status and the metrics report it
        write = self._series.record(job, uid, event, time.time())
        if write is not None:
            self._post(write)

    def _post(self, write: EventWrite) -> None:
        try:
            self._queue.put_nowait(write)
        except asyncio.QueueFull:
            log.warning("event queue full, dropped event %s/%s", write.namespace, write.name)
            self._series.discard(write)

    def _take_waiting_token(self) -> bool:
        """Take a token for an event about waiting, which bounds the writes of a burst of jobs."""
        now = time.monotonic()
        new_tokens = (now - self._refilled_at) * WAITING_EVENTS_PER_SECOND
        self._tokens = min(WAITING_EVENTS_BURST, self._tokens + new_tokens)
        self._refilled_at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    async def run(self) -> None:
        """Post events until cancelled."""
        loop = asyncio.get_running_loop()
        counts_at = loop.time() + event_series.WRITE_SECONDS
        while True:
            try:
                async with asyncio.timeout_at(counts_at):
                    write = await self._queue.get()
            except TimeoutError:
                counts_at = loop.time() + event_series.WRITE_SECONDS
                for item in self._series.overdue(time.time()):
                    self._post(item)
                continue
            try:
                if write.repeats:
                    await self._api.merge(JOB_EVENTS, write.name, write.body, write.namespace)
                else:
                    await self._api.create(JOB_EVENTS, write.body, write.namespace)
            except AlreadyExistsError:
                pass  # created by a previous try whose response was lost
            except ApiError as error:
                log.info("cannot post event: %s", error)
                self._series.discard(write)
