"""The leader writes quota and zone statuses when they change, at a limited rate."""

import asyncio

from flyer.api import API_VERSION, FlyerQuotaStatus, FlyerTopologyStatus, Phase
from flyer.engine import Node, Zones
from flyer.kube.services.jobs import quota_status
from flyer.kube.services.jobs.quota_status import count_zones


def limit(cluster, name, nodes, **spec):
    value = {
        "apiVersion": API_VERSION, "kind": "FlyerQuota", "metadata": {"name": name},
        "spec": {"nodes": nodes, **spec},
    }  # fmt: skip
    cluster.store.create("flyerquotas", value)


def quota(cluster, name):
    value = cluster.store.get("flyerquotas", name)
    return FlyerQuotaStatus.model_validate(value.get("status") or {})


def topology(cluster):
    value = cluster.store.find("flyertopologies", "cluster") or {}
    return FlyerTopologyStatus.model_validate(value.get("status") or {})


def zones(cluster):
    return {zone.name: (zone.nodes, zone.ready_nodes) for zone in topology(cluster).zones}


def writes(cluster, resource):
    return [call for call in cluster.server.faults.writes(since=0) if call.resource == resource]


async def test_quota_statuses_list_holders_and_waiting_jobs(cluster, until, monkeypatch):
    monkeypatch.setattr(quota_status, "INTERVAL_SECONDS", 0.05)
    cluster.nodes("AAAA")
    limit(cluster, "each", 3)
    limit(cluster, "none", 5, user="absent")
    operator = cluster.operator()
    # An empty list of holders is written once.
    await until(lambda: quota(cluster, "none").epoch and quota(cluster, "each").epoch)
    version = cluster.store.get("flyerquotas", "none")["metadata"]["resourceVersion"]
    cluster.submit("a", 2)
    await until(lambda: quota(cluster, "each").used_nodes == 2)
    cluster.submit("b", 2)
    await until(lambda: quota(cluster, "each").waiting_jobs == 1)
    cluster.submit("c", 1)  # has room, and waits behind b
    await until(lambda: quota(cluster, "each").waiting_jobs == 2)
    (use,) = quota(cluster, "each").subjects
    assert (use.name, use.nodes, use.jobs) == ("default", 2, 1)
    cluster.finish("a")
    await until(lambda: quota(cluster, "each").used_nodes == 3)
    (use,) = quota(cluster, "each").subjects
    assert (use.nodes, use.jobs, quota(cluster, "each").waiting_jobs) == (3, 2, 0)
    assert cluster.store.get("flyerquotas", "none")["metadata"]["resourceVersion"] == version
    # The next leader writes what has changed, with its own epoch.
    before = quota(cluster, "each").epoch
    operator.kill()
    other = cluster.operator()
    await until(lambda: other.serves)
    await until(lambda: {cluster.phase(name) for name in "bc"} == {Phase.RUNNING})
    for name in "bc":
        cluster.finish(name)
    await until(lambda: quota(cluster, "each").used_nodes == 0)
    assert quota(cluster, "each").epoch > before
    assert quota(cluster, "each").subjects == ()


async def test_the_status_lists_the_nodes_of_zones(cluster, until, monkeypatch):
    monkeypatch.setattr(quota_status, "INTERVAL_SECONDS", 0.05)
    cluster.nodes("AAB")
    operator = cluster.operator()
    await until(lambda: operator.serves)
    assert zones(cluster) == {"A": (2, 2), "B": (1, 1)}
    cluster.store.patch("nodes", "a1", {"spec": {"unschedulable": True}})
    await until(lambda: zones(cluster) == {"A": (2, 1), "B": (1, 1)})
    # The token is taken and released at the same time.
    cluster.submit("wide", 2)
    await until(lambda: cluster.phase("wide") is Phase.RUNNING)
    assert topology(cluster).holder.job == "wide"
    cluster.store.patch("nodes", "a1", {"spec": {"unschedulable": False}})
    await until(lambda: zones(cluster) == {"A": (2, 2), "B": (1, 1)})
    assert topology(cluster).holder.job == "wide"
    cluster.finish("wide")
    await until(lambda: topology(cluster).holder is None)
    cluster.store.delete("nodes", "b0")
    await until(lambda: zones(cluster) == {"A": (2, 2)})


async def test_a_change_waits_for_the_interval(cluster, until, monkeypatch):
    monkeypatch.setattr(quota_status, "INTERVAL_SECONDS", 1000.0)
    cluster.nodes("AAAA")
    limit(cluster, "each", 4)
    cluster.operator()
    await until(lambda: quota(cluster, "each").epoch)
    cluster.submit("a", 2)
    await until(lambda: cluster.phase("a") is Phase.RUNNING)
    await asyncio.sleep(0.3)
    assert len(writes(cluster, "flyerquotas/status")) == 1


def test_zones_that_are_named_are_counted_even_if_empty():
    nodes = [Node("a0", "A", "l1"), Node("a1", "A", "l2"), Node("c0", "C")]
    zones = count_zones(nodes, Zones(("A", "B"), ("A/l1",)))
    assert [(match.name, match.nodes, match.ready_nodes) for match in zones] == [
        ("A", 2, 1), ("B", 0, 0), ("C", 1, 0),
    ]  # fmt: skip
