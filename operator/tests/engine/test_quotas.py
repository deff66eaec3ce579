"""Quotas: nobody gets more nodes than every limit that applies to him has room for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from flyer.api import FlyerQuota, Phase, Priority
from flyer.engine import (
    JobRemoved,
    JobSubmitted,
    Quota,
    QuotaObserved,
    QuotaRemoved,
    explain,
    quota_usage,
    rebuild,
)
from flyer.sim import sample_job, two_zones

if TYPE_CHECKING:
    from collections.abc import Callable


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
    assert [one.command for one in told.remedies] == ["flyer suspend default/first"]
    # Another user is not concerned.
    assert d.run("third", 2, user="ben").phase is Phase.RUNNING


def test_more_than_the_limit_can_never_run(desk: Callable) -> None:
    d = desk()
    d.tell(QuotaObserved(Quota("small", nodes=2, priority="high")))
    d.submit("big", 3, priority="high")
    pending = d.status("big").pending
    assert (pending.verdict, pending.reason) == ("Never", "QuotaExceeded")
    assert pending.message == (
        "wants 3 nodes, quota small gives default 2 at priority high in all groups: set spec.nodes "
        "to 2 or less, choose another priority or group, or ask for a larger FlyerQuota small"
    )
    assert explain(d.state, "default/big", d.now).verdict == "never"
    d.tell(QuotaRemoved("small"))
    assert d.status("big").phase is Phase.STARTING


def test_a_limit_of_ones_own_stands_in_for_everybodys(desk: Callable) -> None:
    d = desk()
    d.tell(
        QuotaObserved(Quota("all", nodes=1)),
        QuotaObserved(Quota("anna", user="anna", nodes=4)),
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
    d.tell(QuotaObserved(Quota("anna", user="anna", nodes=3)))
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
        type(one)(f"{one.node_class}-{one.name}", one.zone, one.leaf, one.node_class, 8)
        for one in nodes
    ]
    d = desk(nodes)
    d.tell(QuotaObserved(Quota("a", group="a100", nodes=1)))
    assert d.run("one", 2).assignment.group == "h100"
    d.submit("two", 2, group="a100")
    assert d.status("two").pending.reason == "QuotaExceeded"


def test_a_quota_reads_its_object() -> None:
    quota = FlyerQuota.model_validate(
        {
            "metadata": {"name": "q"},
            "spec": {"user": "anna", "nodes": 4, "expiresAt": "2027-01-01T00:00:00Z"},
        }
    )
    assert Quota.of(quota) == Quota("q", "anna", "*", "*", 4, 1798761600.0)


@pytest.mark.parametrize("mode", ["graceful", "now"])
def test_stop_is_a_field_of_the_object(desk: Callable, mode: str) -> None:
    d = desk()
    d.run("one", 2)
    d.tell(JobSubmitted(sample_job("one", 2, stop=mode)))
    status = d.status("one")
    assert status.phase is Phase.SUSPENDING
    assert status.suspension.reason == "Stopped"
    assert status.suspension.expired is (mode == "now")
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
    assert d.status("one").chain.attempt == 2
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
