"""Who reads a job does not read of the jobs in other namespaces."""

import json

import pytest
from flyer.api import Eviction, FlyerJobStatus, Pending, Phase
from flyer.kube.services.privacy import Privacy

JOBS = {"prod/gpt-5", "team-a/mine"}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("prod/gpt-5 of ann has 2 at priority high", "another job has 2 at priority high"),
        ("kept for prod/gpt-5, which is left alone", "kept for another job, which is left alone"),
        ("team-a/mine of bob has 1", "team-a/mine of bob has 1"),
        ("restored from /prod/gpt-5 and 3/4 shards", "restored from /prod/gpt-5 and 3/4 shards"),
        ("no-such/job", "no-such/job"),
    ],
)
def test_names_of_other_namespaces_are_left_out(words, told):
    assert Privacy(JOBS.__contains__).words(words, "team-a/mine") == told


def test_every_field_of_a_status_is_covered():
    words = "prod/gpt-5 of ann"
    status = FlyerJobStatus(
        message=words,
        pending=Pending(reason="x", message=words, blocked_by=("prod/gpt-5", "team-a/other")),
        eviction=Eviction(reason="Preempted", by="prod/gpt-5", message=words, time=0.0, attempt=1),
    )
    found = Privacy(JOBS.__contains__).status(status, "team-a/mine")
    assert "gpt-5" not in json.dumps(found.to_object())
    assert found.pending.blocked_by == ("team-a/other",)


async def test_a_preempted_and_a_waiting_tenant_read_no_names(cluster, until):
    for name in ("prod", "team-a"):
        cluster.store.create("namespaces", {"metadata": {"name": name}})
    cluster.nodes("A")
    cluster.operator()
    cluster.submit("mine", namespace="team-a", priority="low")
    await until(lambda: cluster.status("mine", "team-a").phase is Phase.RUNNING, 20)
    cluster.submit("secret", namespace="prod", priority="extreme-high")
    await until(lambda: cluster.status("secret", "prod").phase is Phase.RUNNING, 20)
    cluster.submit("later", namespace="team-a", priority="low")
    await until(lambda: cluster.status("later", "team-a").pending, 20)
    await until(lambda: cluster.status("mine", "team-a").eviction, 20)
    told = list(cluster.store.all("flyerjobs", "team-a"))
    told += list(cluster.store.all("events", "team-a"))
    assert "another job" in json.dumps(told)
    assert "secret" not in json.dumps(told)
    assert "prod/" not in json.dumps(told)
