"""A new leader has observed every earlier commit, even if its cache was stale."""

from flyer.api import TOPOLOGY_NAME, Phase, ZoneCount
from flyer.kube.gateway import outcome_of
from flyer.kube.services import ClusterCache
from flyer.kube.services.jobs.token import Token
from flyer.kube.services.leader.resync import Resync

from fakekube import Fault


async def running(cluster, until, name="a", nodes=2):
    cluster.submit(name, nodes)
    await until(lambda: cluster.phase(name) is Phase.RUNNING)


def lists(cluster, agent):
    return [
        call for call in cluster.server.faults.calls
        if (call.agent, call.verb, call.resource) == (agent, "list", "flyerjobs")
    ]  # fmt: skip


async def test_a_standby_lists_no_jobs_again(cluster, until):
    cluster.nodes("AAAA")
    first = cluster.operator()
    await until(lambda: first.serves)
    second = cluster.operator()
    await running(cluster, until)
    await until(lambda: second.cache.synced and lists(cluster, second.name))
    first.kill()
    await until(lambda: second.serves)
    assert len(lists(cluster, second.name)) == 1
    assert cluster.status("a").epoch == second.election.epoch
    cluster.finish("a")
    await until(lambda: cluster.phase("a") is Phase.SUCCEEDED)


async def test_a_takeover_does_not_wait_for_a_silent_watch(cluster, until):
    cluster.nodes("AAAA")
    first = cluster.operator()
    await until(lambda: first.serves)
    await running(cluster, until, "old")
    second = cluster.operator()
    await until(lambda: second.cache.synced)
    cluster.server.faults.watches.frozen = True
    await until(lambda: not second.serves)
    # The successor's cache does not have this change, so it has to list the jobs.
    before = cluster.status("old")
    cluster.store.patch("flyerjobs", "old", {"status": {"reason": "x"}}, "default", "status")
    first.kill()
    await until(lambda: second.serves)
    assert len(lists(cluster, second.name)) >= 2
    assert second.leader.term.state.jobs["default/old"].status.history == before.history
    cluster.server.faults.watches.frozen = False
    cluster.finish("old")
    await until(lambda: cluster.phase("old") is Phase.SUCCEEDED)


async def test_a_stale_first_list_is_brought_up_to_date(cluster, until):
    cluster.nodes("AAAA")
    first = cluster.operator()
    await until(lambda: first.serves)
    await running(cluster, until, "early")
    cluster.server.keep_lists()
    await running(cluster, until, "late")
    used_nodes = set(cluster.status("late").assignment.names)
    first.kill()
    second = cluster.operator()  # its first list does not have the later job
    await until(lambda: second.serves)
    assert second.leader.term.state.jobs["default/late"].status.phase is Phase.RUNNING
    cluster.submit("next", 2)
    cluster.finish("early")
    await until(lambda: cluster.phase("next") is Phase.RUNNING)
    assert not used_nodes & set(cluster.status("next").assignment.names)
    assert cluster.status("late").history.attempt == 1


async def test_a_job_with_a_reused_name_is_not_changed(api_server, connect):
    store = api_server.store
    for name in ("a", "b"):
        store.create("flyerjobs", manifest(name), "default")
        store.patch("flyerjobs", name, {"status": {"epoch": 3}}, "default", "status")
    api = connect()
    cache = ClusterCache(api, outcome_of)
    await cache.jobs.refresh()
    for kind in cache.caches:
        kind.synced.set()
    store.delete("flyerjobs", "b", "default")
    store.create("flyerjobs", manifest("b"), "default")

    async def raise_epoch(least):
        return least

    assert await Resync(api, cache, Token(api), raise_epoch).run(2) == 4
    assert store.get("flyerjobs", "a", "default")["status"]["epoch"] == 4
    assert "status" not in store.get("flyerjobs", "b", "default")
    # No watch reported the write, so all objects were listed.
    assert cache.job("default/b").job.status is None


async def test_token_writes_without_a_response_are_recognized(api_server, connect):
    """The API server refuses the retry of each write, because the first attempt succeeded."""
    fault = Fault("lose", verb="patch", resource="flyertopologies/status", times=1000, every=2)
    api_server.faults.add(fault)
    token = Token(connect())
    await token.read()
    await token.open(3, [ZoneCount(name="A", nodes=2, ready_nodes=1)])
    await token.hold("default/a")
    assert token.holder == "default/a"
    await token.release("default/a")
    assert not token.holder
    stored = api_server.store.get("flyertopologies", TOPOLOGY_NAME)["status"]
    assert stored["epoch"] == 3
    assert not stored.get("holder")
    assert fault.committed == 3


def manifest(name):
    containers = [{"name": "trainer", "image": "i", "command": ["train"]}]
    spec = {"nodes": 1, "template": {"spec": {"containers": containers}}}
    return {"metadata": {"name": name}, "spec": spec}
