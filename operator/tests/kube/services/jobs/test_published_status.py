"""A job's status and events do not name jobs in other namespaces."""

import json

import pytest
from flyer.api import Condition, Eviction, FlyerJobStatus, Pending, Phase, Suspension
from flyer.kube.services.jobs.published_status import Redactor
from flyer.kube.services.pods import gangs

JOBS = {"prod/gpt-5", "team-a/mine"}


@pytest.mark.parametrize(
    ("words", "reported"),
    [
        ("prod/gpt-5 of ann has 2 at priority high", "another job has 2 at priority high"),
        ("kept for prod/gpt-5, which is quarantined", "kept for another job, which is quarantined"),
        ("team-a/mine of bob has 1", "team-a/mine of bob has 1"),
        ("restored from /prod/gpt-5 and 3/4 shards", "restored from /prod/gpt-5 and 3/4 shards"),
        ("no-such/job", "no-such/job"),
        (
            "prod/gpt-5 of Ann van Dijk has 2; prod/gpt-5 of Bo Li is leaving (suspend code 1)",
            "another job has 2; another job is leaving (suspend code 1)",
        ),
        (
            "preempted by prod/gpt-5 of Ann, R&D (priority high)",
            "preempted by another job (priority high)",
        ),
    ],
)
def test_names_of_other_namespaces_are_omitted(words, reported):
    assert Redactor(JOBS.__contains__).redact(words, "team-a/mine") == reported


def test_every_field_of_a_status_is_covered():
    words = "prod/gpt-5 of ann"
    status = FlyerJobStatus(
        message=words,
        pending=Pending(reason="x", message=words, blocked_by=("prod/gpt-5", "team-a/other")),
        eviction=Eviction(reason="Preempted", by="prod/gpt-5", message=words, time=0.0, attempt=1),
    )
    redacted = Redactor(JOBS.__contains__).redact_status(status, "team-a/mine")
    assert "gpt-5" not in json.dumps(redacted.to_object())
    assert redacted.pending.blocked_by == ("team-a/other",)


def test_a_deleted_job_stays_unnamed():
    """The engine keeps the text about a preemption for the victim's lifetime."""
    words = "preempted by prod/gpt-5 of ann (priority high)"
    status = FlyerJobStatus(
        phase=Phase.SUSPENDING,
        message=words,
        suspension=Suspension(
            reason="Preempted",
            by="prod/gpt-5",
            message=words,
            since=0.0,
            deadline=1.0,
            limit=1.0,
        ),
        conditions=(
            Condition(
                type="Suspended",
                status="True",
                reason="x",
                message=words,
                last_transition_time=0.0,
            ),
        ),
    )
    eviction = Eviction(reason="Preempted", by="prod/gpt-5", message=words, time=0.0, attempt=1)
    redactor = Redactor(lambda _key: False)
    for item in (status, status.replace(suspension=None, eviction=eviction)):
        assert "prod" not in json.dumps(redactor.redact_status(item, "team-a/mine").to_object())


def test_a_user_whose_name_has_a_slash_is_named():
    eviction = Eviction(
        reason="Suspended", by="corp/ann", message="by corp/ann", time=0.0, attempt=1
    )
    redacted = Redactor(lambda _key: False).redact_status(
        FlyerJobStatus(eviction=eviction), "team-a/mine"
    )
    assert redacted.eviction == eviction


async def test_a_preempted_and_a_waiting_tenant_read_no_names(cluster, until):
    for name in ("prod", "team-a"):
        cluster.store.create("namespaces", {"metadata": {"name": name}})
    cluster.nodes("A")
    cluster.operator()
    cluster.submit("mine", namespace="team-a", priority="low")
    await until(lambda: cluster.status("mine", "team-a").phase is Phase.RUNNING)
    cluster.submit("secret", namespace="prod", priority="extreme-high")
    await until(lambda: cluster.status("secret", "prod").phase is Phase.RUNNING)
    cluster.submit("later", namespace="team-a", priority="low")
    await until(lambda: cluster.status("later", "team-a").pending)
    await until(lambda: cluster.status("mine", "team-a").eviction)
    reported = list(cluster.store.all("flyerjobs", "team-a"))
    reported += list(cluster.store.all("events", "team-a"))
    assert "another job" in json.dumps(reported)
    assert "secret" not in json.dumps(reported)
    assert "prod/" not in json.dumps(reported)


async def test_a_victims_status_never_names_a_deleted_job(cluster, until):
    for name in ("prod", "team-a"):
        cluster.store.create("namespaces", {"metadata": {"name": name}})
    cluster.nodes("A")
    cluster.operator()
    cluster.submit("mine", namespace="team-a", priority="low")
    await until(lambda: cluster.status("mine", "team-a").phase is Phase.RUNNING)
    cluster.submit("secret", namespace="prod", priority="extreme-high")
    await until(lambda: cluster.status("secret", "prod").phase is Phase.RUNNING)
    cluster.store.delete("flyerjobs", "secret", "prod")
    await until(lambda: cluster.status("mine", "team-a").phase is Phase.RUNNING)
    status = cluster.status("mine", "team-a")
    assert status.history.attempt == 2
    assert status.eviction.by == "another job"
    assert "secret" not in json.dumps(status.to_object())


async def test_the_message_of_an_internal_error_names_no_other_job(cluster, until, monkeypatch):
    """An error of the operator may quote its input."""
    for name in ("prod", "team-a"):
        cluster.store.create("namespaces", {"metadata": {"name": name}})
    cluster.nodes("AA")
    cluster.operator()
    cluster.submit("secret", namespace="prod")
    await until(lambda: cluster.status("secret", "prod").phase is Phase.RUNNING)

    def fails(_self, _job, start, _found=None):
        raise ZeroDivisionError(f"{start.job} next to prod/secret of ann")

    monkeypatch.setattr(gangs.Gangs, "start", fails)
    cluster.submit("mine", namespace="team-a")

    def quarantined():
        return cluster.status("mine", "team-a").condition("Quarantined")

    await until(quarantined)
    await until(lambda: cluster.store.all("events", "team-a"))
    reported = [quarantined().message, *cluster.store.all("events", "team-a")]
    assert "next to another job" in json.dumps(reported)
    assert "secret" not in json.dumps(reported)
