"""Ended jobs are deleted when their time is over, and no others."""

import pytest
from flyer.api import Phase
from flyer.kube.services import expiry

from fakekube import Fault


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(expiry, "LOOK_SECONDS", 0.02)


def there(cluster, name):
    return cluster.store.find("flyerjobs", name, "default") is not None


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
    views = list(operator.world.jobs.values())
    assert len(views) == 2
    assert [expiry.expires_at(view) for view in views] == [None, None]


async def test_a_refused_deletion_is_tried_again_and_keeps_no_other(cluster, until, monkeypatch):
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
