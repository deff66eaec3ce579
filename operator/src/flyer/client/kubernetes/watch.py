"""Watch of FlyerJobs: the current state, then every change, over reconnections."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from flyer.api import FlyerJobStatus
from flyer.client.kubernetes.errors import words_for
from flyer.client.kubernetes.views import job_of, view_of
from flyer.client.watch_item import WatchItem
from flyer.job_events import REMOVED, job_events
from flyer.kube.apiserver.errors import ApiError, ForbiddenError, GoneError, NotFoundError
from flyer.kube.apiserver.resources import FLYERJOBS
from flyer.views import EventView

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from flyer.kube.apiserver import Api

__all__ = ["JobWatch"]

# Bookmarks arrive once a minute: a stream without data for this time is dead.
SILENCE_SECONDS = 75.0
STREAM_SECONDS = 290
PAUSE_SECONDS = 0.5
_ITEMS_MAX = 10_000


class JobWatch:
    """One watch of one namespace ("": all of them).

    `statuses` has earlier statuses: events of those jobs since then are reported, too.
    """

    def __init__(self, api: Api, namespace: str, statuses: dict[str, FlyerJobStatus]) -> None:
        self._api = api
        self._namespace = namespace
        self._before: dict[str, FlyerJobStatus] = dict(statuses)
        self._versions: dict[str, str] = {}
        self._version = ""

    async def items(
        self, timeout_seconds: float | None, beat_seconds: float | None
    ) -> AsyncIterator[WatchItem]:
        """Yield changes until the timeout; with `beat_seconds` an empty item after idle time."""
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        queue: asyncio.Queue[WatchItem | Exception] = asyncio.Queue(_ITEMS_MAX)
        task = asyncio.create_task(self._feed(queue))
        try:
            while True:
                remaining = None if deadline is None else deadline - time.monotonic()
                if remaining is not None and remaining <= 0:
                    return
                pause = min(
                    (entry for entry in (remaining, beat_seconds) if entry is not None),
                    default=None,
                )
                try:
                    item = await asyncio.wait_for(queue.get(), pause)
                except TimeoutError:
                    if beat_seconds is not None:
                        yield WatchItem()
                    continue
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            task.cancel()

    async def _feed(self, queue: asyncio.Queue[WatchItem | Exception]) -> None:
        while True:
            try:
                if not self._version:
                    await self._list(queue)
                async for kind, value in self._api.watch(
                    FLYERJOBS,
                    self._namespace,
                    version=self._version,
                    silence_seconds=SILENCE_SECONDS,
                    timeout_seconds=STREAM_SECONDS,
                ):
                    self._version = value["metadata"]["resourceVersion"]
                    await self._take(kind, value, queue)
            except GoneError:
                self._version = ""
            except (ForbiddenError, NotFoundError) as error:
                await queue.put(words_for(error, "FlyerJobs"))
                return
            except ApiError:
                await asyncio.sleep(PAUSE_SECONDS)

    async def _list(self, queue: asyncio.Queue[WatchItem | Exception]) -> None:
        keys = set()
        version = ""
        async for page in self._api.pages(FLYERJOBS, self._namespace):
            version = page.version
            for value in page.items:
                keys.add(_key(value))
                await self._take("LISTED", value, queue)
        for key in self._versions.keys() - keys:
            await self._gone(key, queue)
        self._version = version

    async def _take(
        self, kind: str, value: dict[str, Any], queue: asyncio.Queue[WatchItem | Exception]
    ) -> None:
        if kind == "BOOKMARK":
            return
        key, version = _key(value), value["metadata"].get("resourceVersion", "")
        if kind == "DELETED":
            await self._gone(key, queue)
            return
        if self._versions.get(key) == version:
            return
        first = key not in self._versions
        self._versions[key] = version
        job = job_of(value)
        if job is None:
            return
        after = job.status or FlyerJobStatus()
        before = self._before.get(key)
        self._before[key] = after
        if before is not None or (not first and kind != "LISTED"):
            for event in job_events(before, after):
                view = EventView(
                    sequence=int(version) if version.isdigit() else 0,
                    time=time.time(),
                    type="Warning" if event.warning else "Normal",
                    reason=event.reason,
                    message=event.message,
                    job=key,
                    attempt=event.attempt,
                    node=event.node,
                    fields=event.fields,
                )
                await queue.put(WatchItem(event=view))
        await queue.put(WatchItem(job=view_of(job)))

    async def _gone(self, key: str, queue: asyncio.Queue[WatchItem | Exception]) -> None:
        self._versions.pop(key, None)
        self._before.pop(key, None)
        event = EventView(0, time.time(), "Warning", REMOVED, "the job was deleted", key)
        await queue.put(WatchItem(event=event))


def _key(value: dict[str, Any]) -> str:
    metadata = value["metadata"]
    return f"{metadata.get('namespace', '')}/{metadata['name']}"
