"""A job that makes the engine fail, or whose status is rejected, affects no other job."""

from types import SimpleNamespace

import pytest
from flyer.api import API_VERSION, FlyerJobStatus, Phase
from flyer.engine import (
    CheckpointReported,
    Commit,
    JobRemoved,
    Killed,
    NodeEmptied,
    PodExited,
    StreamLost,
    StreamRestored,
    UserStateSet,
)
from flyer.engine.cycle import schedule
from flyer.engine.state import transitions
from flyer.kube.apiserver import LeaseSettings
from flyer.kube.apiserver.errors import OverloadedError
from flyer.kube.cache.job_view import shape_job
from flyer.kube.services.jobs.quarantine import RETRIES_PER_REBUILD_MAX, Quarantine
from flyer.kube.services.jobs.quarantine_controller import QuarantineController
from flyer.kube.services.jobs.submissions import Submissions
from flyer.kube.services.leader.leader import LABEL_LEADER, LeaderMark

from fakekube import Fault

# A stalled operator keeps it, because these tests compare terms.
LEASE = LeaseSettings(
    namespace="fireflyer-system", duration_seconds=300, renew_seconds=200, retry_seconds=0.1
)


def events_of(cluster, name, reason):
    return [
        event for event in cluster.store.all("events")
        if event["involvedObject"]["name"] == name and event["reason"] == reason
    ]  # fmt: skip


def rebuilds(operator):
    return operator.metrics.registry.get_sample_value("flyer_scheduler_rebuilds_total") or 0


async def up(cluster, until, *names):
    for name in names:
        cluster.submit(name)
    await until(lambda: all(cluster.phase(name) is Phase.RUNNING for name in names))


@pytest.mark.parametrize("inline", [True, False])
async def test_an_event_at_which_the_engine_fails_is_dropped(cluster, until, monkeypatch, inline):
    if not inline:
        monkeypatch.setattr("flyer.kube.services.jobs.quarantine_controller.JOBS_INLINE_MAX", 0)
    cluster.nodes("AAA")
    operator = cluster.operator(LEASE)
    await up(cluster, until, "a", "b")
    term = operator.leader.term
    operator.gateway._enqueue(CheckpointReported("default/a", 1, 7, "x" * 5000))
    operator.gateway._enqueue(UserStateSet("default/a", 1, 5))
    await until(lambda: events_of(cluster, "a", "EventDropped"))
    await until(lambda: cluster.status("a").history.user_state == 5)
    assert operator.leader.term is term
    cluster.submit("c")
    await until(lambda: cluster.phase("c") is Phase.RUNNING)
    assert cluster.status("a").checkpoint is None
    assert operator.metrics.registry.get_sample_value(
        "flyer_job_faults_total", {"kind": "event"}
    ) == 1  # fmt: skip


async def test_a_job_at_which_the_engine_fails_is_quarantined_and_retried(
    cluster, until, monkeypatch
):
    cluster.nodes("AAA")
    operator = cluster.operator(LEASE)
    await up(cluster, until, "a", "b")
    term = operator.leader.term
    whole = transitions.request_suspension

    def fails(draft, key, **keywords):
        if key == "default/a":
            raise ZeroDivisionError(key)
        whole(draft, key, **keywords)

    monkeypatch.setattr(transitions, "request_suspension", fails)
    cluster.edit("a", suspend=True)
    await until(lambda: events_of(cluster, "a", "Quarantined"))
    cluster.submit("c", 2)  # one node is free, and that of `a` is withheld
    cluster.submit("d")
    cluster.edit("b", suspend=True)
    await until(lambda: cluster.phase("b") is Phase.SUSPENDED)
    await until(lambda: cluster.phase("c") is Phase.RUNNING)
    assert cluster.phase("a") is Phase.RUNNING
    assert len(cluster.pods("a")) == 1
    monkeypatch.setattr(transitions, "request_suspension", whole)
    await until(lambda: cluster.phase("a") is Phase.SUSPENDED)
    await until(lambda: cluster.phase("d") is Phase.RUNNING)
    assert operator.leader.term is term


@pytest.mark.parametrize("code", [403, 500])
async def test_a_rejected_status_stops_no_other_job(cluster, until, code):
    cluster.nodes("AA")
    operator = cluster.operator(LEASE)
    await up(cluster, until, "a", "b")
    term = operator.leader.term
    guarded = Fault(
        "refuse", resource="flyerjobs/status", name="a", code=code, reason="Forbidden", times=10**6
    )
    cluster.server.faults.add(guarded)
    cluster.edit("a", suspend=True)
    cluster.edit("b", suspend=True)
    cluster.submit("c")
    cluster.submit("d")
    # The node that `b` releases is assigned to one of them; that of `a` is withheld.
    await until(lambda: cluster.phase("b") is Phase.SUSPENDED)
    await until(lambda: events_of(cluster, "a", "Quarantined"))
    await until(lambda: Phase.RUNNING in (cluster.phase("c"), cluster.phase("d")))
    running = next(name for name in "cd" if cluster.phase(name) is Phase.RUNNING)
    cluster.finish(running)
    await until(lambda: cluster.phase(running) is Phase.SUCCEEDED)
    before = guarded.seen
    await until(lambda: guarded.seen > before)  # it is retried
    assert cluster.phase("a") is Phase.RUNNING
    assert len(cluster.pods("a")) == 1
    guarded.times = 0
    await until(lambda: cluster.phase("a") is Phase.SUSPENDED)
    await until(
        lambda: all(cluster.phase(item) in (Phase.RUNNING, Phase.SUCCEEDED) for item in "cd")
    )
    assert operator.leader.term is term
    assert len(events_of(cluster, "a", "Quarantined")) == 1


@pytest.mark.parametrize("code", [403, 500])
async def test_one_time_events_of_a_quarantined_job_are_not_lost(cluster, until, code):
    cluster.nodes("AA")
    cluster.operator(LEASE)
    cluster.submit("a", maxRestarts=0)
    await up(cluster, until, "b")
    await until(lambda: cluster.phase("a") is Phase.RUNNING)
    guarded = Fault("refuse", resource="flyerjobs/status", name="a", code=code, times=10**6)
    cluster.server.faults.add(guarded)
    cluster.finish("a")
    cluster.edit("b", suspend=True)
    await until(lambda: events_of(cluster, "a", "Quarantined"))
    await until(lambda: cluster.phase("b") is Phase.SUSPENDED)
    guarded.times = 0
    await until(lambda: cluster.phase("a") is Phase.SUCCEEDED)
    assert cluster.status("a").history.restarts == 0


def test_repeated_events_of_a_quarantined_job_are_retained_once():
    quarantine = Quarantine(lambda *_: None)
    controller = QuarantineController(
        None,
        quarantine,
        None,
        None,
        None,
        None,
        zones=None,
        epoch=None,
        redact=None,
        record_event=None,
        spawn=None,
    )
    quarantine.add("n/a", "why")
    other_event = NodeEmptied("x", "n/b", 1)
    stream_lost, back = StreamLost("n/a", 1), StreamRestored("n/a", 1)
    for step in range(1000):
        saved, word = CheckpointReported("n/a", 1, step, "/p"), UserStateSet("n/a", 1, step)
        events = [NodeEmptied("x", "n/a", 1), PodExited("n/a", 1, "x", Killed(9)), stream_lost,
                  back, stream_lost, saved, word]  # fmt: skip
        assert controller.hold_back([*events, other_event]) == [other_event]
        controller.retain(events[:2])
    quarantine.retry_now("n/a")
    quarantine.release_due()
    retained = controller.take_retained()
    assert set(retained) == {*events}
    assert len(retained) == len({*events})
    assert retained.index(back) < retained.index(stream_lost)


async def test_a_status_with_repeated_conflicts_stops_no_other_job(cluster, until):
    """The API server finds a conflict for every write of the job's status, also for a patch."""
    cluster.nodes("AA")
    operator = cluster.operator(LEASE)
    await up(cluster, until, "a", "b")
    term = operator.leader.term
    conflicts = Fault(
        "refuse", resource="flyerjobs/status", name="a", code=409, reason="Conflict",
        times=1_000_000,
    )  # fmt: skip
    cluster.server.faults.add(conflicts)
    for name in "ab":
        cluster.edit(name, suspend=True)
    await until(lambda: events_of(cluster, "a", "Quarantined"))
    assert "changed 20 times" in events_of(cluster, "a", "Quarantined")[0]["message"]
    await until(lambda: cluster.phase("b") is Phase.SUSPENDED)
    cluster.submit("c")
    await until(lambda: cluster.phase("c") is Phase.RUNNING)
    assert cluster.phase("a") is Phase.RUNNING
    conflicts.times = 0
    await until(lambda: cluster.phase("a") is Phase.SUSPENDED)
    assert operator.leader.term is term


async def test_a_deleted_quarantined_job_keeps_its_finalizer_while_its_pods_run(cluster, until):
    cluster.nodes("AA")
    cluster.operator(LEASE)
    await up(cluster, until, "a")
    patch = {"metadata": {"finalizers": ["fireflyer.dev/release"]}}
    cluster.store.patch("flyerjobs", "a", patch, "default")
    guarded = Fault("refuse", resource="flyerjobs/status", name="a", code=403, times=10**6)
    cluster.server.faults.add(guarded)
    cluster.edit("a", suspend=True)
    await until(lambda: events_of(cluster, "a", "Quarantined"))
    cluster.store.delete("flyerjobs", "a", "default")
    before = guarded.seen
    cluster.submit("b")
    await until(lambda: cluster.phase("b") is Phase.RUNNING)
    await until(lambda: guarded.seen > before)
    names = [job["metadata"]["name"] for job in cluster.store.all("flyerjobs")]
    assert "a" in names or not cluster.pods("a")
    guarded.times = 0

    def is_deleted():
        return "a" not in [job["metadata"]["name"] for job in cluster.store.all("flyerjobs")]

    await until(is_deleted)
    assert not cluster.pods("a")


async def test_nodes_of_a_quarantined_job_count_against_its_quota(cluster, until):
    cluster.nodes("AAA")
    spec = {"user": "*", "priority": "*", "nodeClass": "*", "nodes": 2}
    quota = {"apiVersion": API_VERSION, "kind": "FlyerQuota", "metadata": {"name": "two"}}
    cluster.store.create("flyerquotas", {**quota, "spec": spec})
    cluster.operator(LEASE)
    await up(cluster, until, "a")
    guarded = Fault("refuse", resource="flyerjobs/status", name="a", code=403, times=10**6)
    cluster.server.faults.add(guarded)
    cluster.edit("a", suspend=True)
    await until(lambda: events_of(cluster, "a", "Quarantined"))
    cluster.submit("b")
    await until(lambda: cluster.phase("b") is Phase.RUNNING)
    cluster.submit("c")
    await until(lambda: cluster.status("c").pending is not None)
    pending = cluster.status("c").pending
    assert pending.reason == "WaitingForQuota"
    assert "default/a (1)" in pending.message
    cluster.submit("d")
    await until(lambda: cluster.status("d").pending is not None)
    assert cluster.phase("c") is Phase.QUEUED
    guarded.times = 0
    await until(lambda: cluster.phase("a") is Phase.SUSPENDED)
    await until(lambda: cluster.phase("c") is Phase.RUNNING)


async def test_nodes_of_a_deleted_quarantined_job_are_assigned_again(cluster, until):
    cluster.nodes("A")
    cluster.operator(LEASE)
    await up(cluster, until, "a")
    guarded = Fault("refuse", resource="flyerjobs/status", name="a", code=403, times=10**6)
    cluster.server.faults.add(guarded)
    cluster.edit("a", suspend=True)
    await until(lambda: events_of(cluster, "a", "Quarantined"))
    cluster.submit("b")
    await until(lambda: cluster.status("b").pending is not None)
    cluster.store.delete("flyerjobs", "a", "default")
    await until(lambda: cluster.phase("b") is Phase.RUNNING)


async def test_a_leader_takes_over_although_a_status_is_guarded(cluster, until):
    cluster.nodes("AA")
    first = cluster.operator()
    await up(cluster, until, "b", "a")
    cluster.server.faults.add(
        Fault("refuse", resource="flyerjobs/status", name="a", code=403, times=10**6)
    )
    first.kill()
    cluster.operator()
    cluster.submit("c")
    cluster.finish("b")
    await until(lambda: cluster.phase("c") is Phase.RUNNING)


async def test_a_commit_without_a_write_proves_nothing_about_the_server(cluster, until):
    """During an outage the other job's status is not to blame."""
    cluster.nodes("AA")
    operator = cluster.operator(LEASE)
    await up(cluster, until, "a", "b")
    term = operator.leader.term
    await until(lambda: not term._commits._under_way)
    outage = Fault("refuse", resource="flyerjobs/status", code=503, reason="x", times=10**6)
    cluster.server.faults.add(outage)
    commits = []
    for name in "ab":
        status = cluster.status(name)
        changed = status if name == "a" else status.replace(message="changed")
        job = cluster.store.get("flyerjobs", name, "default")
        commits.append(Commit(f"default/{name}", changed, uid=job["metadata"]["uid"]))
    with pytest.raises(OverloadedError):
        await term._commits.store(commits, set())
    assert "default/b" not in term._quarantine
    outage.times = 0


def test_pauses_grow_until_something_is_stored():
    calls = []
    quarantine = Quarantine(lambda *arguments: calls.append(arguments))
    assert quarantine.wait_seconds() == float("inf")
    status = FlyerJobStatus()
    for pause_seconds in (1, 2, 4):
        quarantine.add("n/a", "why", status)
        assert "n/a" in quarantine
        assert pause_seconds - 1 < quarantine.wait_seconds() <= pause_seconds
    assert calls == [("n/a", "status", "why")]
    for _ in range(20):
        quarantine.add("n/a", "why", status)
    assert 290 < quarantine.wait_seconds() <= 300
    quarantine.release_due()
    assert list(quarantine) == ["n/a"]
    quarantine.resolve("n/a")  # a write in flight: the job is still to be removed
    assert list(quarantine) == ["n/a"]
    quarantine.retry_now("n/a")
    quarantine.release_due()
    assert len(quarantine) == 0
    quarantine.resolve("n/a")
    assert not quarantine.is_suspect("n/a")


def test_quarantined_jobs_are_retried_in_small_batches():
    quarantine = Quarantine(lambda *_: None)
    jobs = [f"n/{index}" for index in range(200)]
    for job in jobs:
        quarantine.add(job, "why")
        quarantine.retry_now(job)  # due
    quarantine.release_due()
    assert [job for job in jobs if job not in quarantine] == jobs[:RETRIES_PER_REBUILD_MAX]
    assert quarantine.wait_seconds() == 0.0
    quarantine.record_rebuild(1.0)
    assert 19 < quarantine.wait_seconds() <= 20
    quarantine.release_due()  # a rebuild for another reason
    assert len(quarantine) == len(jobs) - RETRIES_PER_REBUILD_MAX
    quarantine.record_rebuild(10.0)
    assert 59 < quarantine.wait_seconds() <= 60


async def test_quarantined_jobs_cost_no_rebuild_before_their_retry(cluster, until, monkeypatch):
    monkeypatch.setattr("flyer.kube.services.jobs.quarantine.PAUSE_SECONDS", 100.0)
    whole = schedule._SchedulingPass._try_job

    def fails(plan, job, class_key):
        if job.key.startswith("default/bad"):
            raise ZeroDivisionError(job.key)
        return whole(plan, job, class_key)

    monkeypatch.setattr(schedule._SchedulingPass, "_try_job", fails)
    cluster.nodes("A")
    operator = cluster.operator(LEASE)
    await until(lambda: operator.leader.term is not None)
    bad = [f"bad{index}" for index in range(20)]
    for name in bad:
        cluster.submit(name)
    cluster.submit("good")
    await until(lambda: cluster.phase("good") is Phase.RUNNING)
    await until(lambda: all(events_of(cluster, name, "Quarantined") for name in bad))
    assert rebuilds(operator) == 0


async def test_rejected_reasons_cost_no_rebuild(cluster, until, monkeypatch):
    monkeypatch.setattr("flyer.kube.services.jobs.quarantine.PAUSE_SECONDS", 100.0)
    cluster.nodes("A")
    operator = cluster.operator(LEASE)
    await up(cluster, until, "runs")
    bad = [f"bad{index}" for index in range(20)]
    for name in bad:
        cluster.server.faults.add(
            Fault("refuse", resource="flyerjobs/status", name=name, code=403, times=10**6)
        )
        cluster.submit(name)
    cluster.submit("waits")
    await until(lambda: all(events_of(cluster, name, "Quarantined") for name in bad))
    await until(lambda: cluster.status("waits").pending is not None)
    assert rebuilds(operator) == 0
    assert set(operator.leader.term.state.jobs) == {"default/runs", "default/waits"}


async def test_pods_that_are_forbidden_wait_and_cost_no_restart(cluster, until):
    cluster.nodes("A")
    cluster.operator(start_backoff_seconds=1000.0)  # which is for failures that pass by themselves
    full = Fault(
        "refuse", verb="create", resource="pods", code=403, reason="Forbidden", times=10**6,
        message="exceeded quota: gpus, requested: 8, used: 8, limited: 8",
    )  # fmt: skip
    cluster.server.faults.add(full)
    cluster.submit("a", maxRestarts=0)

    def waits():
        pending = cluster.status("a").pending
        return pending is not None and pending.reason == "PodsRefused"

    await until(waits)
    assert "403" in cluster.status("a").pending.message
    before = full.seen
    await until(lambda: full.seen > before)
    full.times = 0
    await until(lambda: cluster.phase("a") is Phase.RUNNING)
    assert cluster.status("a").history.restarts == 0


async def test_a_job_of_another_controller_is_not_touched(cluster, until):
    cluster.nodes("A")
    cluster.operator()
    controller = "kueue.x-k8s.io/multikueue"
    cluster.submit("theirs", managedBy=controller, priority="extreme-high")
    before = cluster.store.find("flyerjobs", "theirs", "default")
    cluster.submit("ours", managedBy="fireflyer.dev/flyerjob-controller")
    await until(lambda: cluster.phase("ours") is Phase.RUNNING)
    # Another controller's job takes its name: its pods are ended, and nothing starts.
    cluster.store.delete("flyerjobs", "ours", "default")
    cluster.submit("ours", managedBy=controller)
    cluster.submit("next")
    await until(lambda: cluster.phase("next") is Phase.RUNNING)
    assert not cluster.pods("ours")
    assert not cluster.pods("theirs")
    assert cluster.store.find("flyerjobs", "theirs", "default") == before
    assert "status" not in cluster.store.find("flyerjobs", "ours", "default")
    assert not events_of(cluster, "theirs", "InvalidJob")


def test_a_name_taken_by_another_controllers_job_is_released():
    """One event reports both, as after a broken watch: the old object has no event."""
    events = []
    submissions = Submissions(
        None,
        None,
        None,
        Quarantine(lambda *_: None),
        None,
        SimpleNamespace(is_foreign=lambda _view: False),
        epoch=None,
        record_event=None,
        enqueue=events.append,
        spawn=None,
        request_rebuild=lambda why: None,
    )
    container = {"name": "trainer", "image": "i", "command": ["train"]}

    def view(uid, **spec):
        spec = {"nodes": 1, "template": {"spec": {"containers": [container]}}, **spec}
        return shape_job({"metadata": {"name": "a", "namespace": "n", "uid": uid}, "spec": spec})

    own_job, foreign_job = view("1"), view("2", managedBy="kueue.x-k8s.io/multikueue")
    assert own_job.job is not None
    submissions.reset({own_job.key: own_job})
    submissions.changed(own_job, foreign_job)
    assert events == [JobRemoved("n/a", uid="1")]


async def test_a_removed_label_is_restored(cluster, until, monkeypatch):
    monkeypatch.setattr("flyer.kube.services.leader.leader.MARK_SECONDS", 0.05)
    namespace = "fireflyer-system"
    for name in ("leads", "led"):
        cluster.store.create("pods", {"metadata": {"name": name}, "spec": {}}, namespace)
    operator = cluster.operator()
    operator.leader._mark = LeaderMark(namespace, "leads")

    def marked():
        pods = [cluster.store.get("pods", name, namespace) for name in ("leads", "led")]
        return [LABEL_LEADER in (pod["metadata"].get("labels") or {}) for pod in pods]

    await until(lambda: marked() == [True, False])
    for name, value in (("leads", None), ("led", "true")):
        patch = {"metadata": {"labels": {LABEL_LEADER: value}}}
        cluster.store.patch("pods", name, patch, namespace)
    await until(lambda: marked() == [True, False])
