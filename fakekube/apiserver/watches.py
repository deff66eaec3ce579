"""Watch streams of the in-memory API server."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING, Any

from aiohttp import web

from fakekube.apiserver.tables import Change
from fakekube.errors import ApiRefusal

if TYPE_CHECKING:
    from collections.abc import Callable

    from fakekube.apiserver.faults import Faults
    from fakekube.apiserver.store import Store
    from fakekube.apiserver.tables import Table


class Watch:
    """One stream: the changes of a table after a version, for one selector and namespace."""

    def __init__(
        self,
        store: Store,
        table: Table,
        faults: Faults,
        selects: Callable[[dict[str, Any]], bool],
        namespace: str,
        *,
        bookmarks: bool,
    ) -> None:
        self.resource = table.kind.plural
        self._store = store
        self._table = table
        self._faults = faults
        self._selects = selects
        self._namespace = namespace
        self._bookmarks = bookmarks
        self._queue: asyncio.Queue[Change | ApiRefusal | None] = asyncio.Queue()

    def cut(self) -> None:
        """Break the stream, as a restarted server does."""
        self._queue.put_nowait(None)

    def expire(self) -> None:
        """Send 410 in the stream, and end it."""
        self._queue.put_nowait(ApiRefusal(410, "Expired", "too old resource version"))

    async def serve(
        self, request: web.Request, version: int, *, seconds: float, bookmark_seconds: float
    ) -> web.StreamResponse:
        """Send until the timeout or until the client disconnects."""
        past = list(self._store.since(self._table, version)) if version else []
        if not version:
            entries = self._table.entries
            past = [Change(entry.version, False, None, entry) for entry in entries.values()]
        self._table.watchers.add(self._queue.put_nowait)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        try:
            await response.prepare(request)
            for change in past:
                await self._send(response, change)
            await self._follow(response, seconds, bookmark_seconds)
            with contextlib.suppress(ConnectionError):
                await response.write_eof()
        finally:
            self._table.watchers.discard(self._queue.put_nowait)
        return response

    async def _follow(
        self, response: web.StreamResponse, seconds: float, bookmark_seconds: float
    ) -> None:
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + seconds
        while (remaining := ends_at - loop.time()) > 0:
            try:
                async with asyncio.timeout(min(remaining, bookmark_seconds)):
                    change = await self._queue.get()
            except TimeoutError:
                await self._bookmark(response)
                continue
            if change is None:
                return
            if isinstance(change, ApiRefusal):
                await _line(response, "ERROR", json.dumps(change.body()).encode())
                return
            await self._send(response, change)

    async def _bookmark(self, response: web.StreamResponse) -> None:
        faults = self._faults.watches
        if not self._bookmarks or faults.frozen or not faults.bookmarks:
            return
        kind = self._table.kind
        body = {
            "kind": kind.kind,
            "apiVersion": kind.api_version,
            "metadata": {"resourceVersion": str(self._store.version)},
        }
        await _line(response, "BOOKMARK", json.dumps(body).encode())

    async def _send(self, response: web.StreamResponse, change: Change) -> None:
        faults = self._faults.watches
        kind = self._kind(change)
        if not kind or faults.frozen:
            return
        if faults.delay_seconds:
            await asyncio.sleep(faults.delay_seconds)
            faults.delayed += 1
        await _line(response, kind, change.after.encoded)
        if faults.double:
            await _line(response, kind, change.after.encoded)
            faults.doubled += 1

    def _kind(self, change: Change) -> str:
        """ADDED, MODIFIED or DELETED for this selector; empty: not visible to it."""
        after = change.after.object
        if self._namespace and after["metadata"].get("namespace") != self._namespace:
            return ""
        was = change.before is not None and self._selects(change.before.object)
        now = not change.deleted and self._selects(after)
        if now:
            return "MODIFIED" if was else "ADDED"
        return "DELETED" if was else ""


async def _line(response: web.StreamResponse, kind: str, encoded: bytes) -> None:
    await response.write(b'{"type":"' + kind.encode() + b'","object":' + encoded + b"}\n")


__all__ = ["Watch"]
