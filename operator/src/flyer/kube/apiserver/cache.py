"""Cache of all objects of one kind, maintained by list and watch.

The first list comes from the API server's cache and may be slightly stale: the watch that follows
reports the rest, and `reach` waits for it. Later lists are read from the store.

If the server does not know the kind (404), an `optional` kind has no objects. For any other kind
this is an error like an outage: the cache keeps its objects, and waiters for `synced` keep waiting.

Runs in one task. Duplicate, late and reordered events have no effect: an object is replaced only by
a newer version of itself. Missed events (a silent stream, an expired history) are recovered by
listing again. While the server is unreachable the cache is stale, as `age_seconds` reports.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from flyer.kube.apiserver.errors import ApiError, GoneError, NotFoundError, UnreachableError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from flyer.kube.apiserver.api import Api
    from flyer.kube.apiserver.resources import Resource
    from flyer.kube.apiserver.streams import Page

__all__ = ["Cache", "Key", "WatchSettings"]

T = TypeVar("T")
Key = tuple[str, str]  # namespace ("" for cluster-wide kinds), name

_DELETIONS_KEPT: Final = 1024

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchSettings:
    """Times in seconds."""

    silence_seconds: float = 75.0
    """A healthy server sends a bookmark every minute; a stream silent for longer is dead."""
    stream_seconds: int = 290
    """Duration of a stream, after which it is reopened, so that load balances over API servers."""
    backoff_seconds: float = 0.1
    backoff_seconds_max: float = 5.0


@dataclass(slots=True)
class _Held(Generic[T]):
    version: int
    value: T


class Cache(Generic[T]):
    """Objects as `shape` converts them from JSON.

    `changed(key, before, after)` is called for each change, with None for a missing object.
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
        self._optional = optional  # the kind may not be installed
        self._selectors = selectors
        self._held: dict[Key, _Held[T]] = {}
        self._deleted: OrderedDict[Key, int] = OrderedDict()
        self._heard_at = time.monotonic()
        self._breaks = 0  # consecutive breaks of the stream without an event in between
        self._observed = 0  # version up to which every change has been observed
        self._observed_more = asyncio.Event()

    # -- reading -------------------------------------------------------------------------------

    def get(self, namespace: str, name: str) -> T | None:
        """The object as last seen."""
        entry = self._held.get((namespace, name))
        return entry.value if entry else None

    def values(self) -> Iterator[T]:
        """All objects."""
        return (entry.value for entry in self._held.values())

    def __len__(self) -> int:
        return len(self._held)

    @property
    def age_seconds(self) -> float:
        """Time since the last event, bookmark or complete list."""
        return time.monotonic() - self._heard_at

    async def reach(self, version: int, seconds: float) -> bool:
        """Wait until every change up to a version has been observed; False after `seconds`.

        The version must be of an object of this kind.
        """
        try:
            async with asyncio.timeout(seconds):
                while self._observed < version:
                    self._observed_more.clear()
                    await self._observed_more.wait()
        except TimeoutError:
            return False
        return True

    # -- writing -------------------------------------------------------------------------------

    def offer(self, value: dict[str, Any]) -> None:
        """Put the object returned by a write, before the watch reports it."""
        key, version = _key(value), _version(value)
        if version > self._deleted.get(key, 0):
            self._put(key, version, value)

    def put(self, key: Key, version: int, shaped: T) -> None:
        """As `offer`, for a converted object; `changed` is not called."""
        entry = self._held.get(key)
        if version > max(entry.version if entry else 0, self._deleted.get(key, 0)):
            self._held[key] = _Held(version, shaped)

    async def refresh(self) -> None:
        """List now: afterwards, all writes that preceded the call have been observed."""
        await self._list(self._pages())

    async def run(self) -> None:
        """Maintain the cache until cancelled."""
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
                    self._drop_missing(
                        set(), {key: entry.version for key, entry in self._held.items()}
                    )
                    self._heard()
                    pause_seconds = self._settings.backoff_seconds_max
                else:
                    # Keep the objects, because dropping them would stop all running jobs: the
                    # response may be that of a proxy, of a starting API server, or be caused by a
                    # replacement of the definition.
                    log.warning(
                        "%s: the API server does not know this kind: keeping %d cached objects and "
                        "retrying; is the CustomResourceDefinition "
                        "installed? (%s)", self.resource.plural, len(self._held), error,
                    )  # fmt: skip
            except ApiError as error:
                if isinstance(error, UnreachableError) and self._silent:
                    # Either dead, or a kind without events: some servers send no bookmarks before
                    # a kind's first event. A new list decides.
                    log.info("%s: watch is silent, listing again", self.resource.plural)
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
        if version and int(version) > self._observed:
            self._observed = int(version)
            self._observed_more.set()

    def _pages(self) -> AsyncIterator[Page]:
        return self._api.pages(self.resource, **self._selectors)

    def _snapshot(self) -> AsyncIterator[Page]:
        return self._api.snapshot(self.resource, **self._selectors)

    async def _list(self, pages: AsyncIterator[Page]) -> str:
        keys: set[Key] = set()
        before = {key: entry.version for key, entry in self._held.items()}
        version = ""
        # Page by page: the JSON of all objects would need many times the memory.
        async for page in pages:
            version = version or page.version
            for item in page.items:
                key = _key(item)
                keys.add(key)
                self._put(key, _version(item), item)
            self._heard_at = time.monotonic()
        self._drop_missing(keys, before)
        self._heard(version)
        return version

    def _drop_missing(self, listed: set[Key], before: dict[Key, int]) -> None:
        """Drop objects cached before the list that are not in it and have not changed since."""
        for key, version in before.items():
            entry = self._held.get(key)
            if key not in listed and entry is not None and entry.version == version:
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
            # Interrupted, not silent: resume from the last version.
            level = logging.DEBUG if self._breaks else logging.INFO  # once per outage
            log.log(level, "%s: watch interrupted, resuming: %s", self.resource.plural, error)
            await asyncio.sleep(self._pause_seconds(self._breaks))
            self._breaks += 1
        return version

    def _pause_seconds(self, breaks: int) -> float:
        """Jittered back-off after consecutive breaks."""
        longest = self._settings.backoff_seconds * 2.0 ** min(breaks, 16)
        return min(longest, self._settings.backoff_seconds_max) * random.uniform(0.5, 1.5)  # noqa: S311

    def _put(self, key: Key, version: int, value: dict[str, Any]) -> None:
        entry = self._held.get(key)
        if entry is not None and version <= entry.version:
            return
        try:
            shaped = self._shape(value)
        except Exception:
            # One object's content must not end the watch. The previous version stays.
            log.exception("ignoring unreadable %s %s", self.resource.plural, key)
            return
        before = entry.value if entry else None
        self._held[key] = _Held(version, shaped)
        self._changed(key, before, shaped)

    def _drop(self, key: Key, version: int) -> None:
        entry = self._held.get(key)
        if entry is None or version < entry.version:
            return
        del self._held[key]
        self._deleted[key] = version
        if len(self._deleted) > _DELETIONS_KEPT:
            self._deleted.popitem(last=False)
        self._changed(key, entry.value, None)


def _key(value: dict[str, Any]) -> Key:
    metadata = value["metadata"]
    return metadata.get("namespace", ""), metadata["name"]


def _version(value: dict[str, Any]) -> int:
    """Versions are increasing numbers: guaranteed by the API since 1.35, and by etcd before."""
    return int(value["metadata"].get("resourceVersion") or 0)
