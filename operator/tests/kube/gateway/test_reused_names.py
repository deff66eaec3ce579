"""Gangs of two objects that have the same name, one after the other."""

from types import SimpleNamespace

from flyer.engine import GangStarted
from flyer.kube.gateway import PodIdentity


def recreated(gang):
    """The same attempt of a new object with the job's name."""
    job = gang.job.replace(metadata=gang.job.metadata.replace(uid="uid-new"))
    pods = [PodIdentity(pod.namespace, pod.name, f"new-{pod.uid}", pod.ip) for pod in gang.pods]
    return SimpleNamespace(**{**vars(gang), "job": job, "uid": "uid-new", "pods": pods})


async def test_forgetting_a_later_attempt_forgets_the_gang_of_an_earlier_one(harness):
    """No pods of the later attempt were created."""
    gang = harness.gang(attempt=3)
    harness.expect(gang)
    harness.gateway.forget(gang.key, 2, gang.uid)
    harness.gateway.forget(gang.key, 4, "uid-new")
    assert harness.gateway.absent(gang.key)
    harness.gateway.forget(gang.key, 4, gang.uid)
    assert not harness.gateway.absent(gang.key)
    assert not harness.gateway._members


async def test_a_new_object_with_the_name_replaces_the_gang(harness):
    old = harness.gang(attempt=3)
    harness.expect(old)
    new = recreated(harness.gang(attempt=1))
    harness.expect(new)
    assert set(harness.gateway._members) == {pod.uid for pod in new.pods}
    assert harness.gateway.absent(new.key) == ["gpt-1-0", "gpt-1-1"]
    harness.signal(SimpleNamespace(**{**vars(new), "uid": old.uid}))
    assert harness.gateway.kill(new.key, 1, old.uid) == set()
    gang = harness.gateway._gangs[new.key]
    order = gang.order(0, 0.0)
    assert (order.suspend, order.kill, order.terminate) == (None, False, False)
    assert not [event for event in harness.events if isinstance(event, GangStarted)]
