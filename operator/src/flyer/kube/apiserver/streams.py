"""Streaming calls: snapshots, watches and logs.

They do not count against the concurrency limit and are not retried: the reader of a stream knows
where to resume.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import aiohttp

from flyer.kube.apiserver.errors import UnreachableError, error_of
from flyer.kube.apiserver.list_reader import ListReader
from flyer.kube.apiserver.responses import describe_failure, error_of_response, iter_lines

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from flyer.kube.apiserver.access import Access
    from flyer.kube.apiserver.limits import Limits
    from flyer.kube.apiserver.resources import Resource

__all__ = ["Page", "Streams"]

Object = dict[str, Any]

_JSON: Final = "application/json"
# A handshake costs as much as several calls. The API server closes idle connections after 90 s.
KEEPALIVE_SECONDS: Final = 75.0


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
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

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
            async with self._opened().get(
                self._access.url + resource.path(),
                params={"resourceVersion": "0", **selectors},
                headers=await self._headers(),
                timeout=timeout,
                ssl=self._ssl,
            ) as response:
                status = response.status
                if status != 200:
                    raise error_of_response(label, response, await response.read())
                async for chunk in response.content.iter_any():
                    if items := reader.feed(chunk):
                        yield Page("", items)
            items = reader.end()
            yield Page(reader.version, items)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
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
            async with self._opened().get(
                self._access.url + resource.path(namespace),
                params=query,
                headers=await self._headers(),
                timeout=timeout,
                ssl=self._ssl,
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
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
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

        UnreachableError: the stream broke, or no data arrived for `silence_seconds`.
        """
        label = f"read {resource.plural}/{subresource} {namespace}/{name}"
        timeout = aiohttp.ClientTimeout(
            sock_connect=self.limits.connect_seconds, sock_read=silence_seconds
        )
        try:
            async with self._opened().get(
                self._access.url + resource.path(namespace, name, subresource),
                params=query,
                headers={**await self._headers(), "Accept": "*/*"},
                timeout=timeout,
                ssl=self._ssl,
            ) as response:
                if response.status != 200:
                    raise error_of_response(label, response, await response.read())
                async for line in iter_lines(response.content):
                    yield line
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise UnreachableError(label, describe_failure(error)) from error

    # -- inside --------------------------------------------------------------------------------

    @property
    def _ssl(self) -> Any:
        return self._access.context if self._access.context is not None else True

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECONDS)
            self._session = aiohttp.ClientSession(
                connector=connector,
                headers={"User-Agent": self._agent},
                # An API server sets no cookies, and parsing for them costs each call.
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session

    async def _headers(self, content_type: str = "") -> dict[str, str]:
        headers = {"Accept": _JSON, **await self._access.headers()}
        if content_type:
            headers["Content-Type"] = content_type
        return headers
