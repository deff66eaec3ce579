"""The operator's metrics during the lifecycle of two consecutive cross-zone jobs.

Values are compared with the stored statuses and the API server's record of calls.
"""

import ast
import re
import time
from collections import Counter
from pathlib import Path

import pytest
from flyer import engine
from flyer.api import FlyerJobStatus, Phase, Progress
from flyer.engine import CheckpointReported
from flyer.kube.apiserver import LeaseSettings
from flyer.kube.gateway import GatewayMetrics
from flyer.kube.injection.webhook import InjectionMetrics
from flyer.kube.metrics import EVICTION_REASONS, Metrics
from flyer.kube.services.nodes import not_ready_grace
from prometheus_client import CollectorRegistry

from fakekube import Fault

TESTS = Path(__file__).parent
LEASE = LeaseSettings(
    namespace="fireflyer-system", duration_seconds=300, renew_seconds=200, retry_seconds=0.1
)


class Gauges:
    """An operator's metrics at the time of the call."""

    def __init__(self, operator):
        self._metrics = operator.metrics

    def __call__(self, name, **labels):
        self._metrics.count()
        return self._metrics.registry.get_sample_value(name, labels)

    def by(self, name, label):
        """All values that are not 0, by one label."""
        self._metrics.count()
        return {
            sample.labels[label]: sample.value
            for family in self._metrics.registry.collect()
            for sample in family.samples
            if sample.name == name and sample.value
        }


def levels(gauges):
    return {
        "jobs": gauges.by("flyer_jobs", "phase"),
        "waiting jobs": gauges.by("flyer_waiting_jobs", "reason"),
        "waiting nodes": gauges.by("flyer_waiting_nodes", "reason"),
        "queued nodes": gauges("flyer_queued_nodes"),
        "gang nodes": gauges("flyer_gang_nodes"),
        "occupancy": gauges("flyer_node_occupancy_ratio"),
        "token": gauges("flyer_cross_zone_token_held"),
    }


def level(jobs=None, waiting=None, *, held_nodes=0, occupancy=0.0, token=0):
    """`waiting`: nodes by reason, each of one job."""
    waiting = waiting or {}
    return {
        "jobs": jobs or {},
        "waiting jobs": dict.fromkeys(waiting, 1),
        "waiting nodes": waiting,
        "queued nodes": sum(waiting.values()),
        "gang nodes": held_nodes,
        "occupancy": occupancy,
        "token": token,
    }


def waited(status):
    return status.assignment.running_at - status.history.queued_at


def test_a_state_of_nodes_that_no_node_has_any_more_is_counted_as_0():
    metrics = Metrics(CollectorRegistry())

    def counted(*events):
        nonlocal state
        state, _ = engine.step(state, events, state.now + 1)
        metrics.observe(state, "")
        metrics.count()
        return {
            name: metrics.registry.get_sample_value("flyer_nodes", {"zone": "A", "state": name})
            for name in ("ready", "lost")
        }

    nodes = [engine.Node("n0", "A"), engine.Node("n1", "A")]
    state = engine.rebuild(nodes, (), 1_800_000_000.0, 1)
    assert counted(engine.NodeLost("n0", "PowerLost")) == {"ready": 1, "lost": 1}
    assert counted(engine.NodeObserved(nodes[0])) == {"ready": 2, "lost": 0}
    both = (engine.NodeLost("n0", "PowerLost"), engine.NodeLost("n1", "PowerLost"))
    assert counted(*both) == {"ready": 0, "lost": 2}
    assert counted(engine.NodeRemoved("n0"), engine.NodeRemoved("n1")) == {"ready": 0, "lost": 0}


def test_exposed_shares_are_counted_once_for_each_stored_progress():
    metrics = Metrics(CollectorRegistry())
    before = FlyerJobStatus()
    for step, percent in ((1, 20), (1, 20), (2, None), (3, 0)):
        progress = Progress(step=step, time=1.0, exposed_percent=percent)
        after = before.replace(progress=progress)
        metrics.committed(before, after)
        before = after
    sample = metrics.registry.get_sample_value
    assert sample("flyer_step_exposed_ratio_count") == 2
    assert sample("flyer_step_exposed_ratio_sum") == 0.2
    assert sample("flyer_step_exposed_ratio_bucket", {"le": "0.01"}) == 1


async def test_a_preemption_over_two_zones(cluster, until):
    cluster.nodes("AABB")
    started_at = time.monotonic()
    operator = cluster.operator(LEASE)
    gauges = Gauges(operator)
    await until(lambda: operator.serves)
    await until(lambda: gauges("flyer_nodes", zone="B", state="ready") == 2)
    assert gauges("flyer_nodes", zone="A", state="ready") == 2
    assert gauges.by("flyer_node_removals", "state")["budget"] == 2
    assert levels(gauges) == level()
    assert gauges("flyer_leader") == 1
    assert gauges("flyer_leader_epoch") == operator.leader.term.epoch > 0
    assert gauges("flyer_gangs_started_total") == 0
    assert gauges.by("flyer_evictions_total", "reason") == {}

    cluster.submit("low", 3, priority="low")
    await until(lambda: cluster.phase("low") is Phase.RUNNING)
    first = cluster.status("low")
    one_runs = level({"Running": 1}, held_nodes=3, occupancy=0.75, token=1)
    await until(lambda: levels(gauges) == one_runs)
    assert gauges("flyer_gangs_started_total") == 1
    assert gauges("flyer_job_wait_seconds_count") == 1
    assert gauges("flyer_job_wait_seconds_sum") == pytest.approx(waited(first), abs=1e-6)
    assert gauges("flyer_gang_node_seconds_total") == 0

    cluster.submit("high", 4, priority="high")
    await until(lambda: cluster.phase("high") is Phase.RUNNING)
    high, evicted = cluster.status("high"), cluster.status("low")
    reason = evicted.pending.reason
    two = level({"Running": 1, "Queued": 1}, {reason: 3}, held_nodes=4, occupancy=1.0, token=1)
    await until(lambda: levels(gauges) == two)
    assert gauges.by("flyer_evictions_total", "reason") == {"Preempted": 1}
    # Its checkpoint at the preemption is not lost.
    expected = 3 * (
        evicted.eviction.time - max(evicted.checkpoint.time, first.assignment.running_at)
    )
    lost_seconds = gauges("flyer_lost_node_seconds_total", reason="Preempted")
    assert lost_seconds == pytest.approx(expected, abs=1e-6)
    low_had = 3 * (evicted.eviction.time - first.assignment.running_at)
    had = gauges("flyer_gang_node_seconds_total")
    assert low_had <= had <= 3 * (time.time() - first.assignment.running_at)
    assert had >= lost_seconds
    assert gauges("flyer_job_wait_seconds_count") == 2
    assert gauges("flyer_job_wait_seconds_sum") == pytest.approx(
        waited(first) + waited(high), abs=1e-6
    )

    cluster.finish("high")
    await until(lambda: cluster.phase("low") is Phase.RUNNING)
    await until(lambda: levels(gauges) == one_runs)
    assert gauges.by("flyer_jobs_ended_total", "phase") == {"Succeeded": 1}
    assert gauges("flyer_gang_node_seconds_total") > had
    cluster.finish("low")
    await until(lambda: cluster.phase("low") is Phase.SUCCEEDED)
    await until(lambda: levels(gauges) == level())
    assert gauges.by("flyer_jobs_ended_total", "phase") == {"Succeeded": 2}
    # No series for a forgotten job, which would always be 0.
    assert gauges("flyer_jobs", phase="Queued") == 0
    assert gauges("flyer_jobs", phase="Succeeded") is None
    assert gauges("flyer_jobs", phase="Failed") is None
    assert gauges("flyer_gangs_started_total") == 3
    assert gauges("flyer_scheduler_rebuilds_total") == 0
    assert gauges("flyer_decision_duration_seconds_count") > 3
    assert 0 < gauges("flyer_decision_duration_seconds_sum") < time.monotonic() - started_at


async def test_a_gang_without_checkpoint_loses_its_whole_runtime(cluster, until, monkeypatch):
    monkeypatch.setattr(
        not_ready_grace, "SILENT_SECONDS", 0.2
    )  # then the state that Kubernetes reports is used
    cluster.nodes("AA")
    operator = cluster.operator(LEASE)
    gauges = Gauges(operator)
    cluster.submit("a", 2)
    await until(lambda: cluster.phase("a") is Phase.RUNNING)
    first = cluster.status("a")
    cluster.kubelets.lose_node("a1")
    await until(lambda: cluster.status("a").eviction)
    evicted = cluster.status("a").eviction
    await until(lambda: gauges.by("flyer_evictions_total", "reason") == {"NodeFailures": 1})
    assert gauges("flyer_lost_node_seconds_total", reason="NodeFailures") == pytest.approx(
        2 * (evicted.time - first.assignment.running_at), abs=1e-6
    )
    assert evicted.reason in EVICTION_REASONS


def test_every_reason_of_an_eviction_has_its_series():
    """Only the engine writes reasons, where a gang loses its nodes."""
    final = {"Stopped", "DeadlineExceeded"}  # the job is over: no eviction
    reasons = set()
    for path in Path(engine.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name == "FailureCause" and isinstance(node.args[0], ast.Constant):
                reasons.add(node.args[0].value)
            for keyword in node.keywords:
                named = keyword.arg == "reason" and isinstance(keyword.value, ast.Constant)
                if named and name in ("restart", "request_suspension"):
                    reasons.add(keyword.value.value)
    assert reasons >= {"Preempted", "StartFailed", "HardwareFault", "ObjectVanished"}
    assert reasons - final <= set(EVICTION_REASONS)


async def test_call_metrics_equal_the_api_servers_count(cluster, until):
    cluster.nodes("AB")
    operator = cluster.operator(LEASE)
    gauges = Gauges(operator)
    await until(lambda: operator.serves)
    refuse = {"code": 409, "reason": "Conflict", "agent": operator.name}
    refused = Fault("refuse", "create", "pods/binding", **refuse)
    cluster.server.faults.add(refused)
    cluster.submit("a", 2)
    await until(lambda: cluster.phase("a") is Phase.RUNNING)

    def counted():
        return Counter(
            # For the client a dry run is a create with a parameter.
            ("create" if call.verb == "dryrun" else call.verb, call.resource, str(call.status))
            for call in cluster.server.faults.calls
            if call.agent == operator.name
        )

    def reported():
        keys, names = counted(), ("verb", "resource", "code")
        return {
            key: gauges("flyer_api_requests_total", **dict(zip(names, key, strict=True)))
            for key in keys
        }

    await until(lambda: reported() == counted())
    calls = counted()
    assert refused.committed == 1
    assert calls["create", "pods/binding", "409"] == 1
    assert calls["create", "pods/binding", "201"] == 2
    for verb in {verb for verb, _, _ in calls}:
        took = gauges("flyer_api_request_duration_seconds_count", verb=verb)
        assert took == sum(count for key, count in calls.items() if key[0] == verb), verb


async def test_faults_rebuilds_and_terms(cluster, until):
    cluster.nodes("AA")
    operator = cluster.operator(LEASE)
    gauges = Gauges(operator)
    cluster.submit("a", 1)
    await until(lambda: cluster.phase("a") is Phase.RUNNING)
    operator.gateway._enqueue(CheckpointReported("default/a", 1, 7, "x" * 5000))
    await until(lambda: gauges.by("flyer_job_faults_total", "kind") == {"event": 1})

    cluster.store.table("flyerjobs").checks.append(
        lambda _, after: (
            "status.zones: is odd"
            if after["metadata"]["name"] == "odd" and "status" in after
            else ""
        )
    )
    cluster.submit("odd", 1)
    await until(lambda: gauges("flyer_jobs_quarantined") == 1)
    assert gauges("flyer_job_faults_total", kind="status") >= 1
    assert gauges("flyer_scheduler_rebuilds_total") >= 1
    assert gauges("flyer_leader") == 1
    operator.task.cancel()
    await until(lambda: gauges("flyer_leader") == 0)


async def test_the_age_of_a_silent_watch_grows(cluster, until):
    operator = cluster.operator(LEASE)
    gauges = Gauges(operator)
    await until(lambda: operator.serves)
    cluster.server.faults.watches.frozen = True
    caches = operator.cache.caches
    await until(lambda: all(cach.age_seconds > 0.5 for cach in caches))
    operator.metrics.set_watch_ages((cach.resource.plural, cach.age_seconds) for cach in caches)
    ages = gauges.by("flyer_watch_age_seconds", "resource")
    assert ages.keys() == {cach.resource.plural for cach in caches}
    assert all(
        0.5 < age <= cache.age_seconds for age, cache in zip(ages.values(), caches, strict=True)
    )


def test_every_series_is_covered_by_a_test_of_metrics():
    registry = CollectorRegistry()
    Metrics(registry)
    GatewayMetrics(registry)
    InjectionMetrics(registry)
    texts = " ".join(
        path.read_text()
        for path in (
            *TESTS.rglob("test_*metrics.py"), TESTS / "injection" / "test_injection.py",
        )
    )  # fmt: skip
    named = set(re.findall(r"\bflyer_\w+", texts))
    for family in registry.collect():
        suffix = {"counter": "_total", "histogram": "_count"}.get(family.type, "")
        assert f"{family.name}{suffix}" in named, family.name
