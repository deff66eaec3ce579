"""Client of a Kubernetes cluster, against an in-memory API server."""

from __future__ import annotations

import re
import threading
import time
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from flyer.cli import write_verbs
from flyer.cli.output import Output
from flyer.cli.screens import why_screen
from flyer.client import FlyerError
from flyer.client.kubernetes.log_lines import PodLog
from flyer.kube.apiserver.errors import ForbiddenError
from ruamel.yaml import YAML

if TYPE_CHECKING:
    from pathlib import Path

    from flyer.client.kubernetes import KubeClient

    from .conftest import Cluster

TIME = "2026-11-20T14:05:00.000Z"
NODES = [{"name": "a1", "zone": "A", "firstRank": 0}]


def running(**more: Any) -> dict[str, Any]:
    return {
        "phase": "Running",
        "epoch": 1,
        "history": {"id": "c", "attempt": 1},
        "zones": "A",
        "assignment": {
            "epoch": 1, "nodes": NODES, "nodeClass": "default", "reservedAt": TIME,
            "runningAt": TIME,
        },
        "occupied": [{"name": "a1", "zone": "A", "attempt": 1}],
        **more,
    }  # fmt: skip


def test_jobs_and_job(cluster: Cluster, client: KubeClient) -> None:
    cluster.add_job("one")
    cluster.add_job("two", namespace="other")
    cluster.set_status("one", running(progress={"step": 7, "time": TIME}))
    assert [job.key for job in client.jobs()] == ["default/one"]
    client.asynchronous.all_namespaces = True
    assert [job.key for job in client.jobs()] == ["default/one", "other/two"]
    job_view = client.job("one")
    assert (job_view.state, job_view.zones, job_view.progress.step, job_view.attempt) == (
        "Running",
        ["A"],
        7,
        1,
    )
    assert client.job("other/two").state == "Queued"
    with pytest.raises(FlyerError, match="job `default/none`") as refusal:
        client.job("none")
    assert refusal.value.exit_status == 102


def test_changes_patch_the_object(cluster: Cluster, client: KubeClient) -> None:
    cluster.add_job("one")
    cluster.set_status("one", running())
    asynchronous = client.asynchronous
    asynchronous._seen = _at_once(asynchronous)  # type: ignore[method-assign]
    client.suspend("one", reason="a demo")
    job = cluster.job("one")
    assert job["spec"]["suspend"] is True
    assert job["metadata"]["annotations"]["fireflyer.dev/reason"] == "a demo"
    client.resume("one")
    assert cluster.job("one")["spec"]["suspend"] is False
    assert "fireflyer.dev/reason" not in cluster.job("one")["metadata"]["annotations"]
    client.requeue("one")
    assert cluster.job("one")["metadata"]["annotations"]["fireflyer.dev/requeue"] == "1"
    assert client.set_priority("one", "high").priority == "high"
    client.stop("one")
    assert cluster.job("one")["spec"]["stop"] == "Graceful"
    client.stop("one", kill=True)
    assert cluster.job("one")["spec"]["stop"] == "Now"


def _at_once(asynchronous: Any) -> Any:
    async def answer(name: str, _before: Any) -> Any:
        return await asynchronous.job(name)

    return answer


def test_impossible_changes_are_refused(cluster: Cluster, client: KubeClient) -> None:
    cluster.add_job("one")
    with pytest.raises(FlyerError, match="`default/one` is Queued: it has no nodes to release"):
        client.requeue("one")
    with pytest.raises(FlyerError, match="unknown priority `urgent`"):
        client.set_priority("one", "urgent")
    cluster.set_status("one", {"phase": "Failed", "history": {"attempt": 0}})
    with pytest.raises(FlyerError, match="cannot suspend `default/one`: it has Failed"):
        client.suspend("one")


def test_the_jobs_of_a_manifest_are_created_together_or_not_at_all(
    cluster: Cluster, client: KubeClient, tmp_path: Path
) -> None:
    manifest = tmp_path / "jobs.yaml"
    jobs = [
        {
            "apiVersion": "fireflyer.dev/v1alpha1",
            "kind": "FlyerJob",
            "metadata": {"name": name},
            "spec": {
                "nodes": 1,
                "progressDeadline": None,
                "template": {"spec": {"containers": [{"name": "trainer"}]}},
            },
        }
        for name in ("one", "two")
    ]
    with manifest.open("w") as file:
        YAML(typ="safe", pure=True).dump_all(jobs, file)
    cluster.add_job("two")
    with pytest.raises(FlyerError, match="job `default/two`") as refusal:
        client.run_all(manifest)
    assert refusal.value.exit_status == 2
    assert [job.name for job in client.jobs()] == ["two"]
    cluster.do(lambda store: store.delete("flyerjobs", "two", "default"))
    assert [job.name for job in client.run_all(manifest)] == ["one", "two"]
    # The manifest is stored unchanged: null is not replaced by the default.
    assert cluster.job("one")["spec"]["progressDeadline"] is None
    manifest.write_text(manifest.read_text().replace("nodes: 1", "nodes: zero"))
    with pytest.raises(FlyerError, match=r"jobs\.yaml:.*spec\.nodes"):
        client.run_all(manifest)


def test_why_reads_only_the_status(cluster: Cluster, client: KubeClient) -> None:
    cluster.add_job("one")
    answer = client.why("one")
    assert (answer.verdict, answer.summary, answer.decided_at) == ("cannot", "Queued", None)
    pending = {
        "reason": "WaitingForNodes", "message": "1 of 1 nodes missing", "position": 3, "more": 2,
        "reasons": [
            {"reason": "WaitingForNodes", "message": "1 of 1 nodes missing"},
            {"reason": "NodeNotReady", "message": "node a1 is out", "node": "a1"},
        ],
        "unblock": [{"command": "kubectl uncordon a1", "effect": "gives a1 new work again"}],
        "time": TIME,
    }  # fmt: skip
    cluster.set_status("one", {"phase": "Queued", "pending": pending, "history": {"attempt": 0}})
    lists = []

    async def listed(*arguments: Any, **_: Any) -> Any:
        lists.append(arguments)

    client.asynchronous.api.list = listed  # type: ignore[method-assign]
    answer = client.why("one")
    assert not lists
    assert (answer.verdict, answer.position, answer.more) == ("cannot", 3, 2)
    assert answer.summary == "cannot start now: 1 of 1 nodes missing"
    assert [reason.node for reason in answer.reasons] == ["", "a1"]
    assert answer.unblock == ["kubectl uncordon a1  # gives a1 new work again"]
    words = why_screen(answer)
    assert "and 2 more reasons" in words
    assert re.search(r"decided \d+.* ago", words)


def test_nodes_need_the_right_to_list_them(
    client: KubeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def forbidden(_: object) -> Any:
        raise ForbiddenError("list nodes", "forbidden", code=403)

    monkeypatch.setattr("flyer.client.kubernetes.asynchronous.observe", forbidden)
    with pytest.raises(FlyerError, match="forbidden") as refusal:
        client.nodes()
    assert refusal.value.code == "Forbidden"


def test_nodes_queues_and_quotas(cluster: Cluster, client: KubeClient) -> None:
    cluster.add_nodes("a1", "a2")
    cluster.add_job("one")
    cluster.set_status("one", running())
    views = {node.name: node for node in client.nodes()}
    assert (views["a1"].state, views["a1"].job, views["a1"].first_rank) == (
        "Busy", "default/one", 0,
    )  # fmt: skip
    assert (views["a2"].state, views["a2"].job) == ("Ready", "")
    assert [(queue.name, queue.running_nodes) for queue in client.queues()] == [("default", 1)]
    quota = {
        "apiVersion": "fireflyer.dev/v1alpha1",
        "kind": "FlyerQuota",
        "metadata": {"name": "all"},
        "spec": {"nodes": 3},
    }
    cluster.do(lambda store: store.create("flyerquotas", quota))
    (view,) = client.quotas()
    assert (view.name, view.subject, view.used, view.nodes) == ("all", "default", 1, 3)


def test_a_watch_yields_changes_over_broken_streams(cluster: Cluster, client: KubeClient) -> None:
    cluster.add_job("one")

    def change() -> None:
        cluster.set_status("one", running())
        cluster.do(lambda _: cluster.server.cut_watches())
        cluster.do(lambda _: cluster.server.expire_watches())
        cluster.set_status(
            "one", {"phase": "Succeeded", "message": "all ranks of 1 nodes exited with status 0"}
        )

    thread = threading.Thread(target=change)
    states, reasons = [], []
    for item in client.watch(timeout_seconds=60):
        if item.job is not None:
            states.append(item.job.state)
            if len(states) == 1:
                thread.start()
        if item.event is not None:
            reasons.append(item.event.reason)
        if states and states[-1] == "Succeeded":
            break
    thread.join()
    assert states[0] == "Queued"
    assert "Succeeded" in states
    assert client.wait("one", timeout_seconds=60).state == "Succeeded"


def test_events_start_from_the_client_s_change(cluster: Cluster, client: KubeClient) -> None:
    """No event between the change and the watch is missed."""
    cluster.add_job("one")
    cluster.set_status("one", running())
    asynchronous = client.asynchronous
    asynchronous._seen = _at_once(asynchronous)  # type: ignore[method-assign]
    client.suspend("one")
    suspension = {
        "reason": "Suspended", "by": "anna", "since": TIME, "deadline": TIME, "limit": TIME,
    }  # fmt: skip
    cluster.set_status("one", {"phase": "Suspending", "suspendCode": 2, "suspension": suspension})
    reasons = []
    for event in client.events(job="one", follow=True, timeout_seconds=60):
        reasons.append(event.reason)
        if event.reason == "SuspendReceived":
            break
    assert reasons == ["SuspendSignalled", "SuspendReceived"]


def test_a_wait_has_a_deadline(cluster: Cluster, client: KubeClient) -> None:
    cluster.add_job("one")
    with pytest.raises(FlyerError, match="`default/one` is Queued after ") as refusal:
        client.wait("one", timeout_seconds=0.2)
    assert refusal.value.exit_status == 106


def log_of(*lines: str, second: int = 0) -> str:
    return "".join(f"2026-11-20T14:05:{second:02}.{n:09}Z {x}\n" for n, x in enumerate(lines))


def test_logs_of_all_attempts_and_ranks(cluster: Cluster, client: KubeClient) -> None:
    cluster.add_job("one", 2, ranksPerNode=2)
    cluster.add_pod("one", 1, 0, log_of("rank 0 | a", "rank 1 | b", "rank 0 | c"))
    cluster.add_pod("one", 1, 1, log_of("rank 2 | d", "rank 2 ~ half ", "rank 2 | whole"))
    cluster.add_pod("one", 2, 0, log_of("rank 0 | again", second=9))
    cluster.add_pod("another", 1, 0, log_of("rank 0 | not mine"))
    lines = [(item.attempt, item.rank, item.text) for item in client.logs("one")]
    assert lines == [
        (1, 0, "a"), (1, 1, "b"), (1, 0, "c"), (1, 2, "d"), (1, 2, "half whole"), (2, 0, "again"),
    ]  # fmt: skip
    assert [entry.text for entry in client.logs("one", rank=2)] == ["d", "half whole"]
    assert [element.text for element in client.logs("one", attempt=2)] == ["again"]


def test_logs_follow_the_job_to_its_end(cluster: Cluster, client: KubeClient) -> None:
    cluster.add_job("one")
    cluster.set_status("one", running())
    cluster.add_pod("one", 1, 0, log_of("rank 0 | first"), phase="Running")

    def resume() -> None:
        time.sleep(0.3)
        cluster.server.logs[("default", "one-1-0")] = log_of("rank 0 | first", "rank 0 | second")
        time.sleep(0.3)
        cluster.add_pod("one", 2, 0, log_of("rank 0 | third", second=5))
        cluster.end_pod("one-1-0", "Failed")
        cluster.set_status("one", {"phase": "Succeeded"})

    thread = threading.Thread(target=resume)
    thread.start()
    texts = [item.text for item in client.logs("one", follow=True, timeout_seconds=60)]
    thread.join()
    assert sorted(texts) == ["first", "second", "third"]  # each once


def test_logs_follow_a_pod_that_waits_for_its_node(cluster: Cluster, client: KubeClient) -> None:
    cluster.add_job("one")
    cluster.set_status("one", running())
    cluster.add_pod("one", 1, 0, log_of("rank 0 | first"), phase="Pending", bound=False)
    calls = cluster.server.faults.calls

    def start() -> None:
        deadline = time.monotonic() + 60
        while not any(call.resource == "pods/log" for call in calls):
            assert time.monotonic() < deadline, "the log was not read"
            time.sleep(0.01)
        cluster.do(lambda store: store.bind("default", "one-1-0", {"target": {"name": "node-0"}}))
        cluster.end_pod("one-1-0", "Succeeded")
        cluster.set_status("one", {"phase": "Succeeded"})

    thread = threading.Thread(target=start)
    thread.start()
    texts = [item.text for item in client.logs("one", follow=True, timeout_seconds=60)]
    thread.join()
    assert texts == ["first"]


def test_a_log_resumes_after_a_broken_connection() -> None:
    log = PodLog(1, 0)
    same = "2026-11-20T14:05:00.5Z"
    first = [f"{same} rank 0 | a", f"{same} rank 0 | b"]
    assert [log.take(line).text for line in first] == ["a", "b"]
    log.reconnected()
    again = [*first, f"{same} rank 0 | c", "2026-11-20T14:05:01Z rank 0 | d"]
    assert [entry.text for line in again if (entry := log.take(line))] == ["c", "d"]
    # Without the launcher.
    assert PodLog(1, 3, 8).take(f"{same} hello").rank == 24


def lease(cluster: Cluster, age_seconds: float, holder: str = "operator-1") -> None:
    renewed = datetime.fromtimestamp(time.time() - age_seconds, UTC).isoformat()
    spec = {
        "holderIdentity": holder, "leaseDurationSeconds": 30,
        "renewTime": renewed.replace("+00:00", "Z"),
    }  # fmt: skip
    value = {"metadata": {"name": "flyer-operator"}, "spec": spec}
    cluster.do(lambda store: store.create("leases", value, "fireflyer-system"))


@pytest.mark.parametrize(("age_seconds", "holder"), [(600.0, "operator-1"), (0.0, "")])
def test_why_and_suspend_report_a_missing_leader(
    cluster: Cluster, client: KubeClient, age_seconds: float, holder: str
) -> None:
    cluster.add_nodes("a1")
    cluster.add_job("one")
    lease(cluster, age_seconds, holder)
    answer = client.why("one")
    assert answer.verdict == "cannot"
    assert answer.summary.startswith("no operator leads")
    assert answer.reasons[0].reason == "NoLeader"
    target = SimpleNamespace(connect=lambda: client)
    with pytest.raises(FlyerError, match="`one` is still") as excinfo:
        write_verbs.suspend("one", target, Output.TABLE, reason="", wait=True, timeout_seconds=0.5)
    assert excinfo.value.hint.startswith("no operator leads")


def test_a_renewing_leader_is_detected(cluster: Cluster, client: KubeClient) -> None:
    cluster.add_nodes("a1")
    cluster.add_job("one")
    lease(cluster, 0.0)
    assert "no operator" not in client.why("one").summary


def test_why_reports_a_refused_template(cluster: Cluster, client: KubeClient) -> None:
    cluster.add_nodes("a1")
    cluster.add_job("one")
    why = "spec.template.spec.comand: is not a field of pods"
    pending = {"reason": "TemplateRefused", "message": why, "verdict": "Never"}
    status = {"phase": "Queued", "epoch": 1, "pending": pending, "message": why}
    cluster.set_status("one", status)
    answer = client.why("one")
    assert answer.verdict == "never"
    assert why in answer.summary


def test_show_lists_all_attempts(cluster: Cluster, client: KubeClient) -> None:
    cluster.add_job("one")
    history = [
        {
            "attempt": 1, "startedAt": "2026-01-01T00:00:00Z", "endedAt": "2026-01-01T00:00:13Z",
            "reason": "Suspended", "nodeCount": 1, "nodes": [{"name": "a0", "zone": "A"}],
        },
        {
            "attempt": 2, "startedAt": "2026-01-01T00:01:00Z", "endedAt": "2026-01-01T00:01:30Z",
            "reason": "NodeFailures", "nodeCount": 1, "nodes": [{"name": "a1", "zone": "A"}],
            "restoredStep": 7, "lostSteps": 3,
        },
    ]  # fmt: skip
    status = {"phase": "Queued", "history": {"attempt": 2}, "pastAttempts": history}
    cluster.set_status("one", status)
    first, second = client.job("one").attempts
    assert (first.ended_at or 0) - first.started_at == 13
    assert (first.restored_step, first.outcome, first.lost_steps) == (None, "Suspended", None)
    assert (second.ended_at or 0) - second.started_at == 30
    assert (second.restored_step, second.outcome, second.lost_steps) == (7, "NodeFailures", 3)
    assert [node.name for node in second.nodes] == ["a1"]
