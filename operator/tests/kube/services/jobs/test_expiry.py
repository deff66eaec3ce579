"""Ended jobs are deleted at their expiry, and no others."""

from datetime import UTC, datetime

import pytest
from flyer.api import FinishedJobs, FlyerJobStatus, Phase
from flyer.kube.cache.job_view import JobView
from flyer.kube.services.jobs import expiry
from flyer.sim import sample_job

from fakekube import Fault


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(expiry, "CHECK_SECONDS", 0.02)


def there(cluster, name):
    return cluster.store.find("flyerjobs", name, "default") is not None


def limit(cluster, **limits):
    if cluster.store.find("flyertopologies", "cluster") is None:
        cluster.store.create("flyertopologies", {"metadata": {"name": "cluster"}, "spec": {}})
    patch = {"spec": {"finishedJobs": limits}}
    cluster.store.patch("flyertopologies", "cluster", patch, kind="application/merge-patch+json")


def view_ended(key, at):
    """As if the job had ended at that time."""
    condition = {"type": "Complete", "status": "True", "reason": "Succeeded", "message": "",
                 "lastTransitionTime": datetime.fromtimestamp(at, UTC).isoformat()}  # fmt: skip
    job = sample_job(key.partition("/")[2])
    status = FlyerJobStatus.model_validate({"phase": "Succeeded", "conditions": [condition]})
    return JobView(key, key, "1", job.replace(status=status))


async def ended(cluster, until, *names):
    await until(lambda: all(cluster.phase(name) is Phase.RUNNING for name in names))
    for name in names:
        cluster.finish(name)


async def test_an_ended_job_is_deleted_and_another_stays(cluster, until):
    cluster.nodes("AAA")
    cluster.operator()
    cluster.submit("brief", ttlSecondsAfterFinished=0)
    cluster.submit("later", ttlSecondsAfterFinished=3600)
    cluster.submit("kept")
    await ended(cluster, until, "brief", "later", "kept")
    await until(lambda: cluster.phase("kept") is Phase.SUCCEEDED)
    await until(lambda: cluster.phase("later") is Phase.SUCCEEDED)
    await until(lambda: not there(cluster, "brief"))
    assert there(cluster, "later")
    assert there(cluster, "kept")
    cluster.edit("later", ttlSecondsAfterFinished=0)
    await until(lambda: not there(cluster, "later"))
    assert there(cluster, "kept")


async def test_a_job_that_runs_or_is_suspended_stays(cluster, until):
    cluster.nodes("AA")
    operator = cluster.operator()
    cluster.submit("runs", ttlSecondsAfterFinished=0)
    cluster.submit("rests", ttlSecondsAfterFinished=0, suspend=True)
    await until(lambda: cluster.phase("runs") is Phase.RUNNING)
    await until(lambda: cluster.phase("rests") is Phase.SUSPENDED)
    views = list(operator.cache.jobs.values())
    assert len(views) == 2
    assert expiry.to_delete(views, FinishedJobs(per_namespace=0, ttl_seconds=0), 2e9) == []


async def test_the_topology_limits_age_and_number_of_ended_jobs(cluster, until):
    cluster.nodes("AAAA")
    cluster.operator()
    for name in ("first", "second", "third"):
        cluster.submit(name)
    cluster.submit("named", ttlSecondsAfterFinished=3600)
    for name in ("first", "second", "third", "named"):
        await ended(cluster, until, name)
        await until(lambda name=name: cluster.phase(name) is Phase.SUCCEEDED)
    limit(cluster, perNamespace=3)
    await until(lambda: not there(cluster, "first"))
    assert all(there(cluster, name) for name in ("second", "third", "named"))
    limit(cluster, perNamespace=3, ttlSeconds=0)
    await until(lambda: not there(cluster, "second") and not there(cluster, "third"))
    assert there(cluster, "named"), "it says itself how long it stays"
    limit(cluster, perNamespace=0)
    await until(lambda: not there(cluster, "named"))


def test_the_oldest_ended_jobs_of_each_namespace_are_deleted_first():
    views = [view_ended(f"{space}/{at}", at) for at in (4, 2, 3, 1) for space in ("a", "b")]
    expired = expiry.to_delete(views[1:], FinishedJobs(per_namespace=2), 100)
    assert [view.key for view in expired] == ["a/1", "b/1", "b/2"]


async def test_a_refused_deletion_is_retried_and_blocks_no_other(cluster, until, monkeypatch):
    cluster.nodes("AA")
    cluster.operator()
    monkeypatch.setattr(expiry, "REFUSED_SECONDS", 0.1)
    refused = Fault(
        "refuse", verb="delete", resource="flyerjobs", name="held", code=403, reason="Forbidden",
        times=3,
    )  # fmt: skip
    cluster.server.faults.add(refused)
    cluster.submit("held", ttlSecondsAfterFinished=0)
    await ended(cluster, until, "held")
    await until(lambda: refused.seen == 1)
    cluster.submit("brief", ttlSecondsAfterFinished=0)
    await ended(cluster, until, "brief")
    await until(lambda: not there(cluster, "brief"))
    await until(lambda: not there(cluster, "held"))
