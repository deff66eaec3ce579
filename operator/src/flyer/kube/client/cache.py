"""A copy of all objects of one kind, kept by list and watch.

The first list is the API server's own cached one, which may be a little old: the watch that follows
tells the rest, and `reach` says when. Later lists are read from the store.

A kind that the server does not know (404) has no objects if it is `optional`. Of any other that
answer is an error like an outage: the copy stays as it is, and callers of `synced` keep waiting.

Owns one task. What was seen twice, late or out of order changes nothing: an object is replaced by
a newer version of itself alone. What was missed (a stream that fell silent, a history that is
gone) is found by listing again. Between losing the server and hearing it again the copy is old,
which `age_seconds` says.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from flyer.kube.client.errors import ApiError, GoneError, NotFoundError, UnreachableError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from flyer.kube.client.api import Api
    from flyer.kube.client.resources import Resource
    from flyer.kube.client.streams import Page

__all__ = ["Cache", "Key", "WatchSettings"]

T = TypeVar("T")
Key = tuple[str, str]  # namespace ("" for cluster-wide kinds), name

_DELETIONS_KEPT: Final = 1024

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchSettings:
    """Times in seconds."""

    silence_seconds: float = 75.0
    """A healthy server sends a bookmark a minute; a stream that is silent for longer is dead."""
    stream_seconds: int = 290
    """Streams end by themselves after so long, so that load balances over API servers."""
    backoff_seconds: float = 0.1
    backoff_seconds_max: float = 5.0


@dataclass(slots=True)
class _Held(Generic[T]):
    version: int
    value: T


class Cache(Generic[T]):
    """Objects as `shape` makes them from JSON.

    `changed(key, before, after)` is told of each change, with None for what is not there.
    """

    def __init__(
        self,
        api: Api,
        resource: Resource,
        shape: Callable[[dict[str, Any]], T],
        changed: Callable[[Key, T | None, T | None], None],
        *,
        settings: WatchSettings = WatchSettings(),
        optional: bool = False,
        **selectors: str,
    ) -> None:
        self.resource = resource
        self.synced = asyncio.Event()
        self.relists = 0
        self._api = api
        self._shape = shape
        self._changed = changed
        self._settings = settings
        self._optional = optional  # the kind may not be installed: then there is none of it
        self._selectors = selectors
        self._held: dict[Key, _Held[T]] = {}
        self._deleted: OrderedDict[Key, int] = OrderedDict()
        self._heard_at = time.monotonic()
        self._breaks = 0  # of the stream, one after the other, with no word from the server between
        self._told = 0  # the version up to which a list or the watch has told everything
        self._told_more = asyncio.Event()

    # -- reading -------------------------------------------------------------------------------

    def get(self, namespace: str, name: str) -> T | None:
        """The object as last seen."""
        held = self._held.get((namespace, name))
        return held.value if held else None

    def values(self) -> Iterator[T]:
        """All objects."""
        return (held.value for held in self._held.values())

    def __len__(self) -> int:
        return len(self._held)

    @property
    def age_seconds(self) -> float:
        """Since the server was last heard: an event, a bookmark, or a whole list."""
        return time.monotonic() - self._heard_at

    async def reach(self, version: int, seconds: float) -> bool:
        """Whether everything up to a version has been told; waits so long for it at most.

        The version must be one of this kind's: others' are not told here.
        """
        try:
            async with asyncio.timeout(seconds):
                while self._told < version:
                    self._told_more.clear()
                    await self._told_more.wait()
        except TimeoutError:
            return False
        return True

    # -- writing -------------------------------------------------------------------------------

    def offer(self, value: dict[str, Any]) -> None:
        """Take in what a write of ours answered, before the watch tells it."""
        key, version = _key(value), _version(value)
        if version > self._deleted.get(key, 0):
            self._put(key, version, value)

    def put(self, key: Key, version: int, shaped: T) -> None:
        """As `offer`, for what the caller has shaped; `changed` is not told."""
        held = self._held.get(key)
        if version > max(held.version if held else 0, self._deleted.get(key, 0)):
            self._held[key] = _Held(version, shaped)

    async def refresh(self) -> None:
        """List now: when this returns, all that was written before the call has been seen."""
        await self._list(self._pages())

    async def run(self) -> None:
        """Keep the copy until cancelled."""
        version, pause_seconds = "", self._settings.backoff_seconds
        while True:
            try:
                if not version:
                    pages = self._snapshot() if not self.synced.is_set() else self._pages()
                    version = await self._list(pages)
                version = await self._watch(version)
                pause_seconds = self._settings.backoff_seconds
                continue
            except GoneError:
                version = ""
                self.relists += 1
            except NotFoundError as error:
                version = ""
                if self._optional:
                    self._drop_missing(set(), {key: one.version for key, one in self._held.items()})
                    self._heard()
                    pause_seconds = self._settings.backoff_seconds_max
                else:
                    # Whoever answers so is not asked by us to end all that runs: a proxy, an API
                    # server that starts, a definition that is being replaced.
                    log.warning(
                        "%s: the API server does not know this kind, so the %d objects known of it "
                        "are kept and it is asked again; is the CustomResourceDefinition "
                        "installed? (%s)", self.resource.plural, len(self._held), error,
                    )  # fmt: skip
            except ApiError as error:
                if isinstance(error, UnreachableError) and self._silent:
                    # Dead, or a kind of which nothing happens: some servers send no bookmarks
                    # before a kind's first event. A new list tells which.
                    log.info("%s: silent, so it is listed again", self.resource.plural)
                    version = ""
                    self.relists += 1
                else:
                    log.warning("%s: %s", self.resource.plural, error)
            await asyncio.sleep(pause_seconds * random.uniform(0.5, 1.5))  # noqa: S311 - spreads
            pause_seconds = min(2 * pause_seconds, self._settings.backoff_seconds_max)

    # -- inside --------------------------------------------------------------------------------

    @property
    def _silent(self) -> bool:
        return self.age_seconds >= self._settings.silence_seconds

    def _heard(self, version: str = "") -> None:
        self._heard_at = time.monotonic()
        self.synced.set()
        if version and int(version) > self._told:
            self._told = int(version)
            self._told_more.set()

    def _pages(self) -> AsyncIterator[Page]:
        return self._api.pages(self.resource, **self._selectors)

    def _snapshot(self) -> AsyncIterator[Page]:
        return self._api.snapshot(self.resource, **self._selectors)

    async def _list(self, pages: AsyncIterator[Page]) -> str:
        found: set[Key] = set()
        before = {key: held.version for key, held in self._held.items()}
        version = ""
        # Page by page: the JSON of all objects at once would need many times the room.
        async for page in pages:
            version = version or page.version
            for item in page.items:
                key = _key(item)
                found.add(key)
                self._put(key, _version(item), item)
            self._heard_at = time.monotonic()
        self._drop_missing(found, before)
        self._heard(version)
        return version

    def _drop_missing(self, found: set[Key], before: dict[Key, int]) -> None:
        """What was held when the list began, is not in it, and has not changed since, is gone."""
        for key, version in before.items():
            held = self._held.get(key)
            if key not in found and held is not None and held.version == version:
                self._drop(key, version)

    async def _watch(self, version: str) -> str:
        seconds = int(self._settings.stream_seconds * random.uniform(0.8, 1.0))  # noqa: S311
        stream = self._api.watch(
            self.resource,
            version=version,
            silence_seconds=self._settings.silence_seconds,
            timeout_seconds=seconds,
            **self._selectors,
        )
        try:
            async for kind, value in stream:
                self._breaks = 0
                version = value["metadata"]["resourceVersion"]
                if kind == "DELETED":
                    self._drop(_key(value), _version(value))
                elif kind != "BOOKMARK":
                    self._put(_key(value), _version(value), value)
                self._heard(version)
        except UnreachableError as error:
            if self._silent:
                raise
            # Cut, not silent: what was seen stays seen, and the stream goes on behind it.
            level = logging.DEBUG if self._breaks else logging.INFO  # once an outage
            log.log(level, "%s: the watch broke and goes on: %s", self.resource.plural, error)
            await asyncio.sleep(self._pause_seconds(self._breaks))
            self._breaks += 1
        return version

    def _pause_seconds(self, breaks: int) -> float:
        """Before the next try, after so many without a word between; spread over replicas."""
        longest = self._settings.backoff_seconds * 2.0 ** min(breaks, 16)
        return min(longest, self._settings.backoff_seconds_max) * random.uniform(0.5, 1.5)  # noqa: S311

    def _put(self, key: Key, version: int, value: dict[str, Any]) -> None:
        held = self._held.get(key)
        if held is not None and version <= held.version:
            return
        try:
            shaped = self._shape(value)
        except Exception:
            # One object's content must not end the watch of all. What was known of it stays.
            log.exception("%s %s cannot be read and is ignored", self.resource.plural, key)
            return
        before = held.value if held else None
        self._held[key] = _Held(version, shaped)
        self._changed(key, before, shaped)

    def _drop(self, key: Key, version: int) -> None:
        held = self._held.get(key)
        if held is None or version < held.version:
            return
        del self._held[key]
        self._deleted[key] = version
        if len(self._deleted) > _DELETIONS_KEPT:
            self._deleted.popitem(last=False)
        self._changed(key, held.value, None)


def _key(value: dict[str, Any]) -> Key:
    metadata = value["metadata"]
    return metadata.get("namespace", ""), metadata["name"]


def _version(value: dict[str, Any]) -> int:
    """Versions are numbers that grow, which the API guarantees since 1.35 and etcd always did."""
    return int(value["metadata"].get("resourceVersion") or 0)
