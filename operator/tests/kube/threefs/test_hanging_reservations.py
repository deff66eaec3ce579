"""Reservations that the API server does not store: they delay no other cluster."""

from __future__ import annotations

import pytest
from flyer.kube.apiserver.errors import UnreachableError
from flyer.kube.threefs import controller, rollout
from flyer.kube.threefs.settings import ClusterSettings

from fakekube import Fault

HANGING = 20


pytestmark = pytest.mark.usefixtures("operator")


def create(kubernetes, name):
    kubernetes.store.create("namespaces", {"metadata": {"name": name}})
    etcd = {"endpoints": ["http://etcd:2379"], "prefix": f"/{name}"}
    kubernetes.create(name, name, metadata={"etcd": etcd})


def create_hanging(kubernetes, api_server):
    """Clusters in separate namespaces whose statuses cannot be written. Returns their faults."""
    faults = []
    for number in range(HANGING):
        name = f"a-{number}"
        fault = Fault(
            "hang", verb="update", resource="threefsclusters/status", name=name, times=1_000_000
        )
        api_server.faults.add(fault)
        faults.append(fault)
        create(kubernetes, name)
    return faults


async def test_reservations_are_stored_concurrently_with_a_bound(
    kubernetes, until, api_server, monkeypatch
):
    monkeypatch.setattr(controller, "RESERVE_SECONDS", 3600.0)
    faults = create_hanging(kubernetes, api_server)
    await until(lambda: sum(fault.committed for fault in faults) >= controller.CONCURRENT_MAX)
    assert sum(fault.committed for fault in faults) == controller.CONCURRENT_MAX


async def test_clusters_are_served_while_the_reservations_of_others_hang(
    kubernetes, until, api_server, monkeypatch
):
    monkeypatch.setattr(controller, "RESERVE_SECONDS", 0.5)
    monkeypatch.setattr(rollout, "SETTLE_SECONDS", 0.0)
    kubernetes.create()
    await until(lambda: kubernetes.status().get("phase") == "Ready")
    faults = create_hanging(kubernetes, api_server)
    await until(lambda: sum(fault.committed for fault in faults) > controller.CONCURRENT_MAX)
    kubernetes.edit(image="r/threefs:2")
    create(kubernetes, "b")  # later than the others, in every order
    await until(lambda: kubernetes.status("b", "b").get("reserved"))
    await until(lambda: kubernetes.status().get("version") == "2")
    assert not any(kubernetes.status(f"a-{number}", f"a-{number}") for number in range(HANGING))


class Failing:
    """An API server that stores the status of no cluster, and records the requests."""

    def __init__(self):
        self.requested = []

    async def replace(self, _resource, value, _subresource):
        self.requested.append(value["metadata"]["name"])
        raise UnreachableError("update", "no answer")


async def test_reservations_with_fewer_tries_come_first():
    api = Failing()
    clusters = controller.ThreeFSClusters(api, ClusterSettings())

    async def reserve(*names):
        values = [{"metadata": {"name": it, "namespace": "x", "uid": it}} for it in names]
        await clusters._reserve_all(values, dict.fromkeys(names, ("rows",)))
        requested, api.requested = api.requested, []
        return requested

    assert await reserve("a", "b") == ["a", "b"]
    assert await reserve("a", "b", "c") == ["c", "a", "b"]
    assert await reserve("a", "b", "c") == ["c", "a", "b"]  # one try less
    assert await reserve("a", "d") == ["d", "a"]
    assert await reserve() == []
    assert await reserve("e", "a") == ["e", "a"]
