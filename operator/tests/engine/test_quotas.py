"""Quotas: a job gets nodes only if every quota that applies has room."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from flyer.api import FlyerQuota, Phase, Priority, QuotaSubject
from flyer.engine import (
    JobQuarantined,
    JobRemoved,
    JobSubmitted,
    Node,
    NodeObserved,
    Quota,
    QuotaObserved,
    QuotaRemoved,
    TeamObserved,
    explain,
    quota_holdings,
    quota_usage,
    rebuild,
)
from flyer.sim import sample_job, two_zones
from pydantic import ValidationError

if TYPE_CHECKING:
    from collections.abc import Callable


def _two_classes(**counts: int) -> list[Node]:
    return [
        Node(f"{name}-{number}", "A", "A0", node_class=name)
        for name, count in counts.items()
        for number in range(count)
    ]


def test_out_of_quota_names_the_limit_its_use_and_its_users(new_harness: Callable) -> None:
    harness = new_harness()
    harness.step(QuotaObserved(Quota("anna", "anna", nodes=3)))
    harness.run("first", 2, user="anna")
    harness.submit("second", 2, user="anna")
    pending = harness.status("second").pending
    assert (pending.verdict, pending.reason) == ("Pending", "WaitingForQuota")
    assert pending.message == (
        "quota anna has 1 of 3 nodes left for anna, wants 2: 2 used by default/first (2)"
    )
    assert pending.blocked_by == ("default/first",)
    explanation = explain(harness.state, "default/second", harness.now)
    assert explanation.verdict == "cannot"
    assert explanation.blockers[0].message == pending.message
    assert [remedy.command for remedy in explanation.remedies] == ["flyer suspend default/first"]
    # The limit does not apply to other users.
    assert harness.run("third", 2, user="ben").phase is Phase.RUNNING


def test_more_than_the_limit_can_never_run(new_harness: Callable) -> None:
    harness = new_harness()
    harness.step(QuotaObserved(Quota("small", nodes=2, priority="high")))
    harness.submit("big", 3, priority="high")
    pending = harness.status("big").pending
    assert (pending.verdict, pending.reason) == ("Never", "QuotaExceeded")
    assert pending.message == (
        "wants 3 nodes, quota small gives default 2 at priority high in all node classes: set "
        "spec.nodes to 2 or less, choose another priority or node class, or ask for a "
        "larger FlyerQuota small"
    )
    assert explain(harness.state, "default/big", harness.now).verdict == "never"
    harness.step(QuotaRemoved("small"))
    assert harness.status("big").phase is Phase.STARTING


def test_a_users_limit_replaces_the_limit_of_all_users(new_harness: Callable) -> None:
    harness = new_harness()
    harness.step(
        QuotaObserved(Quota("all", nodes=1)),
        QuotaObserved(Quota("anna", subject="anna", nodes=4)),
    )
    assert harness.run("hers", 4, user="anna").phase is Phase.RUNNING
    harness.submit("other", 2, user="ben")
    assert harness.status("other").pending.reason == "QuotaExceeded"


def test_nodes_count_until_they_are_empty(new_harness: Callable) -> None:
    harness = new_harness()
    harness.step(QuotaObserved(Quota("all", nodes=2)))
    harness.run("first", 2)
    harness.submit("second", 2)
    harness.step(JobRemoved("default/first"))
    assert harness.status("second").phase is Phase.QUEUED
    harness.empty("first")
    assert harness.status("second").phase is Phase.STARTING


def test_a_limit_is_filled_in_the_order_of_the_queue(new_harness: Callable) -> None:
    harness = new_harness()
    harness.step(QuotaObserved(Quota("all", nodes=4)))
    harness.run("first", 2)
    harness.now += 1
    harness.submit("second", 3)
    harness.now += 1
    harness.submit("third", 1)  # would fit, but is behind the second job
    assert harness.status("third").pending.reason == "WaitingForQuota"
    assert "default/second is ahead in quota all" in harness.status("third").pending.message
    assert "default/second" in harness.status("third").pending.blocked_by


def test_a_job_without_nodes_keeps_its_share(new_harness: Callable) -> None:
    harness = new_harness(two_zones(2))
    harness.step(QuotaObserved(Quota("anna", subject="anna", nodes=3)))
    harness.run("others", 2, user="ben")
    harness.submit("waits", 3, user="anna")
    harness.now += 1
    harness.submit("later", 1, user="anna")
    assert harness.status("waits").pending.reason == "WaitingForNodes"
    assert harness.status("later").pending.reason == "WaitingForQuota"


def test_auto_resolves_to_the_highest_level_within_its_quota(new_harness: Callable) -> None:
    harness = new_harness()
    harness.step(
        QuotaObserved(Quota("high", priority="high", nodes=2)),
        QuotaObserved(Quota("above", priority="above-normal", nodes=1)),
    )
    assert harness.run("one", 2, priority="auto").priority is Priority.HIGH
    assert harness.run("two", 1, priority="auto").priority is Priority.ABOVE_NORMAL
    assert harness.run("three", 1, priority="auto").priority is Priority.NORMAL
    harness.step(JobRemoved("default/one"))
    harness.empty("one")
    # A running job keeps its level.
    assert harness.status("three").priority is Priority.NORMAL
    assert harness.run("four", 1, priority="auto").priority is Priority.HIGH


def test_auto_waits_if_every_level_is_out_of_quota(new_harness: Callable) -> None:
    harness = new_harness()
    harness.step(QuotaObserved(Quota("all", nodes=1)))
    harness.run("one", 1, priority="auto")
    harness.submit("two", 1, priority="auto")
    assert harness.status("two").pending.reason == "WaitingForQuota"


def test_auto_precedes_lower_jobs_and_preempts_them(new_harness: Callable) -> None:
    harness = new_harness()
    harness.step(QuotaObserved(Quota("high", priority="high", nodes=6)))
    harness.run("low", 6, priority="low")
    harness.now += 60
    harness.submit("auto", 6, priority="auto")
    assert harness.status("low").phase is Phase.SUSPENDING
    assert harness.status("auto").priority is Priority.HIGH


def test_auto_does_not_wait_at_a_level_with_room_only_in_a_class_that_is_too_small(
    new_harness: Callable,
) -> None:
    harness = new_harness(_two_classes(a100=6, v100=2))
    harness.step(QuotaObserved(Quota("high", priority="high", node_class="a100", nodes=2)))
    status = harness.run("one", 3, priority="auto")
    assert (status.priority, status.assignment.node_class) == (Priority.NORMAL, "a100")


def test_a_job_waits_for_no_nodes_of_a_class_in_which_its_limit_has_no_room(
    new_harness: Callable,
) -> None:
    harness = new_harness(_two_classes(a100=3, v100=3))
    harness.step(QuotaObserved(Quota("high", priority="high", node_class="a100", nodes=2)))
    harness.run("first", 3, priority="high", nodeClass="v100")
    harness.submit("large", 3, priority="high")
    assert harness.status("large").pending.blocked_by == ("default/first",)
    # The two nodes are not kept for it.
    assert harness.run("second", 1, priority="normal", nodeClass="a100").phase is Phase.RUNNING
    assert harness.run("third", 2, priority="normal", nodeClass="a100").phase is Phase.RUNNING


def test_a_raised_priority_applies_once_its_limit_has_room(new_harness: Callable) -> None:
    harness = new_harness()
    harness.step(QuotaObserved(Quota("high", priority="high", nodes=2)))
    harness.run("one", 2, priority="high")
    harness.run("two", 1)
    raised = sample_job("two", 1, priority="high")
    harness.step(JobSubmitted(raised))
    assert harness.status("two").priority is Priority.NORMAL
    harness.step(JobRemoved("default/one"))
    harness.empty("one")
    assert harness.status("two").priority is Priority.HIGH


def test_a_lowered_limit_does_not_evict_running_jobs(new_harness: Callable) -> None:
    harness = new_harness()
    harness.run("one", 3)
    harness.step(QuotaObserved(Quota("all", nodes=2)))
    assert harness.status("one").phase is Phase.RUNNING
    harness.submit("two", 1)
    assert "quota all has 0 of 2 nodes left" in harness.status("two").pending.message


def test_a_limit_ends_when_it_expires(new_harness: Callable) -> None:
    harness = new_harness()
    harness.step(QuotaObserved(Quota("all", nodes=0, expires_at=harness.now + 10)))
    actions = harness.submit("one", 1)
    assert harness.status("one").pending.reason == "QuotaExceeded"
    assert actions[-1].time == harness.now + 10
    harness.wait(10)
    assert harness.status("one").phase is Phase.STARTING


def test_a_class_without_room_leaves_the_others(new_harness: Callable) -> None:
    nodes = [*two_zones(2, node_class="a100"), *two_zones(2, node_class="h100")]
    nodes = [
        type(node)(f"{node.node_class}-{node.name}", node.zone, node.leaf, node.node_class, 8)
        for node in nodes
    ]
    harness = new_harness(nodes)
    harness.step(QuotaObserved(Quota("a", node_class="a100", nodes=1)))
    assert harness.run("one", 2).assignment.node_class == "h100"
    harness.submit("two", 2, nodeClass="a100")
    assert harness.status("two").pending.reason == "QuotaExceeded"


def test_a_quota_reads_its_object() -> None:
    quota = FlyerQuota.model_validate(
        {
            "metadata": {"name": "q"},
            "spec": {"user": "anna", "nodes": 4, "expiresAt": "2027-01-01T00:00:00Z"},
        }
    )
    assert Quota.of(quota) == Quota("q", "anna", "*", "*", 4, 1798761600.0)


@pytest.mark.parametrize("mode", ["Graceful", "Now"])
def test_stop_is_a_field_of_the_object(new_harness: Callable, mode: str) -> None:
    harness = new_harness()
    harness.run("one", 2)
    harness.step(JobSubmitted(sample_job("one", 2, stop=mode)))
    status = harness.status("one")
    assert status.phase is Phase.SUSPENDING
    assert status.suspension.reason == "Stopped"
    assert status.suspension.expired is (mode == "Now")
    harness.submit("two", 1, stop=mode)
    assert harness.status("two").reason == "Stopped"


def test_requeue_names_the_attempt_once(new_harness: Callable) -> None:
    harness = new_harness()
    harness.run("one", 2)
    annotated = sample_job("one", 2)
    notes = {"fireflyer.dev/requeue": "1", "fireflyer.dev/changed-by": "anna"}
    annotated = annotated.replace(metadata=annotated.metadata.replace(annotations=notes))
    harness.step(JobSubmitted(annotated))
    assert harness.status("one").suspension.message == "requeued by anna"
    harness.wait(60)
    harness.empty("one")
    assert harness.status("one").history.attempt == 2
    harness.up("one")
    harness.step(JobSubmitted(annotated))
    assert harness.status("one").phase is Phase.RUNNING


def test_the_epoch_is_that_of_the_leader_that_wrote(new_harness: Callable) -> None:
    harness = new_harness()
    assert harness.run("one", 1).epoch == 1
    harness.restart()
    harness.step()
    assert harness.status("one").epoch == 1  # nothing changed: nothing is written
    harness.step(JobRemoved("default/one"))
    assert harness.status("one").epoch == 2


def test_nodes_of_a_quarantined_job_count_in_its_quotas_after_a_rebuild(
    new_harness: Callable,
) -> None:
    harness = new_harness()
    harness.step(QuotaObserved(Quota("anna", "anna", nodes=3)))
    harness.run("bad", 2, user="anna")
    stored = harness.jobs["default/bad"].replace(status=harness.status("bad"))
    before = stored.replace(status=stored.status.replace(phase=Phase.QUEUED, assignment=None))
    for statuses in ((stored,), (stored, before), (before, stored)):
        harness.state = rebuild(
            harness.nodes, (), harness.now, 2, harness.settings, harness.state.quotas.values(),
            quarantined=statuses,
        )  # fmt: skip
        harness.submit("second", 2, user="anna")
        pending = harness.status("second").pending
        assert pending.message == (
            "quota anna has 1 of 3 nodes left for anna, wants 2: 2 used by default/bad (2)"
        )
        explanation = explain(harness.state, "default/second", harness.now)
        assert (explanation.verdict, explanation.remedies) == ("cannot", ())
        assert quota_holdings(harness.state, harness.now)[0][1][0].nodes == 2
    harness.state = rebuild(
        harness.nodes, (), harness.now, 3, harness.settings, harness.state.quotas.values()
    )
    assert harness.run("second", 2, user="anna").phase is Phase.RUNNING


def test_a_quarantined_job_leaves_the_engine_and_keeps_its_quota(
    new_harness: Callable,
) -> None:
    harness = new_harness(two_zones(1))
    harness.step(QuotaObserved(Quota("anna", "anna", nodes=1)))
    harness.run("bad", 1, user="anna", priority="low")
    harness.run("other", 1, user="ben", priority="extreme-high")
    (node_name,) = harness.names("bad")
    harness.wait(100)  # past its minRuntime
    harness.submit("taker", 1, user="ben", priority="high")  # it waits for the node of `bad`
    assert harness.names("taker") == (node_name,)
    observed = replace(
        next(node for node in harness.nodes if node.name == node_name), ready=False, reason="kept"
    )
    actions = harness.step(JobQuarantined("default/bad"), NodeObserved(observed))
    assert "default/bad" not in harness.state.jobs
    assert all(getattr(action, "job", "") != "default/bad" for action in actions)
    assert harness.names("taker") == ()
    harness.submit("hers", 1, user="anna")
    assert harness.status("hers").pending.message == (
        "quota anna has 0 of 1 nodes left for anna, wants 1: 1 used by default/bad (1)"
    )
    harness.step(JobQuarantined("default/unknown"))


def test_service_accounts_of_a_namespace_share_its_quota() -> None:
    """A user who may edit a namespace can create any number of accounts in it."""
    from flyer.api import load_manifest
    from flyer.api.names import USER_ANNOTATION

    text = """
apiVersion: fireflyer.dev/v1alpha1
kind: FlyerJob
metadata: {name: gpt, namespace: lab}
spec: {nodes: 1, template: {spec: {containers: [{name: t, image: i, command: [c]}]}}}
"""
    (job,) = load_manifest(text)
    users = set()
    for user in ("", "system:serviceaccount:lab:a", "system:serviceaccount:lab:b"):
        metadata = job.metadata.replace(annotations={USER_ANNOTATION: user} if user else {})
        users.add(job.replace(metadata=metadata).user)
    assert users == {"lab"}
    anna = job.metadata.replace(annotations={USER_ANNOTATION: "anna"})
    assert job.replace(metadata=anna).user == "anna"


def _submit(harness: Any, key: str, nodes: int, *, user: str = "", **spec: Any) -> None:
    """A job of any namespace."""
    namespace, _, name = key.partition("/")
    job = sample_job(name, nodes, user=user, **spec)
    harness.step(JobSubmitted(job.replace(metadata=job.metadata.replace(namespace=namespace))))


def _held_nodes(harness: Any) -> int:
    return sum(
        len(job.status.assignment.nodes)
        for job in harness.state.jobs.values()
        if job.holding and job.status.assignment
    )


def test_many_identities_of_one_namespace_share_its_limit(new_harness: Callable) -> None:
    harness = new_harness()
    harness.step(QuotaObserved(Quota("each", nodes=2, kind=QuotaSubject.NAMESPACE)))
    for index in range(6):
        account = f"system:serviceaccount:lab:bot-{index}"
        _submit(harness, f"lab/job-{index}", 1, user=account if index % 2 else f"person-{index}")
    assert _held_nodes(harness) == 2
    pending = harness.state.jobs["lab/job-5"].status.pending
    assert "quota each has 0 of 2 nodes left for namespace lab, wants 1" in pending.message
    # Another namespace has a separate limit.
    _submit(harness, "other/job", 2)
    assert harness.state.jobs["other/job"].status.phase is Phase.STARTING


def test_a_total_holds_over_all_users(new_harness: Callable) -> None:
    harness = new_harness()
    harness.step(
        QuotaObserved(Quota("all", nodes=3, total=True)),
        QuotaObserved(Quota("anna", "anna", nodes=6)),
    )
    for user in ("anna", "ben", "cleo", "dan"):
        _submit(harness, f"default/{user}", 1, user=user)
    assert _held_nodes(harness) == 3
    pending = harness.state.jobs["default/dan"].status.pending
    assert pending.reason == "WaitingForQuota"
    assert "quota all has 0 of 3 nodes left for all users" in pending.message
    # A limit by name, larger than the total, does not replace it.
    _submit(harness, "default/big", 4, user="anna")
    assert harness.state.jobs["default/big"].status.pending.verdict == "Never"


def test_a_full_limit_of_a_user_blocks_no_other_user_of_the_total(new_harness: Callable) -> None:
    harness = new_harness()
    harness.step(
        QuotaObserved(Quota("anna", "anna", nodes=1)),
        QuotaObserved(Quota("all", nodes=3, total=True)),
    )
    _submit(harness, "default/one", 1, user="anna")
    harness.now += 1
    _submit(harness, "default/two", 1, user="anna")
    harness.now += 1
    _submit(harness, "default/bens", 2, user="ben")
    assert harness.state.jobs["default/two"].status.pending.reason == "WaitingForQuota"
    assert harness.state.jobs["default/bens"].status.phase is Phase.STARTING


def test_the_namespaces_of_a_team_share_its_limit(new_harness: Callable) -> None:
    harness = new_harness()
    harness.step(
        TeamObserved("vision-a", "vision"),
        TeamObserved("vision-b", "vision"),
        QuotaObserved(Quota("teams", nodes=2, kind=QuotaSubject.TEAM)),
    )
    _submit(harness, "vision-a/one", 2)
    _submit(harness, "vision-b/two", 1)
    _submit(harness, "free/three", 3)  # a namespace without a team has no such limit
    assert harness.state.jobs["vision-b/two"].status.pending.reason == "WaitingForQuota"
    assert harness.state.jobs["free/three"].status.phase is Phase.STARTING
    harness.step(TeamObserved("vision-b", ""))
    assert harness.state.jobs["vision-b/two"].status.phase is Phase.STARTING


def test_a_queue_has_one_limit_for_all_users(new_harness: Callable) -> None:
    harness = new_harness()
    harness.step(QuotaObserved(Quota("nightly", "nightly", nodes=2, kind=QuotaSubject.QUEUE)))
    _submit(harness, "a/one", 2, user="anna", queue="nightly")
    _submit(harness, "b/two", 1, user="ben", queue="nightly")
    _submit(harness, "b/three", 1, user="ben")
    assert harness.state.jobs["b/two"].status.pending.reason == "WaitingForQuota"
    assert harness.state.jobs["b/three"].status.phase is Phase.STARTING


def _spec(**spec: Any) -> Quota:
    return Quota.of(
        FlyerQuota.model_validate({"metadata": {"name": "q"}, "spec": {"nodes": 4, **spec}})
    )


def test_a_limit_without_a_subject_applies_to_each_namespace() -> None:
    assert _spec() == Quota("q", "*", nodes=4, kind=QuotaSubject.NAMESPACE)
    assert _spec(team="*", scope="Total").total
    assert _spec(queue="nightly") == Quota("q", "nightly", nodes=4, kind=QuotaSubject.QUEUE)


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ({"user": "anna", "team": "vision"}, "user and team are set: a limit has one subject"),
        ({"team": "vision", "scope": "Total"}, 'scope Total needs team "*"'),
    ],
)
def test_an_invalid_subject_is_refused(spec: dict[str, str], why: str) -> None:
    with pytest.raises(ValidationError, match=why.replace("*", r"\*")):
        _spec(**spec)


def test_quota_usage_is_reported_by_subject(new_harness: Callable) -> None:
    harness = new_harness()
    harness.step(
        QuotaObserved(Quota("each", nodes=4, kind=QuotaSubject.NAMESPACE)),
        QuotaObserved(Quota("all", nodes=3, total=True)),
    )
    _submit(harness, "a/one", 2, user="anna")
    _submit(harness, "b/two", 1, user="ben")
    _submit(harness, "b/three", 1, user="cleo")
    loads = quota_usage(harness.state, harness.now)
    assert loads["each"].held == {"a": [2], "b": [1]}
    assert loads["all"].held == {"anna": [2], "ben": [1]}
    assert (loads["each"].waiting, loads["all"].waiting) == (0, 1)


def test_a_rebuilt_state_knows_the_teams(new_harness: Callable) -> None:
    harness = new_harness()
    quota = Quota("teams", nodes=1, kind=QuotaSubject.TEAM)
    harness.state = rebuild(
        harness.nodes, (), harness.now, 2, harness.settings, [quota], teams={"a": "x", "b": "x"}
    )
    _submit(harness, "a/one", 1)
    _submit(harness, "b/two", 1)
    assert _held_nodes(harness) == 1
