"""Jobs survive every fault of the API server."""

import asyncio

import pytest
from flyer.api import Phase
from flyer.kube.apiserver import LeaseSettings

from fakekube import Fault

# Long enough for a busy host.
LEASE = LeaseSettings(
    namespace="fireflyer-system", duration_seconds=300, renew_seconds=240, retry_seconds=0.1
)


async def live(cluster, until, name="a"):
    cluster.submit(name, 2)
    await until(lambda: cluster.phase(name) is Phase.RUNNING)
    cluster.edit(name, suspend=True)
    await until(lambda: cluster.phase(name) is Phase.SUSPENDED)
    cluster.edit(name, suspend=False)
    await until(lambda: cluster.phase(name) is Phase.RUNNING)
    cluster.finish(name)
    await until(lambda: cluster.phase(name) is Phase.SUCCEEDED)
    await until(lambda: not cluster.status(name).occupied)
    assert cluster.status(name).history.attempt == 2
    assert cluster.status(name).history.restarts == 0


RESOURCES = ("flyerjobs/status", "pods", "pods/binding", "flyertopologies/status")


FAULTS = {
    "refuse429": {
        "do": "refuse", "code": 429, "reason": "TooManyRequests", "retry_after_seconds": 0,
    },
    "refuse500": {"do": "refuse", "code": 500},
    "refuse409": {"do": "refuse", "code": 409, "reason": "Conflict"},
    "drop": {"do": "drop"},
    "lose": {"do": "lose"},
    "hang": {"do": "hang"},
}  # fmt: skip
# The API server sends no 409 Conflict for a create, or for a delete without a version.
CASES = [
    (fault, resource)
    for fault in FAULTS
    for resource in RESOURCES
    if (fault, resource) != ("refuse409", "pods")
]


@pytest.mark.parametrize(("fault", "resource"), CASES, ids=["-".join(case) for case in CASES])
async def test_each_third_call_fails(cluster, until, resource, fault):
    cluster.nodes("AB")  # the topology's token is granted and released
    operator = cluster.operator()
    await until(lambda: operator.serves)
    every = Fault(**FAULTS[fault], resource=resource, agent=operator.name, times=1000, every=3)
    cluster.server.faults.add(every)
    await live(cluster, until)
    assert every.committed


async def test_a_replica_whose_lease_write_had_no_response_leads(cluster, until):
    """The first attempt of each call is performed without a response; the retry reports that."""
    fault = Fault("lose", resource="leases", times=1_000_000, every=2)
    cluster.server.faults.add(fault)
    cluster.nodes("AB")
    operator = cluster.operator(LEASE)
    await live(cluster, until)
    assert fault.committed
    assert operator.leader.term.epoch == 1


async def test_watches_are_continuously_duplicated_delayed_interrupted_and_expired(cluster, until):
    cluster.nodes("AA")
    cluster.operator()
    watches = cluster.server.faults.watches
    watches.double = True
    watches.delay_seconds = 0.01

    async def disturb():
        turn = 0
        while True:
            await asyncio.sleep(0.07)
            turn += 1
            if turn % 3:
                cluster.server.cut_watches()
            else:
                cluster.server.expire_watches()

    trouble = asyncio.create_task(disturb())
    try:
        await live(cluster, until)
    finally:
        trouble.cancel()
    assert watches.doubled
    assert watches.delayed


async def test_the_api_server_restarts_under_a_running_gang(cluster, until):
    cluster.nodes("AA")
    operator = cluster.operator()
    cluster.submit("a", 2)
    await until(lambda: cluster.phase("a") is Phase.RUNNING)
    port = int(cluster.server.url.rpartition(":")[2])
    await cluster.server.close(keep_port=True)
    await until(lambda: not operator.serves)
    await cluster.server.start(port)
    await until(lambda: operator.serves)
    cluster.finish("a")
    await until(lambda: cluster.phase("a") is Phase.SUCCEEDED)
    assert cluster.status("a").history.attempt == 1


async def test_constant_edits_of_a_job_do_not_stop_it(cluster, until):
    cluster.nodes("AA")
    cluster.operator()
    cluster.submit("a", 2)

    async def edit():
        turn = 0
        while True:
            turn += 1
            labels = {"metadata": {"labels": {"turn": str(turn)}}}
            cluster.store.patch("flyerjobs", "a", labels, "default")
            await asyncio.sleep(0.003)

    editor = asyncio.create_task(edit())
    try:
        await until(lambda: cluster.phase("a") is Phase.RUNNING)
        cluster.finish("a")
        await until(lambda: cluster.phase("a") is Phase.SUCCEEDED)
    finally:
        editor.cancel()


async def test_a_job_that_changes_before_every_replacement_is_committed(cluster, until):
    conflicts = Fault(
        "refuse", "update", "flyerjobs/status", code=409, reason="Conflict", times=1_000_000
    )
    cluster.server.faults.add(conflicts)
    cluster.nodes("AA")
    cluster.operator()
    cluster.submit("a", 2)
    await until(lambda: cluster.phase("a") is Phase.RUNNING)
    cluster.finish("a")
    await until(lambda: cluster.phase("a") is Phase.SUCCEEDED)
    assert conflicts.seen > 0


async def test_a_rejected_status_affects_only_its_job(cluster, until):
    cluster.nodes("AA")
    operator = cluster.operator()
    await until(lambda: operator.serves)
    cluster.store.table("flyerjobs").checks.append(
        lambda _, after: (
            "status.zones: is odd"
            if after["metadata"]["name"] == "odd" and "status" in after
            else ""
        )
    )
    cluster.submit("odd", 2)
    cluster.submit("a", 2)
    await until(lambda: cluster.phase("a") is Phase.RUNNING)
    assert operator.serves


async def test_a_manifest_that_never_becomes_pods_fails_its_job(cluster, until):
    cluster.nodes("AA")
    cluster.operator()
    cluster.store.table("pods").checks.append(
        lambda _, after: (
            "spec.containers[0].image: Required value"
            if after["metadata"]["name"].startswith("odd")
            else ""
        )
    )
    cluster.submit("odd", 2)
    await until(lambda: cluster.phase("odd") is Phase.FAILED)
    assert "Required value" in cluster.status("odd").message
    cluster.submit("a", 2)
    await until(lambda: cluster.phase("a") is Phase.RUNNING)
