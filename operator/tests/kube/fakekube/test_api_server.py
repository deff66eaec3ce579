"""The in-memory API server behaves as a real one where the operator depends on it."""

import asyncio
import json

import aiohttp
import pytest

from fakekube import ApiServer, Call, Exit, Fault, Faults, Kubelets
from fakekube.apiserver.admission import OPERATOR, acting
from fakekube.apiserver.garbage import collect_garbage
from fakekube.apiserver.patches import apply, json_patch, merge, strategic
from fakekube.errors import ApiRefusal
from fakekube.generators.samples import job_object as job
from fakekube.generators.samples import owned_by

JOBS = "/apis/fireflyer.dev/v1alpha1/namespaces/default/flyerjobs"
MERGE = {"Content-Type": "application/merge-patch+json"}
AS_OPERATOR = MERGE | acting(OPERATOR)


@pytest.fixture
async def api():
    async with ApiServer(bookmark_seconds=0.05) as server:
        yield server


@pytest.fixture
async def http(api):
    async with aiohttp.ClientSession(api.url, headers={"User-Agent": "test"}) as session:
        yield session


async def events(response, count):
    received = []
    async with asyncio.timeout(60):
        while len(received) < count:
            event = json.loads(await response.content.readline())
            if event["type"] != "BOOKMARK":
                received.append(event)
    return received


async def test_a_status_is_a_subresource_and_compared_by_version(http):
    answer = await http.post(JOBS, json={**job("a", nodes=1), "status": {"phase": "Failed"}})
    assert answer.status == 201
    created = await answer.json()
    assert "status" not in created
    version = created["metadata"]["resourceVersion"]
    patch = {"metadata": {"resourceVersion": version}, "status": {"phase": "Queued"}}
    answer = await http.patch(f"{JOBS}/a/status", json=patch, headers=AS_OPERATOR)
    assert answer.status == 200
    assert (await answer.json())["metadata"]["generation"] == 1
    answer = await http.patch(f"{JOBS}/a/status", json=patch, headers=AS_OPERATOR)
    assert answer.status == 409
    assert (await answer.json())["reason"] == "Conflict"
    answer = await http.patch(f"{JOBS}/a", json={"spec": {"nodes": 2}}, headers=MERGE)
    changed = await answer.json()
    assert changed["metadata"]["generation"] == 2
    assert changed["status"]["phase"] == "Queued"


async def test_an_unchanged_write_creates_no_version(http, api):
    await http.post(JOBS, json=job("a", nodes=1))
    before = api.store.version
    await http.patch(f"{JOBS}/a", json={"spec": {"nodes": 1}}, headers=MERGE)
    assert api.store.version == before


async def test_lists_have_pages_and_a_compacted_page_is_gone(http, api):
    for index in range(5):
        api.store.create("flyerjobs", job(f"j{index}"), "default")
    page = await (await http.get(JOBS, params={"limit": 2})).json()
    names = [item["metadata"]["name"] for item in page["items"]]
    token = page["metadata"]["continue"]
    rest = await (await http.get(JOBS, params={"limit": 9, "continue": token})).json()
    names += [item["metadata"]["name"] for item in rest["items"]]
    assert names == [f"j{index}" for index in range(5)]
    api.store.create("flyerjobs", job("later"), "default")
    api.store.compact()
    assert (await http.get(JOBS, params={"continue": token})).status == 410


async def test_a_watch_sends_the_changes_since_a_version(http, api):
    api.store.create("flyerjobs", job("a"), "default")
    version = api.store.version
    api.store.create("flyerjobs", job("b"), "default")
    api.store.create("flyerjobs", job("elsewhere"), "kube-system")
    async with http.get(JOBS, params={"watch": "1", "resourceVersion": version}) as response:
        api.store.delete("flyerjobs", "a", "default")
        reported = await events(response, 2)
    assert [(event["type"], event["object"]["metadata"]["name"]) for event in reported] == [
        ("ADDED", "b"),
        ("DELETED", "a"),
    ]


async def test_a_watch_with_a_selector_reports_objects_that_start_or_stop_matching(http, api):
    api.store.create("nodes", {"metadata": {"name": "n", "labels": {"a": "1"}}})
    params = {"watch": "1", "resourceVersion": api.store.version, "labelSelector": "a=2"}
    async with http.get("/api/v1/nodes", params=params) as response:
        api.store.patch("nodes", "n", {"metadata": {"labels": {"a": "2"}}})
        api.store.patch("nodes", "n", {"metadata": {"labels": {"a": "3"}}})
        reported = await events(response, 2)
    assert [event["type"] for event in reported] == ["ADDED", "DELETED"]


async def test_watches_get_bookmarks_and_410_in_the_stream_and_at_the_start(http, api):
    params = {"watch": "1", "resourceVersion": api.store.version, "allowWatchBookmarks": "true"}
    async with http.get(JOBS, params=params) as response:
        async with asyncio.timeout(60):
            assert json.loads(await response.content.readline())["type"] == "BOOKMARK"
        api.store.create("flyerjobs", job("a"), "default")
        api.expire_watches("flyerjobs")
        reported = await events(response, 2)
    assert [event["type"] for event in reported] == ["ADDED", "ERROR"]
    assert reported[1]["object"]["code"] == 410
    assert (await http.get(JOBS, params=params)).status == 410


async def test_finalizers_keep_a_deleted_object(http, api):
    value = {**job("a"), "metadata": {"name": "a", "finalizers": ["example.com/y"]}}
    api.store.create("flyerjobs", value, "default")
    await http.delete(f"{JOBS}/a")
    assert "deletionTimestamp" in api.store.get("flyerjobs", "a", "default")["metadata"]
    patch = {"metadata": {"finalizers": None}}
    assert (await http.patch(f"{JOBS}/a", json=patch, headers=MERGE)).status == 200
    assert api.store.find("flyerjobs", "a", "default") is None


async def test_a_bound_pod_runs_ends_and_is_deleted_with_grace(http, api):
    async with Kubelets(api.store) as kubelets:
        kubelets.add_node("n1", "A")
        pods = "/api/v1/namespaces/default/pods"
        spec = {"schedulerName": "flyer", "containers": [{"name": "main"}]}
        created = await (
            await http.post(pods, json={"metadata": {"name": "p"}, "spec": spec})
        ).json()
        target = {"target": {"name": "n1"}, "metadata": {"uid": created["metadata"]["uid"]}}
        assert (await http.post(f"{pods}/p/binding", json=target)).status == 201
        assert (await http.post(f"{pods}/p/binding", json=target)).status == 409
        await until(lambda: api.store.get("pods", "p", "default")["status"]["phase"] == "Running")
        kubelets.finish("default", "p", Exit(3, message="no"))
        ended = api.store.get("pods", "p", "default")
        assert ended["status"]["phase"] == "Failed"
        state = ended["status"]["containerStatuses"][0]["state"]
        assert state["terminated"]["exitCode"] == 3
        assert (await http.delete(f"{pods}/p")).status == 200
        assert api.store.find("pods", "p", "default") is None


async def test_garbage_and_namespaces_are_collected_on_request(api):
    store = api.store
    store.create("namespaces", {"metadata": {"name": "team"}})
    owner = store.create("flyerjobs", job("a"), "team")
    store.create("pods", {"metadata": {"name": "p", **owned_by(owner)}, "spec": {}}, "team")
    store.delete("namespaces", "team")
    with pytest.raises(ApiRefusal, match="being terminated"):
        store.create("flyerjobs", job("b"), "team")
    while collect_garbage(store):
        pass
    assert store.find("pods", "p", "team") is None
    assert store.find("namespaces", "team") is None


async def test_tokens_are_reviewed_for_their_audience_while_their_pod_exists(http, api):
    api.store.create("pods", {"metadata": {"name": "p"}, "spec": {}}, "default")
    token = api.tokens.issue("default", pod="p")
    path = "/apis/authentication.k8s.io/v1/tokenreviews"

    async def review(audience):
        body = {"spec": {"token": token, "audiences": [audience]}}
        return (await (await http.post(path, json=body)).json())["status"]

    status = await review("fireflyer-gateway")
    assert status["user"]["extra"]["authentication.kubernetes.io/pod-name"] == ["p"]
    assert not (await review("another"))["authenticated"]
    api.store.delete("pods", "p", "default")
    assert not (await review("fireflyer-gateway"))["authenticated"]


async def test_faults_are_injected_in_the_configured_order(http, api):
    api.faults.add(Fault("refuse", code=429, reason="TooManyRequests", retry_after_seconds=1))
    answer = await http.get(JOBS)
    assert (answer.status, answer.headers["Retry-After"]) == (429, "1")
    api.faults.add(Fault("lose", verb="create"))
    with pytest.raises(aiohttp.ClientError):
        await http.post(JOBS, json=job("a"))
    assert api.store.find("flyerjobs", "a", "default")
    died = []
    api.faults.kill("test", lambda: died.append(True), after=2, performed=False, writes=True)
    assert (await http.post(JOBS, json=job("b"))).status == 201
    assert (await http.get(JOBS)).status == 200
    for _ in range(2):
        with pytest.raises(aiohttp.ClientError):
            await http.post(JOBS, json=job("c"))
    assert died == [True]
    assert not api.store.find("flyerjobs", "c", "default")
    assert [call.name for call in api.faults.writes("test")] == ["a", "b"]


def test_a_periodic_fault_affects_every_fourth_call():
    few = Fault("lose", times=1000, every=4)
    call, faults = Call("a", "get", "pods", "", ""), Faults(faults=[few])
    assert [faults.take(call) is few for _ in range(8)] == [True, False, False, False] * 2
    assert (few.seen, few.committed) == (8, 2)


def test_a_random_fault_is_independent_of_the_position_of_a_call():
    few = Fault("lose", times=1000, every=4, by_chance=True)
    call, faults = Call("a", "get", "pods", "", ""), Faults(faults=[few])
    hits = [faults.take(call) is few for _ in range(2000)]
    assert sum(hits) == few.committed == pytest.approx(500, abs=50)
    for first in range(4):
        assert sum(hits[first::4]) == pytest.approx(125, abs=25)
    # Also of calls that follow two successful ones.
    after = [hit for *two, hit in zip(hits, hits[1:], hits[2:], strict=False) if not any(two)]
    assert sum(after) / len(after) == pytest.approx(0.25, abs=0.05)


def test_patches():
    assert merge({"a": 1, "b": {"c": 1}}, {"a": None, "b": {"d": 2}}) == {"b": {"c": 1, "d": 2}}
    conditions = {"conditions": [{"type": "A", "status": "1"}, {"type": "B"}]}
    changed = strategic(conditions, {"conditions": [{"type": "A", "status": "2"}]})
    assert changed["conditions"] == [{"type": "A", "status": "2"}, {"type": "B"}]
    operations = [{"op": "add", "path": "/a/-", "value": 3}, {"op": "remove", "path": "/b~1c"}]
    assert json_patch({"a": [1], "b/c": 2}, operations) == {"a": [1, 3]}
    with pytest.raises(ApiRefusal):
        json_patch({"a": 1}, [{"op": "test", "path": "/a", "value": 2}])
    assert apply({"s": {"a": 1, "b": 2}}, {"s": {"a": 1}}, {"s": {"a": 1, "b": 2}}) == {
        "s": {"a": 1}
    }


async def until(holds):
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.002)
