"""The watch cache converges to the server's objects after every fault of its watch."""

import asyncio
import contextlib

import pytest
from flyer.kube.apiserver import Cache, WatchSettings
from flyer.kube.apiserver.errors import UnreachableError
from flyer.kube.apiserver.resources import FLYERJOBS, NODEHEALTHS
from flyer.kube.apiserver.streams import Page

from fakekube import Fault


@pytest.fixture
async def watched(api_server, connect):
    """`watched(**settings)`: a running cache of each FlyerJob's maxRestarts, and its changes."""
    tasks = []

    async def start(resource=FLYERJOBS, *, optional=False, **settings):
        reported = []
        cache = Cache(
            connect(page_objects=3),
            resource,
            lambda value: value["spec"]["maxRestarts"],
            lambda key, before, after: reported.append((key[1], before, after)),
            settings=WatchSettings(backoff_seconds=0.01, **settings),
            optional=optional,
        )
        tasks.append(asyncio.create_task(cache.run()))
        async with asyncio.timeout(60):
            await cache.synced.wait()
        return cache, reported

    yield start
    for task in tasks:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


TEMPLATE = {"spec": {"containers": [{"name": "trainer", "command": ["train"]}]}}


def put_object(api_server, name, n):
    store = api_server.store
    if store.find("flyerjobs", name, "default"):
        store.patch("flyerjobs", name, {"spec": {"maxRestarts": n}}, "default")
    else:
        spec = {"nodes": 1, "template": TEMPLATE, "maxRestarts": n}
        store.create("flyerjobs", {"metadata": {"name": name}, "spec": spec}, "default")


def stored(api_server):
    return {
        job["metadata"]["name"]: job["spec"]["maxRestarts"]
        for job in api_server.store.all("flyerjobs")
    }


def cached_values(cache, api_server):
    names = [job["metadata"]["name"] for job in api_server.store.all("flyerjobs")]
    cached = {name: cache.get("default", name) for name in names}
    return cached if len(cached) == len(cache) else None


async def test_the_cache_lists_and_watches(api_server, watched, until):
    for index in range(8):
        put_object(api_server, f"j{index}", index)
    cache, reported = await watched()
    assert len(reported) == 8
    put_object(api_server, "j0", 100)
    api_server.store.delete("flyerjobs", "j1", "default")
    await until(lambda: cached_values(cache, api_server) == stored(api_server))
    assert reported[8:] == [("j0", 0, 100), ("j1", 1, None)]


async def test_duplicate_and_late_events_change_nothing(api_server, watched, until):
    cache, reported = await watched()
    api_server.faults.watches.double = True
    api_server.faults.watches.delay_seconds = 0.02
    for n in range(5):
        put_object(api_server, "a", n)
    await until(lambda: cache.get("default", "a") == 4)
    assert [after for _, _, after in reported] == [0, 1, 2, 3, 4]
    api_server.store.delete("flyerjobs", "a", "default")
    await until(lambda: len(cache) == 0)


async def test_a_write_response_is_visible_before_its_watch_event(api_server, watched):
    cache, reported = await watched()
    api_server.faults.watches.delay_seconds = 0.05
    put_object(api_server, "a", 1)
    old = api_server.store.get("flyerjobs", "a", "default")
    cache.offer(old)
    assert cache.get("default", "a") == 1
    put_object(api_server, "a", 2)
    cache.offer(api_server.store.get("flyerjobs", "a", "default"))
    cache.offer(old)
    assert cache.get("default", "a") == 2
    assert len(reported) == 2


async def test_a_deleted_object_does_not_reappear(api_server, watched, until):
    cache, _ = await watched()
    put_object(api_server, "a", 1)
    old = api_server.store.get("flyerjobs", "a", "default")
    await until(lambda: len(cache) == 1)
    api_server.store.delete("flyerjobs", "a", "default")
    await until(lambda: len(cache) == 0)
    cache.offer(old)
    assert len(cache) == 0


async def test_broken_streams_continue_at_their_position(api_server, watched, until):
    cache, reported = await watched()
    for n in range(5):
        put_object(api_server, "a", n)
        await until(lambda n=n: cache.get("default", "a") == n)
        api_server.cut_watches()
    assert cache.relists == 0
    assert [after for _, _, after in reported] == [0, 1, 2, 3, 4]


async def test_an_expired_history_causes_a_new_list(api_server, watched, until):
    put_object(api_server, "gone", 1)
    put_object(api_server, "stays", 1)
    cache, reported = await watched()
    api_server.faults.watches.frozen = True
    put_object(api_server, "new", 1)
    api_server.store.delete("flyerjobs", "gone", "default")
    api_server.faults.watches.frozen = False
    api_server.expire_watches()
    await until(lambda: cached_values(cache, api_server) == stored(api_server))
    assert cache.relists >= 1
    assert ("gone", 1, None) in reported


async def test_a_silent_stream_is_replaced(api_server, watched, until):
    cache, _ = await watched(silence_seconds=0.5)
    api_server.faults.watches.frozen = True
    put_object(api_server, "a", 1)
    await until(lambda: cached_values(cache, api_server) == stored(api_server))
    assert cache.relists >= 1


async def test_bookmarks_keep_a_stream_alive(api_server, watched, until):
    cache, _ = await watched(silence_seconds=60.0)
    for _ in range(3):
        ages = [cache.age_seconds]
        await until(lambda ages=ages: ages.append(cache.age_seconds) or ages[-1] < ages[-2])
    assert cache.relists == 0


async def test_the_server_restarts_and_refuses_for_a_while(api_server, watched, until):
    cache, _ = await watched()
    port = int(api_server.url.rpartition(":")[2])
    await api_server.close(keep_port=True)
    put_object(api_server, "a", 1)
    await asyncio.sleep(0.1)
    api_server.faults.add(Fault("refuse", code=500, times=5))
    await api_server.start(port)
    await until(lambda: cached_values(cache, api_server) == stored(api_server))


async def test_a_missing_optional_kind_is_empty(api_server, watched, until):
    del api_server.store.tables[("fireflyer.dev", "nodehealths")]
    cache, _ = await watched(NODEHEALTHS, optional=True)
    assert len(cache) == 0


async def test_a_404_for_a_required_kind_keeps_the_cache(api_server, watched, until):
    put_object(api_server, "a", 1)
    cache, changes = await watched(FLYERJOBS)
    faults = [
        Fault("refuse", verb=verb, resource="flyerjobs", code=404, reason="NotFound", times=3)
        for verb in ("watch", "list")
    ]
    for fault in faults:
        api_server.faults.add(fault)
    api_server.expire_watches("flyerjobs")
    await until(lambda: all(fault.seen >= 3 for fault in faults))
    assert len(cache) == 1
    put_object(api_server, "b", 2)
    await until(lambda: len(cache) == 2)
    assert not [change for change in changes if change[2] is None]


class UnreachableServer:
    """A server whose streams end before any event, except those with these numbers."""

    def __init__(self, *, with_event):
        self.with_event, self.streams = with_event, 0

    async def snapshot(self, resource):
        yield Page("1", [])

    async def watch(self, resource, **_):
        self.streams += 1
        if self.streams in self.with_event:
            metadata = {"namespace": "default", "name": "a", "resourceVersion": str(self.streams)}
            yield "ADDED", {"metadata": metadata}
        raise UnreachableError("watch flyerjobs", "refused")


async def test_an_unreachable_server_is_retried_with_backoff_and_logged_once(caplog, until):
    caplog.set_level("INFO", "flyer.kube.apiserver.cache")
    api = UnreachableServer(with_event={5})
    settings = WatchSettings(backoff_seconds=0.01, backoff_seconds_max=0.04)
    cache = Cache(api, FLYERJOBS, dict, lambda *_: None, settings=settings)
    task = asyncio.create_task(cache.run())
    await until(lambda: api.streams >= 10)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert len([record for record in caplog.records if "interrupted" in record.getMessage()]) == 2
    pauses = [cache._pause_seconds(breaks) for breaks in (0, 1, 2, 3, 1000)]
    for pause, middle in zip(pauses, (0.01, 0.02, 0.04, 0.04, 0.04), strict=True):
        assert middle * 0.5 <= pause <= middle * 1.5
