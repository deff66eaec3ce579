"""The proxy kills the client of each distinct write once."""

import asyncio

import pytest
from flyer.kube.apiserver import Access, Api, Limits
from flyer.kube.apiserver.errors import ConflictError, UnreachableError
from flyer.kube.apiserver.resources import LEASES, PODS

from fakekube import ApiServer
from fakekube.real_server.proxy import Proxy
from fakekube.real_server.reaper import Reaper

LEASE = {
    "apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": "a"}, "spec": {},
}  # fmt: skip
LIMITS = Limits(answer_seconds=2.0, call_seconds=0.5, backoff_seconds=0.01)


def pod(name):
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": {}}


def key_of(call, body):
    return None if call.resource == "leases" else (call.verb, call.resource, call.name or str(body))


@pytest.fixture
async def stand():
    killed = []

    async def kill(agent):
        killed.append(agent)

    async with ApiServer() as server, Proxy(Access(server.url)) as proxy:
        proxy.reaper = Reaper("operator", key_of, kill)
        apis = []

        def api(agent):
            apis.append(Api(Access(proxy.url), agent=agent, limits=LIMITS))
            return apis[-1]

        yield proxy, api, killed
        for item in apis:
            await item.close()


async def test_each_different_write_kills_once_and_is_performed(stand):
    proxy, api, killed = stand
    with pytest.raises(UnreachableError):
        await api("operator-1").create(PODS, pod("a"), "default")
    second = api("operator-2")
    assert [item["metadata"]["name"] for item in await second.list(PODS)] == ["a"]
    await second.create(LEASES, LEASE, "default")
    with pytest.raises(UnreachableError):
        await second.delete(PODS, "a", "default")
    third = api("operator-3")
    assert await third.list(PODS) == []
    # The same request again kills no other client.
    await third.create(PODS, pod("a"), "default")
    assert killed == ["operator-1", "operator-2"]
    assert list(proxy.reaper.deaths.values()) == killed
    assert list(proxy.reaper.seen.values()) == [2, 1]


async def test_one_of_several_concurrent_writes_is_performed(stand):
    _, api, killed = stand
    first = api("operator-1")
    creations = [first.create(PODS, pod(name), "default") for name in "abc"]
    assert all(
        isinstance(item, UnreachableError)
        for item in await asyncio.gather(*creations, return_exceptions=True)
    )
    assert len(await api("operator-2").list(PODS)) == 1
    assert killed == ["operator-1"]


async def test_refused_writes_and_other_agents_are_not_killed(stand):
    _, api, killed = stand
    other, operator = api("test"), api("operator-1")
    created = await other.create(PODS, pod("a"), "default")
    await other.merge(PODS, "a", {"metadata": {"labels": {"b": "c"}}}, "default")
    with pytest.raises(ConflictError):
        await operator.replace(PODS, created)
    assert killed == []
