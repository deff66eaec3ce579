"""Streaming calls: snapshots, watches and logs.

They do not count against the concurrency limit and are not retried: the reader of a stream knows
where to resume.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode

import aiohttp

from flyer.kube.apiserver.access import AccessError, Connections
from flyer.kube.apiserver.errors import UnreachableError, error_of
from flyer.kube.apiserver.list_reader import ListReader
from flyer.kube.apiserver.responses import describe_failure, error_of_response, iter_lines

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from flyer.kube.apiserver.access import Access
    from flyer.kube.apiserver.limits import Limits
    from flyer.kube.apiserver.resources import Resource

__all__ = ["Page", "Streams"]

Object = dict[str, Any]

JSON: Final = "application/json"
FAILURES: Final = (aiohttp.ClientError, OSError, TimeoutError, ValueError, AccessError)
"""A call that got no response, or one that cannot be read."""


@dataclass(frozen=True, slots=True)
class Page:
    """Some objects of a list, and the version of the whole list; "": unknown."""

    version: str
    items: list[Object]


class Streams:
    """The connections to one API server, and the streams over them."""

    def __init__(
        self,
        access: Access,
        agent: str,
        limits: Limits,
        observe: Callable[[str, str, int, float], None],
    ) -> None:
        self.limits = limits
        self._access = access
        self._agent = agent
        self._observe = observe
        self._connections: Connections | None = None

    async def close(self) -> None:
        """Close the connections."""
        if self._connections is not None:
            await self._connections.close()
            self._connections = None

    async def snapshot(self, resource: Resource, **selectors: str) -> AsyncIterator[Page]:
        """All objects from the API server's cache, possibly slightly stale.

        This avoids a read of its store, which takes ten times as long for custom resources. The
        last page has the version, from which a watch reports newer changes.
        """
        label = f"list {resource.plural}"
        timeout = aiohttp.ClientTimeout(
            total=self.limits.stream_seconds,
            sock_connect=self.limits.connect_seconds,
            sock_read=self.limits.answer_seconds,
        )
        started, status, reader = time.monotonic(), 0, ListReader()
        try:
            async with await self._send(
                "GET", resource.path(), {"resourceVersion": "0", **selectors}, timeout
            ) as response:
                status = response.status
                if status != 200:
                    raise error_of_response(label, response, await response.read())
                async for chunk in response.content.iter_any():
                    if items := reader.feed(chunk):
                        yield Page("", items)
            items = reader.end()
            yield Page(reader.version, items)
        except FAILURES as error:
            status = 0
            raise UnreachableError(label, describe_failure(error)) from error
        finally:
            self._observe("list", resource.plural, status, time.monotonic() - started)

    async def watch(
        self,
        resource: Resource,
        namespace: str = "",
        *,
        version: str,
        silence_seconds: float,
        timeout_seconds: int,
        **selectors: str,
    ) -> AsyncIterator[tuple[str, Object]]:
        """Events (type, object) after a version, including bookmarks, until the stream ends.

        GoneError: the version is too old. UnreachableError: no event for `silence_seconds`.
        """
        label = f"watch {resource.plural}"
        query = {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(timeout_seconds),
            **selectors,
        }
        timeout = aiohttp.ClientTimeout(
            sock_connect=self.limits.connect_seconds, sock_read=silence_seconds
        )
        started = time.monotonic()
        try:
            async with await self._send(
                "GET", resource.path(namespace), query, timeout
            ) as response:
                self._observe("watch", resource.plural, response.status, time.monotonic() - started)
                if response.status != 200:
                    raise error_of_response(label, response, await response.read())
                async for line in iter_lines(response.content):
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        status = event["object"]
                        raise error_of(
                            label, int(status.get("code", 500)), status.get("reason", ""),
                            status.get("message", "the watch failed"),
                        )  # fmt: skip
                    yield event["type"], event["object"]
        except FAILURES as error:
            raise UnreachableError(label, describe_failure(error)) from error

    async def lines(
        self,
        resource: Resource,
        name: str,
        namespace: str,
        subresource: str,
        *,
        silence_seconds: float,
        **query: str,
    ) -> AsyncIterator[bytes]:
        """The lines of a text, such as a pod's log, until the stream ends.

        A pod without a node has no lines (status 204).

        UnreachableError: the stream broke, or no data arrived for `silence_seconds`.
        """
        label = f"read {resource.plural}/{subresource} {namespace}/{name}"
        timeout = aiohttp.ClientTimeout(
            sock_connect=self.limits.connect_seconds, sock_read=silence_seconds
        )
        try:
            async with await self._send(
                "GET", resource.path(namespace, name, subresource), query, timeout, accept="*/*"
            ) as response:
                if response.status == 204:
                    return
                if response.status != 200:
                    raise error_of_response(label, response, await response.read())
                async for line in iter_lines(response.content):
                    yield line
        except FAILURES as error:
            raise UnreachableError(label, describe_failure(error)) from error

    # -- inside --------------------------------------------------------------------------------

    def _opened(self) -> Connections:
        if self._connections is None:
            self._connections = Connections(self._access)
        return self._connections

    async def _send(
        self,
        method: str,
        path: str,
        query: dict[str, str] | None,
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109 - of aiohttp
        body: Object | Sequence[Object] | None = None,
        content_type: str = JSON,
        accept: str = JSON,
    ) -> aiohttp.ClientResponse:
        headers = {"Accept": accept, "Content-Type": content_type, "User-Agent": self._agent}
        answer = await self._opened().request(  # type: ignore[no-untyped-call]
            method,
            self._access.host + path + (f"?{urlencode(query)}" if query else ""),
            headers | await self._access.headers(),
            body,
            _request_timeout=timeout,
        )
        response: aiohttp.ClientResponse = answer.response
        return response
