"""Number of API writes of a start, a suspension and an idle scheduler."""

import asyncio
import itertools

import pytest
from flyer.api import API_VERSION, Phase
from flyer.kube.apiserver import LeaseSettings
from flyer.kube.services.jobs import event_queue
from flyer.kube.services.jobs.quota_status import QuotaStatusReporter
from flyer.kube.services.pods import pod_control

from fakekube.nodes.containers import Behaviour


@pytest.fixture
def long_batches(monkeypatch):
    """Related events are batched, even on a busy host."""
    monkeypatch.setattr(event_queue, "GATHER_SECONDS", 1.0)
    monkeypatch.setattr(event_queue, "LEAVE_SECONDS", 30.0)


def writes(cluster, since):
    """Writes except those of Leases, which do not depend on the number of jobs."""
    return [call for call in cluster.server.faults.writes(since=since) if call.resource != "leases"]


@pytest.mark.parametrize(("zones", "nodes"), [("A", 1), ("AAAA", 4), ("AAABBB", 5), ("A" * 16, 16)])
async def test_a_start_costs_two_writes_per_node_plus_four(
    cluster, until, monkeypatch, zones, nodes
):
    # Nodes of zones are counted every three seconds, independently of starts.
    monkeypatch.setattr(QuotaStatusReporter, "mark_dirty", lambda _: None)
    cluster.nodes(zones)
    # Long leases: on a busy host a short one is lost, and the next term writes the topology.
    operator = cluster.operator(LeaseSettings(namespace="fireflyer-system"))
    await until(lambda: operator.serves)
    since = len(cluster.server.faults.calls)
    cluster.submit("a", nodes)
    await until(lambda: cluster.phase("a") is Phase.RUNNING)
    await until(lambda: cluster.store.all("events"))
    calls = writes(cluster, since)
    assert len(calls) <= 2 * nodes + 4, calls


async def test_pods_are_bound_before_more_are_created(cluster, until, monkeypatch):
    """Among many starting jobs, the first do not wait for the pods of the last."""
    monkeypatch.setattr(pod_control, "CONCURRENCY_MAX", 2)
    monkeypatch.setattr(pod_control, "CONCURRENCY_DURING_COMMITS", 1)
    names = [f"job-{number}" for number in range(12)]
    cluster.nodes("A" * len(names))
    for name in names:
        cluster.submit(name, 1)
    cluster.operator()
    await until(lambda: all(cluster.phase(name) is Phase.RUNNING for name in names))
    unbound, most = 0, 0
    for call in cluster.server.faults.calls:
        unbound += (call.verb, call.resource) == ("create", "pods")
        unbound -= call.resource == "pods/binding"
        most = max(most, unbound)
    # Two that are being created, and two that are bound next.
    assert most <= 4


@pytest.mark.parametrize("nodes", [1, 8])
@pytest.mark.parametrize(("saves", "most"), [(False, 3), (True, 4)])
@pytest.mark.usefixtures("long_batches")
async def test_a_suspension_costs_three_writes(cluster, until, nodes, saves, most):
    """One additional write for its checkpoint, which is stored before the gang's pods may end."""
    cluster.containers.behaviour = Behaviour(saves=saves)
    cluster.nodes("A" * nodes)
    operator = cluster.operator()
    await until(lambda: operator.serves)
    cluster.submit("a", nodes)
    await until(lambda: cluster.store.all("events"))
    since = len(cluster.server.faults.calls)
    cluster.edit("a", suspend=True)
    await until(lambda: cluster.phase("a") is Phase.SUSPENDED)
    await until(lambda: len(cluster.store.all("events")) == 2)
    calls = writes(cluster, since)
    assert len(calls) <= most, calls


@pytest.mark.usefixtures("long_batches")
async def test_nodes_that_become_empty_in_sequence_cost_one_write(cluster, until):
    """Kubelets report the ends of a suspended gang's pods at different times."""
    cluster.nodes("AAAA")
    operator = cluster.operator()
    await until(lambda: operator.serves)
    cluster.submit("a", 4)
    await until(lambda: cluster.phase("a") is Phase.RUNNING)
    delays = itertools.count(1)
    cluster.kubelets.end_report_delay = lambda: 0.3 * next(delays)
    since = len(cluster.server.faults.calls)
    cluster.edit("a", suspend=True)
    await until(lambda: cluster.phase("a") is Phase.SUSPENDED)
    assert next(delays) == 5, "each of the four kubelets has used its delay"
    assert not cluster.status("a").occupied
    calls = [call for call in writes(cluster, since) if call.resource == "flyerjobs/status"]
    assert len(calls) <= 3, calls


@pytest.mark.usefixtures("long_batches")
async def test_a_preemption_evicts_no_more_gangs_than_needed(cluster, until):
    """Three writes per suspended gang, of any size."""
    cluster.containers.behaviour = Behaviour(saves=False)
    cluster.nodes("A" * 12)
    operator = cluster.operator()
    await until(lambda: operator.serves)
    victims = [f"low-{number}" for number in range(6)]
    for name in victims:
        cluster.submit(name, 2, priority="low")
    await until(lambda: all(cluster.phase(name) is Phase.RUNNING for name in victims))
    await until(lambda: len(cluster.store.all("events")) == 6)
    since = len(cluster.server.faults.calls)
    cluster.submit("large", 5, priority="high")
    await until(lambda: cluster.phase("large") is Phase.RUNNING)
    evicted = [name for name in victims if cluster.status(name).eviction is not None]
    assert len(evicted) == 3
    await until(lambda: len(events_of(cluster, evicted)) == 2 * 3)
    calls = [
        call for call in writes(cluster, since)
        if call.name.startswith("low-") and call.status < 300
    ]  # fmt: skip
    assert len(calls) <= 3 * 3, calls


def events_of(cluster, jobs):
    return [
        event for event in cluster.store.all("events") if event["involvedObject"]["name"] in jobs
    ]


async def test_an_idle_scheduler_writes_nothing(cluster, until):
    cluster.nodes("AAAA")
    limit = {"apiVersion": API_VERSION, "kind": "FlyerQuota", "spec": {"nodes": 9}}
    cluster.store.create("flyerquotas", {**limit, "metadata": {"name": "all"}})
    operator = cluster.operator()
    await until(lambda: operator.serves)
    cluster.submit("runs", 2)
    cluster.submit("waits", 3)
    await until(lambda: cluster.phase("runs") is Phase.RUNNING)
    await until(lambda: cluster.status("waits").pending is not None)
    await until(lambda: _quota(cluster).get("usedNodes") == 2)
    await asyncio.sleep(0.5)
    since = len(cluster.server.faults.calls)
    await asyncio.sleep(5)
    assert writes(cluster, since) == []


def _quota(cluster):
    return cluster.store.get("flyerquotas", "all").get("status", {})
