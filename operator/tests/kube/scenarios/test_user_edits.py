"""Edits of users reach the scheduler: stop, requeue, quotas, the topology."""

from flyer.api import API_VERSION, Phase


def custom(kind, name, **spec):
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": name}, "spec": spec}


async def test_the_stop_field_ends_the_job(cluster, until):
    cluster.nodes("AA")
    cluster.operator()
    cluster.submit("a", 2)
    await until(lambda: cluster.phase("a") is Phase.RUNNING)
    cluster.edit("a", stop="Graceful")
    await until(lambda: cluster.phase("a") is Phase.FAILED)
    assert cluster.status("a").reason == "Stopped"


async def test_a_requeue_annotation_starts_the_next_attempt(cluster, until):
    cluster.nodes("AA")
    cluster.operator()
    cluster.submit("a", 2)
    await until(lambda: cluster.phase("a") is Phase.RUNNING)
    patch = {"metadata": {"annotations": {"fireflyer.dev/requeue": "1"}}}
    cluster.store.patch("flyerjobs", "a", patch, "default", kind="application/merge-patch+json")
    await until(
        lambda: cluster.phase("a") is Phase.RUNNING and cluster.status("a").history.attempt == 2
    )
    assert cluster.status("a").eviction.reason == "Requeued"


async def test_a_drain_moves_the_gang_and_a_cordon_does_not(cluster, until):
    cluster.nodes("AAA")
    cluster.operator()
    cluster.submit("a", 2)
    await until(lambda: cluster.phase("a") is Phase.RUNNING)
    first = cluster.status("a").assignment.names[0]
    cluster.store.patch("nodes", first, {"spec": {"unschedulable": True}})
    cluster.submit("b", 1)  # runs on the third node: the leader has then observed the cordon
    await until(lambda: cluster.phase("b") is Phase.RUNNING)
    assert (cluster.phase("a"), cluster.status("a").history.attempt) == (Phase.RUNNING, 1)
    cluster.store.delete("flyerjobs", "b", "default")
    await until(lambda: not cluster.pods("b"))
    drain = {"reason": "a new disk", "by": "anna"}
    cluster.store.create("nodehealths", custom("NodeHealth", first, drain=drain))
    await until(
        lambda: cluster.phase("a") is Phase.RUNNING and cluster.status("a").history.attempt == 2
    )
    status = cluster.status("a")
    assert status.eviction.reason == "NodeDrained"
    assert status.eviction.message == f"node {first} is drained by anna: a new disk"
    assert status.checkpoint is not None  # it checkpointed before it released its nodes
    assert status.history.restarts == 0
    assert first not in status.assignment.names


async def test_a_job_waits_for_quota_and_starts_once_it_is_removed(cluster, until):
    cluster.nodes("AA")
    cluster.store.create("flyerquotas", custom("FlyerQuota", "all", nodes=1))
    cluster.operator()
    cluster.submit("a", 2)
    await until(lambda: cluster.status("a").pending is not None)
    await until(lambda: cluster.status("a").pending.reason == "QuotaExceeded")
    cluster.store.delete("flyerquotas", "all")
    await until(lambda: cluster.phase("a") is Phase.RUNNING)


async def test_a_team_is_a_label_of_the_namespace_that_the_topology_names(cluster, until):
    cluster.nodes("AAA")
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "default"}}
    namespace["metadata"]["labels"] = {"example.com/team": "vision"}
    if cluster.store.find("namespaces", "default") is None:
        cluster.store.create("namespaces", namespace)
    else:
        cluster.store.patch("namespaces", "default", namespace, kind="application/merge-patch+json")
    cluster.store.create("flyerquotas", custom("FlyerQuota", "all", team="vision", nodes=2))
    cluster.store.create("flyertopologies", custom("FlyerTopology", "cluster"))
    operator = cluster.operator()
    cluster.submit("a", 2)
    await until(lambda: cluster.phase("a") is Phase.RUNNING)
    patch = {"spec": {"teamLabel": "example.com/team"}}
    cluster.store.patch("flyertopologies", "cluster", patch, kind="application/merge-patch+json")
    await until(lambda: operator.leader.term.state.teams == {"default": "vision"})
    cluster.submit("c", 1)
    await until(lambda: cluster.status("c").pending is not None)
    await until(lambda: cluster.status("c").pending.reason == "WaitingForQuota")
    labels = {"metadata": {"labels": {"example.com/team": "speech"}}}
    cluster.store.patch("namespaces", "default", labels, kind="application/merge-patch+json")
    await until(lambda: cluster.phase("c") is Phase.RUNNING)


async def test_gangs_are_placed_only_in_zones_of_the_topology(cluster, until):
    cluster.nodes("AABB")
    topology = custom("FlyerTopology", "cluster", zones=[{"name": "B"}])
    cluster.store.create("flyertopologies", topology)
    cluster.operator()
    cluster.submit("a", 2)
    await until(lambda: cluster.phase("a") is Phase.RUNNING)
    assert cluster.status("a").zones == "B"
    cluster.submit("b", 2)
    await until(lambda: cluster.status("b").pending is not None)
    patch = {"spec": {"zones": [{"name": "A"}, {"name": "B"}]}}
    cluster.store.patch("flyertopologies", "cluster", patch, kind="application/merge-patch+json")
    await until(lambda: cluster.phase("b") is Phase.RUNNING)
    assert cluster.status("b").zones == "A"
