"""The planner over a simulated 3FS: upgrades, drains, replacements, faults and user edits."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from flyer.kube.threefs.health import Health, NodeState
from flyer.kube.threefs.observed import DrainJob, Observed, Pod, ServiceSet, drain_job_of
from flyer.kube.threefs.plan import plan
from flyer.kube.threefs.rollout import SETTLE_SECONDS, STUCK_SECONDS

from .simulated import STEP_SECONDS, Simulation, cluster

SERVICES = {"mgmtd": {"replicas": 3}, "meta": {"replicas": 2}}


def running(seed=0, **spec) -> Simulation:
    """A cluster that is complete."""
    simulation = Simulation(cluster(**SERVICES, **spec), seed)
    simulation.run(30)
    assert simulation.up_to_date, simulation.last
    assert len(simulation.chains) == simulation.replicas["storage"]
    assert not simulation.restarts
    return simulation


def test_an_upgrade_restarts_each_pod_once_in_the_order_of_compatibility():
    simulation = running()
    simulation.primary = 2
    simulation.edit(image="r/threefs:2")
    simulation.run(400)
    assert simulation.up_to_date
    assert simulation.restarts == [
        *(f"threefs-storage-{n}" for n in (3, 2, 1, 0)),
        "threefs-mgmtd-1", "threefs-mgmtd-0", "threefs-mgmtd-2",
        "threefs-meta-1", "threefs-meta-0",
    ]  # fmt: skip
    assert simulation.last.upgrading == ""


@pytest.mark.parametrize("seed", range(5))
def test_a_broken_image_stops_the_upgrade_at_one_pod_and_can_be_taken_back(seed):
    simulation = running(seed)
    simulation.broken = {"r/threefs:2"}
    simulation.edit(image="r/threefs:2")
    simulation.run(400)
    assert simulation.restarts == ["threefs-storage-3"]
    assert "threefs-storage-3 does not become ready: CrashLoop" in simulation.last.upgrade_blocked
    assert all(any(simulation.serves(chain, node) for node in nodes)
               for chain, nodes in enumerate(simulation.chains))  # fmt: skip
    simulation.edit(image="r/threefs:1")
    simulation.run(60)
    assert simulation.up_to_date
    assert simulation.restarts == ["threefs-storage-3"] * 2
    assert simulation.last.upgrade_blocked == ""


def test_a_later_image_replaces_a_broken_one():
    simulation = running()
    simulation.broken = {"r/threefs:2"}
    simulation.edit(image="r/threefs:2")
    simulation.run(50)
    simulation.edit(image="r/threefs:3")
    simulation.run(500)
    assert simulation.up_to_date


def test_removed_services_are_drained_first():
    simulation = running(storage={"replicas": 6})
    simulation.edit(replicas=3)
    seen = set()
    for _ in range(100):
        simulation.step()
        seen.add(simulation.replicas["storage"])
    assert seen == {6, 3}
    assert simulation.draining == {4, 5, 6}
    assert simulation.drain is None
    assert {node for nodes in simulation.chains for node in nodes} <= {1, 2, 3}


def test_services_that_return_are_no_longer_drained():
    simulation = running(storage={"replicas": 5})
    simulation.edit(replicas=4)
    simulation.run(60)
    assert simulation.replicas["storage"] == 4
    simulation.edit(replicas=6)
    simulation.run(60)
    assert simulation.replicas["storage"] == 6
    assert simulation.draining == set()
    assert simulation.keep is None


def test_a_drain_that_is_taken_back_is_stopped_before_it_is_cancelled():
    simulation = running(storage={"replicas": 5})
    simulation.draining = {2}  # by an administrator
    simulation.edit(replicas=4)
    simulation.step()
    assert simulation.drain is not None
    simulation.edit(replicas=5)
    order = []
    for _ in range(20):
        step = simulation.step()
        order += [name for name in ("suspend", "keep", "remove") if getattr(step.resize, name)]
    assert order == ["suspend", "keep", "remove"]
    assert simulation.draining == {2}
    assert (simulation.drain, simulation.keep) == (None, None)
    assert simulation.replicas["storage"] == 5


@pytest.mark.parametrize("phase", ["Pending", "Running", "Succeeded", "Failed"])
def test_a_suspended_drain_has_stopped_once_its_pods_have_ended(phase):
    job = {
        "metadata": {"name": "threefs-drain", "uid": "j"},
        "spec": {"suspend": True},
        "status": {"conditions": [{"type": "Suspended", "status": "True"}]},
    }
    pod = {"metadata": {"ownerReferences": [{"uid": "j"}]}, "status": {"phase": phase}}
    other = {"metadata": {"ownerReferences": [{"uid": "k"}]}, "status": {"phase": "Running"}}
    assert drain_job_of(job, [pod, other]).stopped is (phase in ("Succeeded", "Failed"))


def test_a_drain_without_space_keeps_its_services():
    simulation = running(storage={"replicas": 3})
    simulation.edit(replicas=2)
    simulation.failing = {"threefs-storage-0"}
    simulation.run(50)
    assert simulation.replicas["storage"] == 3
    assert simulation.drain is not None


def test_a_failed_drain_is_repeated_after_a_pause():
    job = DrainJob("threefs-drain", frozenset({3}), failed_at=1000.0, message="no space")
    nodes = {number: NodeState(replicas=2, draining=number == 3) for number in (1, 2, 3)}
    observed = Observed(
        now=1001.0, sets={"storage": ServiceSet(3, "r")}, health=Health(3, nodes=nodes), drain=job,
    )  # fmt: skip
    step = plan(cluster(storage={"replicas": 2}), observed)
    assert step.replicas["storage"] == 3
    assert step.resize.failed
    assert "no space" in step.resize.note
    assert step.resize.remove == ()
    later = plan(cluster(storage={"replicas": 2}), replace(observed, now=1200.0))
    assert later.resize.remove == ("threefs-drain",)


@pytest.mark.parametrize(
    ("health", "removed"),
    [
        (Health(3, nodes={3: NodeState(draining=True)}), True),
        (Health(3, nodes={3: NodeState(replicas=1, draining=True)}), False),
        (Health(3, nodes={3: NodeState(draining=False)}), False),
        (Health(2, unavailable=1, nodes={3: NodeState(draining=True)}), False),
        (None, False),
    ],
)
def test_only_empty_services_are_removed_after_their_drain(health, removed):
    job = DrainJob("threefs-drain", frozenset({3}), succeeded=True)
    observed = Observed(1000.0, sets={"storage": ServiceSet(3, "r")}, health=health, drain=job)
    step = plan(cluster(storage={"replicas": 2}), observed)
    assert step.replicas["storage"] == (2 if removed else 3)


def test_a_deleted_claim_is_replaced_once_its_replicas_serve_elsewhere():
    simulation = running()
    simulation.ending_claims = {1}
    simulation.failing = {"threefs-storage-2"}
    simulation.run(20)
    assert not simulation.restarts
    assert "waiting" in simulation.last.replacing
    simulation.failing = set()
    simulation.run(40)
    assert simulation.restarts == ["threefs-storage-1"]
    assert simulation.last.replacing == ""


def pods(kind, count):
    return tuple(
        Pod(f"threefs-{kind}-{n}", f"{kind}{n}", n, "old", ready_since=0.0, started_at=900.0)
        for n in range(count)
    )


def upgrade(**changes) -> Observed:
    """All pods are ready and of an earlier specification."""
    observed = Observed(
        now=1000.0,
        pods={"storage": pods("storage", 4), "mgmtd": pods("mgmtd", 1), "meta": pods("meta", 1)},
        sets={"storage": ServiceSet(4, "new"), "mgmtd": ServiceSet(1, "new"),
              "meta": ServiceSet(1, "new")},
        health=Health(4, nodes={n: NodeState(replicas=2) for n in (1, 2, 3, 4)}),
    )  # fmt: skip
    return replace(observed, **changes)


def without(kind, pod) -> dict:
    before = upgrade().pods
    return {**before, kind: (pod, *before[kind][1:])}


def changed(kind, **changes) -> dict:
    return without(kind, replace(upgrade().pods[kind][0], **changes))


@pytest.mark.parametrize(
    ("observed", "reason"),
    [
        (upgrade(health=None), "mgmtd does not respond"),
        (upgrade(health=Health(3, degraded=1)), "1 degraded"),
        (upgrade(health=Health(3, unavailable=1)), "1 unavailable"),
        (upgrade(pods=changed("storage", ready_since=None)), "threefs-storage-0 is not ready"),
        (upgrade(pods=changed("storage", ready_since=1000.0 - SETTLE_SECONDS + 1)), "ready less"),
        (upgrade(pods={**upgrade().pods, "storage": pods("storage", 3)}), "3 of 4 pods"),
        (upgrade(pods=changed("meta", deleting=True)), "threefs-meta-0 is being deleted"),
        (upgrade(ending_claims=frozenset({2})), "claim"),
        (upgrade(sets={**upgrade().sets, "storage": ServiceSet(4, "new", settled=False)}),
         "StatefulSet of storage"),
    ],
)  # fmt: skip
def test_an_upgrade_waits(observed, reason):
    step = plan(cluster(), observed)
    if observed.ending_claims:
        assert step.restart.reason != "upgrade"
    else:
        assert step.restart is None
    assert reason in step.upgrading


def test_nothing_is_waited_for_without_a_reason():
    assert plan(cluster(), upgrade()).restart.pod.name == "threefs-storage-3"


def test_a_pod_that_hangs_is_replaced_after_ten_minutes_if_the_others_are_ready():
    hangs = changed("storage", ready_since=None, started_at=1000.0 - STUCK_SECONDS)
    assert plan(cluster(), upgrade(pods=hangs)).restart.pod.name == "threefs-storage-0"
    moment = changed("storage", ready_since=None, unready_since=999.0, started_at=0.0)
    step = plan(cluster(), upgrade(pods=moment))
    assert (step.restart, step.upgrade_blocked) == (None, ""), "it has worked until now"
    two = {**hangs, "storage": (hangs["storage"][0], replace(hangs["storage"][1], ready_since=None),
                                *hangs["storage"][2:])}  # fmt: skip
    assert plan(cluster(), upgrade(pods=two)).restart is None


def test_a_pod_that_was_unready_for_a_moment_does_not_block_the_upgrade():
    moment = changed("storage", ready_since=None, unready_since=999.0, started_at=0.0,
                     revision="new")  # fmt: skip
    assert plan(cluster(), upgrade(pods=moment)).upgrade_blocked == ""
    hangs = changed("storage", ready_since=None, unready_since=300.0, started_at=0.0,
                    revision="new")  # fmt: skip
    blocked = plan(cluster(), upgrade(pods=hangs)).upgrade_blocked
    assert "is not ready for 10 minutes" in blocked


def test_a_cluster_without_chains_is_upgraded():
    assert plan(cluster(), upgrade(health=Health())).restart.reason == "upgrade"


def test_services_whose_stateful_set_is_missing_are_drained_before_they_are_removed():
    claims = frozenset(range(6))
    step = plan(cluster(), Observed(now=1000.0, claims=claims))
    assert step.replicas["storage"] == 6
    assert plan(cluster(), Observed(now=1000.0, claims=frozenset({0}))).replicas["storage"] == 4
    health = Health(6, nodes={node: NodeState(2) for node in range(1, 7)})
    sets = {"storage": ServiceSet(6, "r")}
    step = plan(cluster(), Observed(1005.0, sets=sets, health=health, claims=claims))
    assert (step.replicas["storage"], step.resize.drain) == (6, {5, 6})


@pytest.mark.parametrize("seed", range(60))
def test_random_faults_and_edits_lose_no_data_and_end(seed):
    """Each step is checked; once the faults end, the cluster is what its specification asks for."""
    rng = random.Random(seed)
    simulation = running(seed, storage={"replicas": 5})
    number = 1
    for _ in range(rng.randint(3, 12)):
        match rng.randrange(6):
            case 0:
                number += 1
                simulation.edit(image=f"r/threefs:{number}")
            case 1:
                number += 1
                simulation.broken.add(f"r/threefs:{number}")
                simulation.edit(image=f"r/threefs:{number}")
            case 2:
                simulation.edit(replicas=rng.randint(3, 7))
            case 3:
                simulation.failing = {rng.choice(list(simulation.pods))}
            case 4:
                simulation.failing = set()
            case 5:
                simulation.ending_claims.add(rng.randrange(simulation.replicas["storage"]))
        simulation.run(rng.randint(1, 60))
    simulation.failing = set()
    number += 1
    simulation.edit(image=f"r/threefs:{number}", replicas=5)
    simulation.run(round(6000 / STEP_SECONDS))
    assert simulation.up_to_date, simulation.last
    assert simulation.replicas["storage"] == 5
    assert (simulation.drain, simulation.keep) == (None, None)
    assert simulation.draining.isdisjoint(range(1, 6))
