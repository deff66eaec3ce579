"""Unstored facts: no superseded ones are kept, and none is dropped too early."""

from flyer.engine import CheckpointReported, Released, UserStateSet
from flyer.kube.gateway.unstored import Unstored


def saved(step, *, durable=True):
    return CheckpointReported("d/a", 1, step, f"step-{step}", durable=durable)


STATE = UserStateSet("d/a", 1, 3)


def test_only_durable_facts_count():
    unstored = Unstored()
    unstored.add(0, [saved(1, durable=False), Released("d/a", 1)])
    assert not unstored
    unstored.add(0, [saved(1), STATE])
    assert unstored.has(0)
    assert not unstored.has(1)
    assert unstored.stored(saved(1)) == {0}
    assert unstored.has(0)
    assert unstored.stored(STATE) == {0}
    assert not unstored


def test_the_same_fact_from_several_pods_is_stored_for_all_of_them():
    unstored = Unstored()
    for node_rank in range(3):
        unstored.add(node_rank, [saved(1)])
    assert unstored.stored(saved(1)) == {0, 1, 2}
    assert unstored.stored(saved(1)) == set()
    assert not unstored


def test_repeated_reports_of_a_pod_use_the_memory_of_one():
    unstored = Unstored()
    unstored.add(1, [saved(999)])
    for step in range(1000):
        unstored.add(0, [saved(step)])
    assert len(unstored._newest) == 2
    assert unstored.stored(saved(5)) == set()
    assert unstored.has(0)
    assert unstored.stored(saved(999)) == {0, 1}
    assert not unstored._keys
