"""Calls to an API server: bounded in number and time, retried, counted, with typed errors.

The official client has the configuration, the credentials and the connections. Its classes for
every kind of the API are not used: they cost three times the processor time of JSON values.

A call without a response may have been performed. So a retried create may find its own object
(AlreadyExistsError), a retried delete nothing (NotFoundError), and a retried compare-and-swap its
own write (ConflictError); callers handle these cases.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Self

import aiohttp

from flyer.kube.apiserver.errors import ApiError, UnreachableError
from flyer.kube.apiserver.limits import Limits
from flyer.kube.apiserver.responses import describe_failure, error_of_response
from flyer.kube.apiserver.streams import FAILURES, JSON, Page, Streams

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from contextlib import AbstractAsyncContextManager

    from flyer.kube.apiserver.access import Access
    from flyer.kube.apiserver.resources import Resource

__all__ = ["Api", "Object"]

Object = dict[str, Any]

JSON_PATCH: Final = "application/json-patch+json"
MERGE_PATCH: Final = "application/merge-patch+json"
APPLY_PATCH: Final = "application/apply-patch+yaml"


def _observe_nothing(_verb: str, _resource: str, _code: int, _seconds: float) -> None:
    pass


class Api(Streams):
    """One API server.

    `observe(verb, resource, code, seconds)` is called for every try (code 0: no response).
    """

    def __init__(
        self,
        access: Access,
        *,
        agent: str,
        limits: Limits = Limits(),  # noqa: B008 - frozen
        observe: Callable[[str, str, int, float], None] = _observe_nothing,
    ) -> None:
        super().__init__(access, agent, limits, observe)
        self._slots: AbstractAsyncContextManager[None] = asyncio.Semaphore(limits.concurrency_max)
        self._fence: Callable[[], float] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def fenced(self, fence: Callable[[], float]) -> Api:
        """A copy for a writer that may lose leadership, with the same connections.

        `fence` returns the seconds for which writes are still permitted, or raises; no try of a
        writing call outlasts them.
        """
        copy = self.with_limiter(self._slots)
        copy._fence = fence
        return copy

    def with_limiter(
        self, slots: AbstractAsyncContextManager[None], answer_seconds: float | None = None
    ) -> Api:
        """A copy with the same connections and fence whose calls queue separately.

        Urgent calls then do not queue behind bulk calls. `slots`, a semaphore or a `Limiter`, is
        entered for each try. A try takes at most `answer_seconds`, if less than the limit.
        """
        limits = self.limits
        if answer_seconds is not None and answer_seconds < limits.answer_seconds:
            limits = replace(limits, answer_seconds=answer_seconds)
        copy = Api(self._access, agent=self._agent, limits=limits, observe=self._observe)
        copy._connections = self._opened()
        copy._fence = self._fence
        copy._slots = slots
        return copy

    # -- verbs ---------------------------------------------------------------------------------

    async def get(self, resource: Resource, name: str, namespace: str = "") -> Object:
        """One object."""
        return await self._call("get", "GET", resource, namespace, name)

    async def pages(
        self, resource: Resource, namespace: str = "", **selectors: str
    ) -> AsyncIterator[Page]:
        """All objects, page by page. GoneError: the list expired, start again."""
        query: dict[str, str] = {"limit": str(self.limits.page_objects), **selectors}
        while True:
            answer = await self._call("list", "GET", resource, namespace, query=query)
            metadata = answer["metadata"]
            yield Page(metadata.get("resourceVersion", ""), answer.get("items") or [])
            if not metadata.get("continue"):
                return
            query["continue"] = metadata["continue"]

    async def list(self, resource: Resource, namespace: str = "", **selectors: str) -> list[Object]:
        """All objects in one list."""
        items: list[Object] = []
        async for page in self.pages(resource, namespace, **selectors):
            items += page.items
        return items

    async def create(
        self,
        resource: Resource,
        value: Object,
        namespace: str = "",
        *,
        dry_run: bool = False,
        strict: bool = False,
    ) -> Object:
        """Create an object; AlreadyExistsError may mean that a previous try was performed.

        `dry_run`: validate without storing. `strict`: reject unknown fields.
        """
        query = {"dryRun": "All"} if dry_run else {}
        if strict:
            query["fieldValidation"] = "Strict"
        return await self._call("create", "POST", resource, namespace, body=value, query=query)

    async def replace(self, resource: Resource, value: Object, subresource: str = "") -> Object:
        """Replace the object; with a resourceVersion in it, a compare-and-swap."""
        metadata = value["metadata"]
        return await self._call(
            "update", "PUT", resource, metadata.get("namespace", ""), metadata["name"],
            subresource, body=value,
        )  # fmt: skip

    async def merge(
        self,
        resource: Resource,
        name: str,
        patch: Object,
        namespace: str = "",
        subresource: str = "",
    ) -> Object:
        """Apply a JSON merge patch; with metadata.resourceVersion in it, a compare-and-swap."""
        return await self._call(
            "patch", "PATCH", resource, namespace, name, subresource, body=patch,
            content_type=MERGE_PATCH,
        )  # fmt: skip

    async def patch(
        self,
        resource: Resource,
        name: str,
        operations: Sequence[Object],
        namespace: str = "",
        subresource: str = "",
    ) -> Object:
        """Apply a JSON patch (RFC 6902). InvalidError: a test in it failed."""
        return await self._call(
            "patch", "PATCH", resource, namespace, name, subresource, body=operations,
            content_type=JSON_PATCH,
        )  # fmt: skip

    async def apply(
        self,
        resource: Resource,
        value: Object,
        *,
        manager: str,
        subresource: str = "",
    ) -> Object:
        """Server-side apply: set these fields and own them."""
        metadata = value["metadata"]
        return await self._call(
            "patch", "PATCH", resource, metadata.get("namespace", ""), metadata["name"],
            subresource, body=value, content_type=APPLY_PATCH,
            query={"fieldManager": manager, "force": "true"},
        )  # fmt: skip

    async def delete(
        self,
        resource: Resource,
        name: str,
        namespace: str = "",
        *,
        uid: str = "",
        grace_seconds: int | None = None,
        propagation: str = "",
    ) -> None:
        """Delete the object; NotFoundError may mean that a previous try was performed.

        `propagation`: what happens to the objects that it owns, if not the default of its kind.
        """
        options: Object = {"apiVersion": "v1", "kind": "DeleteOptions"}
        if uid:
            options["preconditions"] = {"uid": uid}
        if grace_seconds is not None:
            options["gracePeriodSeconds"] = grace_seconds
        if propagation:
            options["propagationPolicy"] = propagation
        await self._call("delete", "DELETE", resource, namespace, name, body=options)

    async def delete_all(self, resource: Resource, namespace: str, **selectors: str) -> None:
        """Delete all objects that match the selectors, in one call."""
        await self._call("deletecollection", "DELETE", resource, namespace, query=selectors)

    async def post(
        self, resource: Resource, name: str, namespace: str, subresource: str, value: Object
    ) -> Object:
        """Create a subresource, such as a pod's binding."""
        return await self._call(
            "create", "POST", resource, namespace, name, subresource, body=value
        )

    # -- inside --------------------------------------------------------------------------------

    async def _call(
        self,
        verb: str,
        method: str,
        resource: Resource,
        namespace: str = "",
        name: str = "",
        subresource: str = "",
        *,
        body: Object | Sequence[Object] | None = None,
        content_type: str = JSON,
        query: dict[str, str] | None = None,
    ) -> Object:
        kind = f"{resource.plural}/{subresource}" if subresource else resource.plural
        place = "/".join(part for part in (namespace, name) if part)
        label = f"{verb} {kind}" + (f" {place}" if place else "")
        path = resource.path(namespace, name, subresource)
        spent_seconds = 0.0  # in tries and pauses; waiting for a slot does not count
        pause_seconds = self.limits.backoff_seconds
        while True:
            async with self._slots:
                started_at = time.monotonic()
                try:
                    return await self._try(
                        verb, method, kind, label, path, query, body, content_type
                    )
                except ApiError as error:
                    failure = error
            spent_seconds += time.monotonic() - started_at
            wait_seconds = failure.retry_after_seconds
            if wait_seconds is None:
                wait_seconds = pause_seconds * random.uniform(0.5, 1.5)  # noqa: S311 - spreads
            spent_seconds += wait_seconds
            if not failure.retryable or spent_seconds >= self.limits.call_seconds:
                raise failure
            await asyncio.sleep(wait_seconds)
            pause_seconds = min(2 * pause_seconds, self.limits.backoff_seconds_max)

    async def _try(
        self,
        verb: str,
        method: str,
        kind: str,
        label: str,
        path: str,
        query: dict[str, str] | None,
        body: Object | Sequence[Object] | None,
        content_type: str,
    ) -> Object:
        answer_seconds = self.limits.answer_seconds
        if self._fence is not None and method != "GET":
            answer_seconds = min(answer_seconds, self._fence())
        timeout = aiohttp.ClientTimeout(
            total=answer_seconds, sock_connect=self.limits.connect_seconds
        )
        started, status = time.monotonic(), 0
        try:
            async with await self._send(
                method, path, query, timeout, body, content_type
            ) as response:
                status = response.status
                content = await response.read()
                if status >= 400:
                    raise error_of_response(label, response, content)
                value = json.loads(content)
                assert isinstance(value, dict), label
                return value
        except FAILURES as error:
            status = 0
            raise UnreachableError(label, describe_failure(error)) from error
        finally:
            self._observe(verb, kind, status, time.monotonic() - started)
