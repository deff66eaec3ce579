"""Lifecycle of jobs on a cluster, as their objects show it."""

import asyncio
from types import SimpleNamespace

import pytest
from flyer.api import Phase, SuspendCode
from flyer.engine import Stop
from flyer.kube.services.nodes import not_ready_grace
from flyer.kube.services.pods.gangs import Gangs

from fakekube import Exit, Fault
from fakekube.apiserver.garbage import collect_garbage
from fakekube.nodes.containers import Behaviour


async def test_a_gang_starts_runs_and_succeeds(cluster, until):
    cluster.nodes("AAAA")
    cluster.operator()
    cluster.submit("a", 4)
    await until(lambda: cluster.phase("a") is Phase.RUNNING)
    pods = cluster.pods("a")
    assert [pod["metadata"]["name"] for pod in pods] == ["a-1-0", "a-1-1", "a-1-2", "a-1-3"]
    names = cluster.status("a").assignment.names
    assert [pod["spec"]["nodeName"] for pod in pods] == list(names)
    cluster.finish("a")
    await until(lambda: cluster.phase("a") is Phase.SUCCEEDED)
    await until(lambda: not cluster.status("a").occupied)
    await until(lambda: len(cluster.store.all("events")) == 2)
    reasons = {event["reason"] for event in cluster.store.all("events")}
    assert reasons == {"Started", "Succeeded"}
    assert len(cluster.pods("a", living=False)) == 4  # their logs can be read


async def test_a_failed_rank_fails_the_job(cluster, until):
    cluster.nodes("AA")
    cluster.operator()
    cluster.submit("a", 2)
    await until(lambda: cluster.phase("a") is Phase.RUNNING)
    cluster.finish("a", Exit(3, message="ValueError: no"))
    await until(lambda: cluster.phase("a") is Phase.FAILED)
    assert "ValueError: no" in cluster.status("a").message
    await until(lambda: not cluster.status("a").occupied)


async def test_suspend_and_resume_lose_nothing(cluster, until):
    cluster.nodes("AA")
    cluster.operator()
    cluster.submit("a", 2)
    await until(lambda: cluster.phase("a") is Phase.RUNNING)
    cluster.edit("a", suspend=True)
    await until(lambda: cluster.phase("a") is Phase.SUSPENDED)
    status = cluster.status("a")
    assert status.eviction.suspend_code is SuspendCode.MAY_SUSPEND
    assert status.checkpoint.step == 1
    await until(lambda: not cluster.pods("a"))
    cluster.edit("a", suspend=False)
    await until(lambda: cluster.phase("a") is Phase.RUNNING)
    assert cluster.status("a").history.attempt == 2


async def test_logs_of_a_suspended_attempt_stay_although_kubelets_are_slow(cluster, until):
    cluster.kubelets.end_report_seconds = 1.5
    cluster.nodes("AA")
    cluster.operator()
    cluster.submit("a", 2)
    await until(lambda: cluster.phase("a") is Phase.RUNNING)
    cluster.edit("a", suspend=True)
    await until(lambda: cluster.phase("a") is Phase.SUSPENDED)
    await until(lambda: not cluster.status("a").occupied)
    assert len(cluster.pods("a", living=False)) == 2


async def test_a_higher_priority_preempts_and_the_victim_resumes(cluster, until):
    cluster.nodes("AA")
    cluster.operator()
    cluster.submit("low", 2, priority="low")
    await until(lambda: cluster.phase("low") is Phase.RUNNING)
    cluster.submit("high", 2, priority="high")
    await until(lambda: cluster.phase("high") is Phase.RUNNING)
    assert cluster.status("low").eviction.reason == "Preempted"
    cluster.finish("high")
    await until(lambda: cluster.phase("low") is Phase.RUNNING)
    assert cluster.status("low").history.attempt == 2
    assert cluster.status("low").checkpoint.step == 1


async def test_an_unresponsive_job_is_killed_at_the_deadline(cluster, until):
    cluster.containers.behaviour = Behaviour(deaf=True)
    cluster.nodes("AA")
    cluster.operator()
    cluster.submit(
        "a",
        2,
        preemption={
            "checkpointGracePeriod": "1s",
            "maxCheckpointGracePeriod": "1s",
            "minRuntime": "0s",
        },
    )
    await until(lambda: cluster.phase("a") is Phase.RUNNING)
    cluster.edit("a", suspend=True)
    await until(lambda: cluster.phase("a") is Phase.SUSPENDED)
    assert cluster.status("a").eviction.suspend_code is SuspendCode.SENT
    await until(lambda: not cluster.pods("a"))


async def test_a_dead_node_is_replaced(cluster, until, monkeypatch):
    monkeypatch.setattr(
        not_ready_grace, "SILENT_SECONDS", 0.2
    )  # then the state that Kubernetes reports is used
    cluster.nodes("AAA")
    cluster.operator()
    cluster.submit("a", 2)
    await until(lambda: cluster.phase("a") is Phase.RUNNING)
    lost_node = cluster.status("a").assignment.names[1]
    cluster.kubelets.lose_node(lost_node)
    await until(
        lambda: cluster.phase("a") is Phase.RUNNING and cluster.status("a").history.attempt == 2
    )
    status = cluster.status("a")
    assert lost_node not in status.assignment.names
    assert status.eviction.reason == "NodeFailures"
    cluster.kubelets.return_node(lost_node)
    await until(lambda: {node.attempt for node in cluster.status("a").occupied} == {2})


async def test_a_gang_with_an_evicted_pod_checkpoints_before_it_releases(cluster, until):
    cluster.nodes("AAA")
    cluster.operator()
    cluster.submit("a", 2)
    await until(lambda: cluster.phase("a") is Phase.RUNNING)
    drained = cluster.status("a").assignment.names[1]
    cluster.store.patch("nodes", drained, {"spec": {"unschedulable": True}})
    cluster.store.delete("pods", "a-1-1", "default")
    await until(
        lambda: cluster.phase("a") is Phase.RUNNING and cluster.status("a").history.attempt == 2
    )
    status = cluster.status("a")
    assert drained not in status.assignment.names
    assert status.checkpoint.step == 1
    assert status.history.restarts == 0
    assert status.eviction.suspend_code is SuspendCode.MAY_SUSPEND
    assert "a-1-1" in status.eviction.message
    (past,) = status.past_attempts
    assert (past.attempt, past.reason, past.restored_step) == (1, "Requeued", None)
    assert past.lost_steps == 0
    assert drained in [node.name for node in past.nodes]
    assert past.started_at < past.ended_at
    assert status.assignment.restored_step == 1


async def test_a_pod_that_vanishes_restarts_the_gang(cluster, until):
    cluster.nodes("AA")
    cluster.operator()
    cluster.submit("a", 2)
    await until(lambda: cluster.phase("a") is Phase.RUNNING)
    cluster.store.delete("pods", "a-1-1", "default", {"gracePeriodSeconds": 0})
    await until(
        lambda: cluster.phase("a") is Phase.RUNNING and cluster.status("a").history.attempt == 2
    )
    assert {pod["metadata"]["labels"]["fireflyer.dev/attempt"] for pod in cluster.pods("a")} == {
        "2"
    }
    # The launchers killed the other pods of the first attempt, which keep their logs.
    ended = [pod for pod in cluster.pods("a", living=False) if pod not in cluster.pods("a")]
    assert [item["metadata"]["name"] for item in ended] == ["a-1-0"]


async def test_pods_that_launchers_cannot_end_are_deleted(cluster, until, monkeypatch):
    monkeypatch.setattr("flyer.kube.services.pods.gangs.LINGER_SECONDS", 0.2)
    cluster.containers.behaviour = Behaviour(hung=True)
    cluster.nodes("AA")
    cluster.operator()
    cluster.submit("a", 2)
    await until(lambda: cluster.phase("a") is Phase.RUNNING)
    # Without a grace period; otherwise the gang would checkpoint and end by itself.
    cluster.store.delete("pods", "a-1-1", "default", {"gracePeriodSeconds": 0})
    await until(
        lambda: cluster.phase("a") is Phase.RUNNING and cluster.status("a").history.attempt == 2
    )
    await until(lambda: len(cluster.pods("a", living=False)) == 2)


async def test_the_linger_time_of_an_ended_job_is_used_once(cluster, until, monkeypatch):
    """Pods that do not end by themselves are killed by their launchers, then deleted."""
    waits = []

    async def linger(_gangs, _stop, seconds):
        waits.append(seconds)

    monkeypatch.setattr(Gangs, "_linger", linger)
    cluster.containers.behaviour = Behaviour(hung=True)
    cluster.nodes("AA")
    cluster.operator()
    cluster.submit("a", 2)
    await until(lambda: cluster.phase("a") is Phase.RUNNING)
    cluster.kubelets.finish("default", "a-1-0", Exit(1))
    await until(lambda: cluster.phase("a") is Phase.FAILED and not cluster.pods("a"))
    assert waits[:2] == [8.0, 3.0]


async def test_the_end_of_the_last_pod_ends_the_wait_for_them():
    """The wait ends before its maximum."""
    pods = [SimpleNamespace(
        uid=f"u{n}", job="lab/a", attempt=1, node=f"a{n}", ended=False, deleting=False, ip="",
        problem=None, name=f"a-1-{n}",
    ) for n in range(2)]  # fmt: skip
    cache = SimpleNamespace(pods=None, pods_of=lambda _job, _uid: pods)
    api = SimpleNamespace(with_limiter=lambda *_: None)
    gangs = Gangs(
        api, cache, None, None, None, outcome_of=None,
        enqueue=None, state_of=lambda _job: None, uid_of=lambda _job: "uid",
        spawn=lambda work, _what, _job: work.close(),
    )  # fmt: skip
    stop = Stop("lab/a", 1, ("a0", "a1"), kill=False, reason="")
    waiting = asyncio.create_task(gangs._linger(stop, 3600))
    for pod in pods:
        await asyncio.sleep(0)
        assert not waiting.done()
        pod.ended = True
        gangs.pod_changed(pod, pod)
    async with asyncio.timeout(30):
        await waiting


async def test_a_pod_whose_binding_is_not_observed_is_not_deleted_by_force():
    """It may run: its node would count as empty while its processes end."""
    pod = SimpleNamespace(
        uid="u0",
        job="lab/a",
        attempt=1,
        node="",
        ended=False,
        namespace="lab",
        name="a-1-0",
        deleting=False,
    )
    deletions: list[int] = []

    async def delete(_namespace: str, _name: str, _uid: str, grace_seconds: int) -> None:
        deletions.append(grace_seconds)

    cache = SimpleNamespace(pods=None, pods_of=lambda _job, _uid: [pod])
    api = SimpleNamespace(with_limiter=lambda *_: None)
    gangs = Gangs(
        api, cache, None, SimpleNamespace(delete=delete), None, outcome_of=None,
        enqueue=None, state_of=lambda _job: None, uid_of=lambda _job: "uid",
        spawn=lambda work, _what, _job: work.close(),
    )  # fmt: skip
    for kill in (False, True):
        stop = Stop("lab/a", 1, ("a0",), kill=kill, reason="")
        await gangs._delete(gangs._living(stop), stop)
    assert deletions == [5, 1]


async def test_pods_that_do_not_come_up_are_rolled_back(cluster, until):
    cluster.nodes("AAA")
    cluster.operator(start_deadline_seconds=1.0)
    cluster.kubelets.refuses_start.add("a0")
    cluster.submit("a", 3, maxRestarts=0)
    await until(lambda: cluster.phase("a") is Phase.FAILED)
    assert cluster.status("a").reason == "MaxRestartsExceeded"
    assert "not up within 1 s" in cluster.status("a").message
    await until(lambda: not cluster.status("a").occupied and not cluster.pods("a"))


async def test_a_deleted_job_leaves_nothing(cluster, until):
    cluster.nodes("AA")
    cluster.operator()
    cluster.submit("a", 2)
    await until(lambda: cluster.phase("a") is Phase.RUNNING)
    cluster.store.delete("flyerjobs", "a", "default")
    cluster.submit("b", 2)
    await until(lambda: cluster.phase("b") is Phase.RUNNING)
    collect_garbage(cluster.store)
    assert not cluster.pods("a")


async def test_a_job_created_again_under_its_name_is_another_one(cluster, until):
    cluster.nodes("AA")
    cluster.operator()
    cluster.submit("a", 2)
    await until(lambda: cluster.phase("a") is Phase.RUNNING)
    history_id = cluster.status("a").history.id
    cluster.store.delete("flyerjobs", "a", "default")
    cluster.submit("a", 2)
    await until(lambda: cluster.phase("a") is Phase.RUNNING)
    assert cluster.status("a").history.id not in ("", history_id)
    assert cluster.status("a").history.attempt == 1


async def test_a_finalizer_of_release_keeps_the_job_until_its_nodes_are_empty(cluster, until):
    cluster.nodes("AA")
    operator = cluster.operator()
    cluster.submit("a", 2)
    await until(lambda: cluster.phase("a") is Phase.RUNNING)
    patch = {"metadata": {"finalizers": ["fireflyer.dev/release"]}}
    cluster.store.patch("flyerjobs", "a", patch, "default")
    cluster.kubelets.stuck_nodes.add("a0")
    cluster.store.delete("flyerjobs", "a", "default")
    await until(lambda: len(cluster.pods("a")) == 1)
    assert cluster.store.find("flyerjobs", "a", "default")
    cluster.kubelets.stuck_nodes.clear()
    for pod in cluster.pods("a"):
        cluster.kubelets._remove(pod)
    await until(lambda: not cluster.store.find("flyerjobs", "a", "default"))
    assert operator.serves


async def test_a_namespace_deleted_under_a_running_job_frees_its_nodes(cluster, until):
    cluster.nodes("AA")
    cluster.operator()
    cluster.store.create("namespaces", {"metadata": {"name": "team"}})
    cluster.submit("a", 2, namespace="team")
    await until(lambda: cluster.status("a", "team").phase is Phase.RUNNING)
    cluster.store.delete("namespaces", "team")
    while collect_garbage(cluster.store):
        pass
    cluster.submit("b", 2)
    await until(lambda: cluster.phase("b") is Phase.RUNNING)
    while collect_garbage(cluster.store):
        pass
    assert not cluster.store.find("namespaces", "team")


async def test_on_shared_nodes_kubernetes_binds_once_the_gate_is_open(cluster, until):
    cluster.nodes("AA", dedicated=False)
    cluster.operator()
    cluster.submit("a", 2)
    await until(lambda: cluster.phase("a") is Phase.RUNNING)
    assert {pod["spec"]["schedulerName"] for pod in cluster.pods("a")} == {"default-scheduler"}
    assert not any(call.resource == "pods/binding" for call in cluster.server.faults.calls)


@pytest.mark.parametrize("failing", [0, 1])
async def test_pods_of_the_last_three_attempts_stay(cluster, until, failing):
    """A later start deletes what an earlier one did not."""
    cluster.server.faults.add(
        Fault("refuse", verb="deletecollection", code=403, reason="Forbidden", times=failing)
    )
    cluster.nodes("A")
    cluster.operator()
    cluster.submit("a", 1)
    for attempt in range(1, 6):
        await until(
            lambda: (
                cluster.phase("a") is Phase.RUNNING
                and cluster.status("a").history.attempt == attempt  # noqa: B023
            )
        )
        if attempt < 5:
            cluster.edit("a", suspend=True)
            await until(lambda: cluster.phase("a") is Phase.SUSPENDED)
            cluster.edit("a", suspend=False)

    def names():
        return [pod["metadata"]["name"] for pod in cluster.pods("a", living=False)]

    await until(lambda: names() == ["a-3-0", "a-4-0", "a-5-0"])


async def test_one_cross_zone_job_runs_at_a_time_and_the_topology_names_it(cluster, until):
    cluster.nodes("AAABBB")
    cluster.operator()
    cluster.submit("one", 4)
    await until(lambda: cluster.phase("one") is Phase.RUNNING)
    topology = cluster.store.get("flyertopologies", "cluster")
    assert topology["status"]["holder"]["job"] == "one"
    assert len(cluster.status("one").assignment.cross_zone_pair) == 2
    cluster.finish("one")
    await until(lambda: "holder" not in cluster.store.get("flyertopologies", "cluster")["status"])
    cluster.submit("two", 5)
    await until(lambda: cluster.phase("two") is Phase.RUNNING)
    topology = cluster.store.get("flyertopologies", "cluster")
    assert topology["status"]["holder"]["job"] == "two"
