"""Calls whose answers come bit by bit: snapshots, watches, logs.

They are neither counted against the calls under way nor tried again: whoever reads a stream knows
where to go on.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import aiohttp

from flyer.kube.client.answers import lines_of, refusal_of, words_of
from flyer.kube.client.errors import UnreachableError, error_of
from flyer.kube.client.listreader import ListReader

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from flyer.kube.client.access import Access
    from flyer.kube.client.limits import Limits
    from flyer.kube.client.resources import Resource

__all__ = ["Page", "Streams"]

Object = dict[str, Any]

_JSON: Final = "application/json"
# A handshake costs as much as several calls. The API server itself hangs up after 90 s.
KEEPALIVE_SECONDS: Final = 75.0


@dataclass(frozen=True, slots=True)
class Page:
    """Some objects of a list, and the version of the whole list; "": not known yet."""

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
        """Hang up."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def snapshot(self, resource: Resource, **selectors: str) -> AsyncIterator[Page]:
        """All objects as the API server's own cache has them: at once, perhaps a little old.

        It need not read its store for that, which takes it ten times as long for custom resources.
        The last page has the version: a watch from there tells what is newer.
        """
        label = f"list {resource.plural}"
        timeout = aiohttp.ClientTimeout(
            total=self.limits.stream_seconds,
            sock_connect=self.limits.connect_seconds,
            sock_read=self.limits.answer_seconds,
        )
        begun, status, reader = time.monotonic(), 0, ListReader()
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
                    raise refusal_of(label, response, await response.read())
                async for chunk in response.content.iter_any():
                    if items := reader.feed(chunk):
                        yield Page("", items)
            items = reader.end()
            yield Page(reader.version, items)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            status = 0
            raise UnreachableError(label, words_of(error)) from error
        finally:
            self._observe("list", resource.plural, status, time.monotonic() - begun)

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
        """Events (type, object) after a version, bookmarks too, until the server ends the stream.

        GoneError: the version is too old. UnreachableError: nothing came for `silence_seconds`.
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
        begun = time.monotonic()
        try:
            async with self._opened().get(
                self._access.url + resource.path(namespace),
                params=query,
                headers=await self._headers(),
                timeout=timeout,
                ssl=self._ssl,
            ) as response:
                self._observe("watch", resource.plural, response.status, time.monotonic() - begun)
                if response.status != 200:
                    raise refusal_of(label, response, await response.read())
                async for line in lines_of(response.content):
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        status = event["object"]
                        raise error_of(
                            label, int(status.get("code", 500)), status.get("reason", ""),
                            status.get("message", "the watch failed"),
                        )  # fmt: skip
                    yield event["type"], event["object"]
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise UnreachableError(label, words_of(error)) from error

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
        """The lines of a text, such as a pod's log, until the server ends it.

        UnreachableError: the stream broke, or nothing came for `silence_seconds`.
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
                    raise refusal_of(label, response, await response.read())
                async for line in lines_of(response.content):
                    yield line
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise UnreachableError(label, words_of(error)) from error

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
                # An API server sets none, and looking for them costs each call.
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session

    async def _headers(self, content_type: str = "") -> dict[str, str]:
        headers = {"Accept": _JSON, **await self._access.headers()}
        if content_type:
            headers["Content-Type"] = content_type
        return headers
