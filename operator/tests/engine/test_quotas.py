"""Quotas: nobody gets more nodes than every limit that applies to him has room for."""

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
    quota_loads,
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


def test_out_of_quota_names_the_limit_its_use_and_who_uses_it(desk: Callable) -> None:
    d = desk()
    d.tell(QuotaObserved(Quota("anna", "anna", nodes=3)))
    d.run("first", 2, user="anna")
    d.submit("second", 2, user="anna")
    pending = d.status("second").pending
    assert (pending.verdict, pending.reason) == ("Pending", "WaitingForQuota")
    assert pending.message == (
        "quota anna has 1 of 3 nodes left for anna, wants 2: 2 used by default/first (2)"
    )
    assert pending.blocked_by == ("default/first",)
    told = explain(d.state, "default/second", d.now)
    assert told.verdict == "cannot"
    assert told.blockers[0].message == pending.message
    assert [remedy.command for remedy in told.remedies] == ["flyer suspend default/first"]
    # Another user is not concerned.
    assert d.run("third", 2, user="ben").phase is Phase.RUNNING


def test_more_than_the_limit_can_never_run(desk: Callable) -> None:
    d = desk()
    d.tell(QuotaObserved(Quota("small", nodes=2, priority="high")))
    d.submit("big", 3, priority="high")
    pending = d.status("big").pending
    assert (pending.verdict, pending.reason) == ("Never", "QuotaExceeded")
    assert pending.message == (
        "wants 3 nodes, quota small gives default 2 at priority high in all node classes: set "
        "spec.nodes to 2 or less, choose another priority or node class, or ask for a "
        "larger FlyerQuota small"
    )
    assert explain(d.state, "default/big", d.now).verdict == "never"
    d.tell(QuotaRemoved("small"))
    assert d.status("big").phase is Phase.STARTING


def test_a_limit_of_ones_own_stands_in_for_everybodys(desk: Callable) -> None:
    d = desk()
    d.tell(
        QuotaObserved(Quota("all", nodes=1)),
        QuotaObserved(Quota("anna", subject="anna", nodes=4)),
    )
    assert d.run("hers", 4, user="anna").phase is Phase.RUNNING
    d.submit("his", 2, user="ben")
    assert d.status("his").pending.reason == "QuotaExceeded"


def test_nodes_count_until_they_are_empty(desk: Callable) -> None:
    d = desk()
    d.tell(QuotaObserved(Quota("all", nodes=2)))
    d.run("first", 2)
    d.submit("second", 2)
    d.tell(JobRemoved("default/first"))
    assert d.status("second").phase is Phase.QUEUED
    d.empty("first")
    assert d.status("second").phase is Phase.STARTING


def test_a_limit_is_filled_in_the_order_of_the_queue(desk: Callable) -> None:
    d = desk()
    d.tell(QuotaObserved(Quota("all", nodes=4)))
    d.run("first", 2)
    d.now += 1
    d.submit("second", 3)
    d.now += 1
    d.submit("third", 1)  # would fit; it is behind
    assert d.status("third").pending.reason == "WaitingForQuota"
    assert "default/second is ahead in quota all" in d.status("third").pending.message
    assert "default/second" in d.status("third").pending.blocked_by


def test_a_job_without_nodes_keeps_its_share(desk: Callable) -> None:
    d = desk(two_zones(2))
    d.tell(QuotaObserved(Quota("anna", subject="anna", nodes=3)))
    d.run("others", 2, user="ben")
    d.submit("waits", 3, user="anna")
    d.now += 1
    d.submit("later", 1, user="anna")
    assert d.status("waits").pending.reason == "WaitingForNodes"
    assert d.status("later").pending.reason == "WaitingForQuota"


def test_auto_is_the_highest_level_with_room(desk: Callable) -> None:
    d = desk()
    d.tell(
        QuotaObserved(Quota("high", priority="high", nodes=2)),
        QuotaObserved(Quota("above", priority="above-normal", nodes=1)),
    )
    assert d.run("one", 2, priority="auto").priority is Priority.HIGH
    assert d.run("two", 1, priority="auto").priority is Priority.ABOVE_NORMAL
    assert d.run("three", 1, priority="auto").priority is Priority.NORMAL
    d.tell(JobRemoved("default/one"))
    d.empty("one")
    # What runs keeps the level that it was given.
    assert d.status("three").priority is Priority.NORMAL
    assert d.run("four", 1, priority="auto").priority is Priority.HIGH


def test_auto_without_room_anywhere_waits(desk: Callable) -> None:
    d = desk()
    d.tell(QuotaObserved(Quota("all", nodes=1)))
    d.run("one", 1, priority="auto")
    d.submit("two", 1, priority="auto")
    assert d.status("two").pending.reason == "WaitingForQuota"


def test_auto_goes_before_lower_jobs_and_preempts_them(desk: Callable) -> None:
    d = desk()
    d.tell(QuotaObserved(Quota("high", priority="high", nodes=6)))
    d.run("low", 6, priority="low")
    d.now += 60
    d.submit("auto", 6, priority="auto")
    assert d.status("low").phase is Phase.SUSPENDING
    assert d.status("auto").priority is Priority.HIGH


def test_auto_does_not_wait_at_a_level_that_has_room_in_too_small_a_class_alone(
    desk: Callable,
) -> None:
    d = desk(_two_classes(a100=6, v100=2))
    d.tell(QuotaObserved(Quota("high", priority="high", node_class="a100", nodes=2)))
    found = d.run("one", 3, priority="auto")
    assert (found.priority, found.assignment.node_class) == (Priority.NORMAL, "a100")


def test_a_job_waits_for_no_nodes_of_a_class_in_which_its_limit_has_no_room(
    desk: Callable,
) -> None:
    d = desk(_two_classes(a100=3, v100=3))
    d.tell(QuotaObserved(Quota("high", priority="high", node_class="a100", nodes=2)))
    d.run("first", 3, priority="high", nodeClass="v100")
    d.submit("large", 3, priority="high")
    assert d.status("large").pending.blocked_by == ("default/first",)
    # The two nodes are not kept for it.
    assert d.run("second", 1, priority="normal", nodeClass="a100").phase is Phase.RUNNING
    assert d.run("third", 2, priority="normal", nodeClass="a100").phase is Phase.RUNNING


def test_a_priority_is_taken_over_when_its_limit_has_room(desk: Callable) -> None:
    d = desk()
    d.tell(QuotaObserved(Quota("high", priority="high", nodes=2)))
    d.run("one", 2, priority="high")
    d.run("two", 1)
    raised = sample_job("two", 1, priority="high")
    d.tell(JobSubmitted(raised))
    assert d.status("two").priority is Priority.NORMAL
    d.tell(JobRemoved("default/one"))
    d.empty("one")
    assert d.status("two").priority is Priority.HIGH


def test_a_limit_that_shrinks_takes_nodes_from_nobody(desk: Callable) -> None:
    d = desk()
    d.run("one", 3)
    d.tell(QuotaObserved(Quota("all", nodes=2)))
    assert d.status("one").phase is Phase.RUNNING
    d.submit("two", 1)
    assert "quota all has 0 of 2 nodes left" in d.status("two").pending.message


def test_a_limit_ends_when_it_expires(desk: Callable) -> None:
    d = desk()
    d.tell(QuotaObserved(Quota("all", nodes=0, expires_at=d.now + 10)))
    actions = d.submit("one", 1)
    assert d.status("one").pending.reason == "QuotaExceeded"
    assert actions[-1].time == d.now + 10
    d.wait(10)
    assert d.status("one").phase is Phase.STARTING


def test_a_class_without_room_leaves_the_others(desk: Callable) -> None:
    nodes = [*two_zones(2, node_class="a100"), *two_zones(2, node_class="h100")]
    nodes = [
        type(node)(f"{node.node_class}-{node.name}", node.zone, node.leaf, node.node_class, 8)
        for node in nodes
    ]
    d = desk(nodes)
    d.tell(QuotaObserved(Quota("a", node_class="a100", nodes=1)))
    assert d.run("one", 2).assignment.node_class == "h100"
    d.submit("two", 2, nodeClass="a100")
    assert d.status("two").pending.reason == "QuotaExceeded"


def test_a_quota_reads_its_object() -> None:
    quota = FlyerQuota.model_validate(
        {
            "metadata": {"name": "q"},
            "spec": {"user": "anna", "nodes": 4, "expiresAt": "2027-01-01T00:00:00Z"},
        }
    )
    assert Quota.of(quota) == Quota("q", "anna", "*", "*", 4, 1798761600.0)


@pytest.mark.parametrize("mode", ["Graceful", "Now"])
def test_stop_is_a_field_of_the_object(desk: Callable, mode: str) -> None:
    d = desk()
    d.run("one", 2)
    d.tell(JobSubmitted(sample_job("one", 2, stop=mode)))
    status = d.status("one")
    assert status.phase is Phase.SUSPENDING
    assert status.suspension.reason == "Stopped"
    assert status.suspension.expired is (mode == "Now")
    d.submit("two", 1, stop=mode)
    assert d.status("two").reason == "Stopped"


def test_requeue_names_the_attempt_once(desk: Callable) -> None:
    d = desk()
    d.run("one", 2)
    asked = sample_job("one", 2)
    notes = {"fireflyer.dev/requeue": "1", "fireflyer.dev/changed-by": "anna"}
    asked = asked.replace(metadata=asked.metadata.replace(annotations=notes))
    d.tell(JobSubmitted(asked))
    assert d.status("one").suspension.message == "requeued by anna"
    d.wait(60)
    d.empty("one")
    assert d.status("one").history.attempt == 2
    d.up("one")
    d.tell(JobSubmitted(asked))
    assert d.status("one").phase is Phase.RUNNING


def test_the_epoch_is_the_leaders_that_wrote(desk: Callable) -> None:
    d = desk()
    assert d.run("one", 1).epoch == 1
    d.restart()
    d.tell()
    assert d.status("one").epoch == 1  # nothing changed: nothing is written
    d.tell(JobRemoved("default/one"))
    assert d.status("one").epoch == 2


def test_what_a_job_apart_holds_counts_as_if_the_engine_knew_it(desk: Callable) -> None:
    d = desk()
    d.tell(QuotaObserved(Quota("anna", "anna", nodes=3)))
    d.run("apart", 2, user="anna")
    stored = d.jobs["default/apart"].replace(status=d.status("apart"))
    before = stored.replace(status=stored.status.replace(phase=Phase.QUEUED, assignment=None))
    for statuses in ((stored,), (stored, before), (before, stored)):
        d.state = rebuild(
            d.nodes, (), d.now, 2, d.policy, d.state.quotas.values(), apart=statuses
        )  # fmt: skip
        d.submit("second", 2, user="anna")
        pending = d.status("second").pending
        assert pending.message == (
            "quota anna has 1 of 3 nodes left for anna, wants 2: 2 used by default/apart (2)"
        )
        told = explain(d.state, "default/second", d.now)
        assert (told.verdict, told.remedies) == ("cannot", ())
        assert quota_usage(d.state, d.now)[0][1][0].nodes == 2
    d.state = rebuild(d.nodes, (), d.now, 3, d.policy, d.state.quotas.values())
    assert d.run("second", 2, user="anna").phase is Phase.RUNNING


def test_a_job_in_quarantine_leaves_the_engine_and_keeps_what_it_holds(desk: Callable) -> None:
    d = desk(two_zones(1))
    d.tell(QuotaObserved(Quota("anna", "anna", nodes=1)))
    d.run("bad", 1, user="anna", priority="low")
    d.run("other", 1, user="ben", priority="extreme-high")
    (held,) = d.names("bad")
    d.wait(100)  # past its minRuntime
    d.submit("taker", 1, user="ben", priority="high")  # it waits for the node of `bad`
    assert d.names("taker") == (held,)
    kept = replace(next(node for node in d.nodes if node.name == held), ready=False, reason="kept")
    actions = d.tell(JobQuarantined("default/bad"), NodeObserved(kept))
    assert "default/bad" not in d.state.jobs
    assert all(getattr(action, "job", "") != "default/bad" for action in actions)
    assert d.names("taker") == ()
    d.submit("hers", 1, user="anna")
    assert d.status("hers").pending.message == (
        "quota anna has 0 of 1 nodes left for anna, wants 1: 1 used by default/bad (1)"
    )
    d.tell(JobQuarantined("default/unknown"))


def test_service_accounts_of_a_namespace_share_its_quota() -> None:
    """Whoever may edit a namespace can make any number of accounts in it."""
    from flyer.api import load_manifest
    from flyer.api.names import USER_ANNOTATION

    text = """
apiVersion: fireflyer.dev/v1alpha1
kind: FlyerJob
metadata: {name: gpt, namespace: lab}
spec: {nodes: 1, template: {spec: {containers: [{name: t, image: i, command: [c]}]}}}
"""
    (job,) = load_manifest(text)
    found = set()
    for user in ("", "system:serviceaccount:lab:a", "system:serviceaccount:lab:b"):
        metadata = job.metadata.replace(annotations={USER_ANNOTATION: user} if user else {})
        found.add(job.replace(metadata=metadata).user)
    assert found == {"lab"}
    anna = job.metadata.replace(annotations={USER_ANNOTATION: "anna"})
    assert job.replace(metadata=anna).user == "anna"


def _submit(d: Any, key: str, nodes: int, *, user: str = "", **spec: Any) -> None:
    """A job of any namespace."""
    namespace, _, name = key.partition("/")
    job = sample_job(name, nodes, user=user, **spec)
    d.tell(JobSubmitted(job.replace(metadata=job.metadata.replace(namespace=namespace))))


def _held(d: Any) -> int:
    return sum(
        len(job.status.assignment.nodes)
        for job in d.state.jobs.values()
        if job.holding and job.status.assignment
    )


def test_many_identities_of_one_namespace_share_its_limit(desk: Callable) -> None:
    d = desk()
    d.tell(QuotaObserved(Quota("each", nodes=2, kind=QuotaSubject.NAMESPACE)))
    for index in range(6):
        account = f"system:serviceaccount:lab:bot-{index}"
        _submit(d, f"lab/job-{index}", 1, user=account if index % 2 else f"person-{index}")
    assert _held(d) == 2
    pending = d.state.jobs["lab/job-5"].status.pending
    assert "quota each has 0 of 2 nodes left for namespace lab, wants 1" in pending.message
    # Another namespace has a limit of its own.
    _submit(d, "other/job", 2)
    assert d.state.jobs["other/job"].status.phase is Phase.STARTING


def test_a_total_holds_over_all_users(desk: Callable) -> None:
    d = desk()
    d.tell(
        QuotaObserved(Quota("all", nodes=3, total=True)),
        QuotaObserved(Quota("anna", "anna", nodes=6)),
    )
    for user in ("anna", "ben", "cleo", "dan"):
        _submit(d, f"default/{user}", 1, user=user)
    assert _held(d) == 3
    pending = d.state.jobs["default/dan"].status.pending
    assert pending.reason == "WaitingForQuota"
    assert "quota all has 0 of 3 nodes left for all users" in pending.message
    # A limit by name, larger than the total, does not replace it.
    _submit(d, "default/big", 4, user="anna")
    assert d.state.jobs["default/big"].status.pending.verdict == "Never"


def test_a_full_limit_of_ones_own_blocks_no_other_user_of_the_total(desk: Callable) -> None:
    d = desk()
    d.tell(
        QuotaObserved(Quota("anna", "anna", nodes=1)),
        QuotaObserved(Quota("all", nodes=3, total=True)),
    )
    _submit(d, "default/one", 1, user="anna")
    d.now += 1
    _submit(d, "default/two", 1, user="anna")
    d.now += 1
    _submit(d, "default/bens", 2, user="ben")
    assert d.state.jobs["default/two"].status.pending.reason == "WaitingForQuota"
    assert d.state.jobs["default/bens"].status.phase is Phase.STARTING


def test_a_team_is_what_its_namespaces_have_in_common(desk: Callable) -> None:
    d = desk()
    d.tell(
        TeamObserved("vision-a", "vision"),
        TeamObserved("vision-b", "vision"),
        QuotaObserved(Quota("teams", nodes=2, kind=QuotaSubject.TEAM)),
    )
    _submit(d, "vision-a/one", 2)
    _submit(d, "vision-b/two", 1)
    _submit(d, "free/three", 3)  # a namespace without a team has no such limit
    assert d.state.jobs["vision-b/two"].status.pending.reason == "WaitingForQuota"
    assert d.state.jobs["free/three"].status.phase is Phase.STARTING
    d.tell(TeamObserved("vision-b", ""))
    assert d.state.jobs["vision-b/two"].status.phase is Phase.STARTING


def test_a_queue_has_a_limit_whoever_uses_it(desk: Callable) -> None:
    d = desk()
    d.tell(QuotaObserved(Quota("nightly", "nightly", nodes=2, kind=QuotaSubject.QUEUE)))
    _submit(d, "a/one", 2, user="anna", queue="nightly")
    _submit(d, "b/two", 1, user="ben", queue="nightly")
    _submit(d, "b/three", 1, user="ben")
    assert d.state.jobs["b/two"].status.pending.reason == "WaitingForQuota"
    assert d.state.jobs["b/three"].status.phase is Phase.STARTING


def _spec(**spec: Any) -> Quota:
    return Quota.of(
        FlyerQuota.model_validate({"metadata": {"name": "q"}, "spec": {"nodes": 4, **spec}})
    )


def test_a_limit_without_a_subject_is_about_each_namespace() -> None:
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
def test_a_subject_that_means_nothing_is_refused(spec: dict[str, str], why: str) -> None:
    with pytest.raises(ValidationError, match=why.replace("*", r"\*")):
        _spec(**spec)


def test_loads_name_the_subjects(desk: Callable) -> None:
    d = desk()
    d.tell(
        QuotaObserved(Quota("each", nodes=4, kind=QuotaSubject.NAMESPACE)),
        QuotaObserved(Quota("all", nodes=3, total=True)),
    )
    _submit(d, "a/one", 2, user="anna")
    _submit(d, "b/two", 1, user="ben")
    _submit(d, "b/three", 1, user="cleo")
    loads = quota_loads(d.state, d.now)
    assert loads["each"].held == {"a": [2], "b": [1]}
    assert loads["all"].held == {"anna": [2], "ben": [1]}
    assert (loads["each"].waiting, loads["all"].waiting) == (0, 1)


def test_a_rebuilt_state_knows_the_teams(desk: Callable) -> None:
    d = desk()
    quota = Quota("teams", nodes=1, kind=QuotaSubject.TEAM)
    d.state = rebuild(d.nodes, (), d.now, 2, d.policy, [quota], teams={"a": "x", "b": "x"})
    _submit(d, "a/one", 1)
    _submit(d, "b/two", 1)
    assert _held(d) == 1
