"""The kopf handlers write each verdict about quotas and topologies once."""

import asyncio
import contextlib
import json
import threading

import kopf
import pytest
from flyer.engine import Node
from flyer.kube.handlers import Handlers, runner
from flyer.kube.handlers.verdicts import condition_patch, quota_verdict, topology_verdict

from fakekube import Fault

NODES = [Node("a0", "A", "leaf1", "a100"), Node("b0", "B", "leaf2", "a100")]


def quota(**spec):
    return {"metadata": {"name": "q", "generation": 1}, "spec": {"nodes": 1, **spec}}


def topology(*zones):
    return {"metadata": {"name": "cluster", "generation": 1}, "spec": {"zones": list(zones)}}


@pytest.mark.parametrize(
    ("value", "holds", "reason", "words"),
    [
        (quota(), True, "Effective", "1 of 2 nodes"),
        (quota(nodes=9), True, "NeverReached", "limit is never reached"),
        (quota(nodeClass="h100"), False, "UnknownNodeClass", "no node has the class h100"),
        (quota(nodes="x"), False, "Invalid", "spec.nodes"),
    ],
)
def test_quotas(value, holds, reason, words):
    kind, result, why, message = quota_verdict(value, NODES)
    assert (kind, result, why) == ("Effective", holds, reason)
    assert words in message


@pytest.mark.parametrize(
    ("value", "holds", "reason", "words"),
    [
        (topology(), True, "Consistent", "2 nodes"),
        (topology({"name": "A"}, {"name": "B"}), True, "Consistent", "2 zones"),
        (topology({"name": "A"}), False, "UnknownZone", "b0"),
        (topology({"name": "A", "leaves": ["x"]}, {"name": "B"}), False, "UnknownLeaf", "a0"),
    ],
)
def test_topologies(value, holds, reason, words):
    kind, result_value, why, message = topology_verdict(value, NODES)
    assert (kind, result_value, why) == ("Consistent", holds, reason)
    assert words in message


def test_a_condition_changes_its_time_with_its_status_alone():
    value = quota()
    first = condition_patch(value, ("Effective", True, "Effective", "x"), 1000.0)
    value = {**value, "status": first}
    assert condition_patch(value, ("Effective", True, "Effective", "x"), 2000.0) is None
    second = condition_patch(value, ("Effective", True, "NeverReached", "y"), 2000.0)
    time = first["conditions"][0]["lastTransitionTime"]
    assert second["conditions"][0]["lastTransitionTime"] == time
    third = condition_patch(value, ("Effective", False, "Invalid", "z"), 2000.0)
    assert third["conditions"][0]["lastTransitionTime"] != time


@pytest.fixture
def kubeconfig(api_server, tmp_path):
    path = tmp_path / "config"
    path.write_text(
        json.dumps({
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{"name": "k", "cluster": {"server": api_server.url}}],
            "users": [{"name": "u", "user": {"token": "secret"}}],
            "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
        })
    )  # fmt: skip
    return str(path)


async def test_kopf_writes_a_condition_once(api_server, until, kubeconfig):
    store = api_server.store
    store.create("flyerquotas", quota(nodeClass="h100"))
    store.create("flyertopologies", topology({"name": "A"}))
    task = asyncio.create_task(Handlers(lambda: NODES, kubeconfig=kubeconfig).run())

    def reason(plural, name):
        conditions = store.get(plural, name).get("status", {}).get("conditions") or [{}]
        return conditions[0].get("reason")

    try:
        await until(lambda: reason("flyerquotas", "q") == "UnknownNodeClass")
        await until(lambda: reason("flyertopologies", "cluster") == "UnknownZone")
        with store.unchecked():  # the server refuses to change a quota's subject
            store.patch("flyerquotas", "q", {"spec": {"nodeClass": "a100"}})
        await until(lambda: reason("flyerquotas", "q") == "Effective")
        version = store.version
        await asyncio.sleep(1.0)
        assert store.version == version
        assert "finalizers" not in store.get("flyerquotas", "q")["metadata"]
        assert "annotations" not in store.get("flyerquotas", "q")["metadata"]
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_kopf_is_restarted_after_a_watch_that_fails(
    api_server, until, kubeconfig, monkeypatch
):
    monkeypatch.setattr(runner, "RESTART_SECONDS", 0.01)
    failure = Fault("refuse", verb="watch", resource="flyerquotas", code=404, reason="NotFound")
    api_server.faults.add(failure)
    store = api_server.store
    store.create("flyerquotas", quota(nodeClass="h100"))
    task = asyncio.create_task(Handlers(lambda: NODES, kubeconfig=kubeconfig).run())

    def reason():
        conditions = store.get("flyerquotas", "q").get("status", {}).get("conditions") or [{}]
        return conditions[0].get("reason")

    try:
        await until(lambda: failure.committed)
        with store.unchecked():
            store.patch("flyerquotas", "q", {"spec": {"nodeClass": "a100"}})
        await until(lambda: reason() == "Effective")
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@pytest.mark.parametrize("over", [False, True])
def test_a_handler_of_an_ended_term_writes_nothing(over):
    stop, patch = threading.Event(), kopf.Patch()
    if over:
        stop.set()
    registry = Handlers(lambda: NODES)._registry(stop)
    (handler,) = [watch.fn for watch in registry._watching._handlers if watch.id == "flyerquotas"]
    handler(type=None, body=quota(), patch=patch)
    assert bool(patch) is not over


async def test_only_one_handler_thread_runs(monkeypatch):
    runs, gate = [], threading.Event()

    def serve(handlers, stop):
        runs.append((handlers, stop))
        gate.wait(30)  # ignores its stop event

    monkeypatch.setattr(Handlers, "_serve", serve)
    monkeypatch.setattr(runner, "STOP_SECONDS", 0.01)
    monkeypatch.setattr(runner, "WAIT_SECONDS", 0.01)
    first, second = Handlers(lambda: NODES), Handlers(lambda: NODES)
    tasks = [asyncio.create_task(first.run())]
    try:
        while not runs:
            await asyncio.sleep(0.01)
        tasks[0].cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await tasks[0]
        assert runs[0][1].is_set()
        tasks.append(asyncio.create_task(second.run()))
        await asyncio.sleep(0.1)
        assert [name for name, _ in runs] == [first]
        gate.set()
        while len(runs) < 2:
            await asyncio.sleep(0.01)
        assert runs[1][0] is second
    finally:
        gate.set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
