"""Clusters that exclude each other: whose namespace and whose rows, also after faults and edits."""

from __future__ import annotations

import pytest
from flyer.kube.threefs.reservations import reservations_of

from fakekube import Fault

from .conftest import NAMESPACE
from .simulated import cluster

EARLIER = "2020-01-01T00:00:00Z"
RIVAL = ("far", "other")


def value(name, namespace="a", *, age=0, reserved=(), **more):
    """An object as a list returns it; a higher `age` was created earlier."""
    metadata = {
        "name": name, "namespace": namespace, "uid": f"uid-{name}",
        "creationTimestamp": f"2026-01-01T00:00:{59 - age:02}Z", **more,
    }  # fmt: skip
    return {"metadata": metadata, "status": {"reserved": list(reserved)}}


def etcd(prefix, *hosts):
    return {"metadata": {"etcd": {"endpoints": [f"http://{it}:1" for it in hosts],
                                  "prefix": prefix}}}  # fmt: skip


def decide(*pairs):
    """Decisions about objects and the specifications that they have; None: an invalid one."""
    values = [each for each, _ in pairs]
    parsed = {}
    for each, spec in pairs:
        metadata = each["metadata"]
        parsed[metadata["uid"]] = "spec: invalid"
        if spec is not None:
            content = cluster(**spec)
            named = content.metadata.replace(namespace=metadata["namespace"])
            parsed[metadata["uid"]] = content.replace(metadata=named)
    return reservations_of(values, parsed)


def refused(*pairs):
    return {uid.removeprefix("uid-") for uid in decide(*pairs).refused}


def test_the_older_of_two_new_clusters_comes_first():
    new = (value("new"), etcd("/x", "e")), (value("old", "b", age=9), etcd("/x", "e"))
    assert refused(*new) == {"new"}
    decisions = decide(*new)
    assert decisions.missing == {"uid-old": ("namespaces/b", "http://e:1/x")}


@pytest.mark.parametrize(
    ("one", "two", "overlap"),
    [
        (etcd("/x", "e"), etcd("/x", "f"), False),
        (etcd("/x", "e", "f"), etcd("/x", "f", "g"), True),
        (etcd("/x", "e"), etcd("/x/y", "e"), True),
        (etcd("/x/y", "e"), etcd("/x", "e"), True),
        (etcd("/x/y/z", "e"), etcd("/x", "e"), True),
        (etcd("/x", "e"), etcd("/xy", "e"), False),
        (etcd("/x/y", "e"), etcd("/x/z", "e"), False),
    ],
)
def test_prefixes_of_one_etcd_overlap_if_one_is_a_folder_of_the_other(one, two, overlap):
    assert refused((value("old", age=1), one), (value("new", "b"), two)) == (
        {"new"} if overlap else set()
    )


def test_a_reservation_comes_before_age_and_outlasts_an_invalid_specification():
    held = value("runs", reserved=("namespaces/a", "http://e:1/x"))
    older = value("older", "b", age=9), etcd("/x", "e")
    assert refused((held, etcd("/x", "e")), older) == {"older"}
    assert refused((held, None), older) == {"older"}
    same_namespace = value("second", "a", age=9), etcd("/y", "e")
    assert refused((held, None), same_namespace) == {"second"}


def test_an_edit_takes_no_rows_that_another_cluster_has_reserved():
    held = value("victim", reserved=("namespaces/a", "http://e:1/x"))
    edited = value("older", "b", age=9, reserved=("namespaces/b", "http://f:1/x"))
    assert refused((held, etcd("/x", "e")), (edited, etcd("/x", "e", "f"))) == {"older"}


def test_a_refused_cluster_excludes_no_other():
    runs = value("runs", age=9, reserved=("namespaces/a", "http://e:1/x")), etcd("/x", "e")
    squats = value("second", age=8), etcd("/y", "e")
    assert refused(runs, squats, (value("new", "b"), etcd("/y", "e"))) == {"second"}


def test_two_reservations_of_the_same_rows_leave_one_cluster():
    both = ("http://e:1/x",)
    one = value("old", age=9, reserved=("namespaces/a", *both)), etcd("/x", "e")
    two = value("new", "b", reserved=("namespaces/b", *both)), etcd("/x", "e")
    assert refused(one, two) == refused(two, one) == {"new"}


def test_a_cluster_that_is_being_deleted_keeps_its_reservations_and_gets_none():
    ends = value("ends", age=9, deletionTimestamp=EARLIER)
    new = value("new", "b"), etcd("/x", "e")
    assert not refused((ends, etcd("/x", "e")), new)
    ends["status"]["reserved"] = ["namespaces/a", "http://e:1/x"]
    assert refused((ends, etcd("/x", "e")), new) == {"new"}


@pytest.fixture
async def rivals(kubernetes, operator, until):
    """A cluster that runs, and an older one of another namespace that wants its rows."""
    kubernetes.create()
    await until(lambda: kubernetes.status().get("phase") == "Ready")
    kubernetes.store.create("namespaces", {"metadata": {"name": "other"}})
    clock = kubernetes.store.clock
    kubernetes.store.clock = lambda: clock() - 3600.0
    kubernetes.create(*RIVAL)
    kubernetes.store.clock = clock
    await until(lambda: kubernetes.condition("Accepted", *RIVAL).get("reason") == "Conflict")


async def still_refused(kubernetes, until, reason):
    await until(lambda: kubernetes.condition("Accepted")["reason"] == reason)
    for name, namespace in (("main", NAMESPACE), RIVAL):  # both are decided again
        with kubernetes.store.unchecked():
            edit = {"spec": {"priorityClassName": "other"}}
            changed = kubernetes.store.patch("threefsclusters", name, edit, namespace)
        now = changed["metadata"]["generation"]
        await until(
            lambda name=name, namespace=namespace, now=now: (
                kubernetes.status(name, namespace)["observedGeneration"] == now
            )
        )
    assert kubernetes.condition("Accepted")["reason"] == reason
    assert kubernetes.condition("Accepted", *RIVAL)["reason"] == "Conflict"
    sets = kubernetes.store.all("statefulsets")
    assert {stateful["metadata"]["namespace"] for stateful in sets} == {NAMESPACE}


async def test_an_invalid_edit_leaves_the_rows_to_their_cluster(kubernetes, rivals, until):
    before = kubernetes.status()
    with kubernetes.store.unchecked():  # of another release: the schema permits it there
        kubernetes.edit(futureField=1)
    await still_refused(kubernetes, until, "Invalid")
    for field in ("version", "ready", "capacity", "reserved", "storageNodes"):
        assert kubernetes.status().get(field) == before.get(field), field


async def test_a_rejected_edit_leaves_the_rows_to_their_cluster(
    kubernetes, rivals, until, api_server
):
    api_server.faults.add(
        Fault(
            "refuse", verb="update", resource="statefulsets", code=422, reason="Invalid",
            times=1_000_000,
        )
    )  # fmt: skip
    kubernetes.edit(image="r/threefs:2")
    await still_refused(kubernetes, until, "Rejected")


async def test_nothing_is_created_before_the_reservation_is_stored(
    kubernetes, operator, until, api_server
):
    fault = Fault(
        "refuse", verb="update", resource="threefsclusters/status", code=409, reason="Conflict",
        times=1_000_000,
    )  # fmt: skip
    api_server.faults.add(fault)
    kubernetes.create()
    await until(lambda: fault.times < 1_000_000 - 5)
    assert not kubernetes.store.all("statefulsets")
    assert not kubernetes.store.all("configmaps")
    api_server.faults.clear()
    await until(lambda: kubernetes.status().get("phase") == "Ready")
    assert kubernetes.status()["reserved"] == ["namespaces/default", "http://etcd:2379/3fs"]


async def test_a_status_of_another_release_keeps_what_is_known(kubernetes, operator, until):
    kubernetes.create()
    await until(lambda: kubernetes.status().get("phase") == "Ready")
    with kubernetes.store.unchecked():
        kubernetes.store.patch(
            "threefsclusters", "main", {"status": {"phase": "Resting", "later": 1}}, NAMESPACE,
            "status",
        )  # fmt: skip
        kubernetes.edit(futureField=1)
    await until(lambda: kubernetes.condition("Accepted")["reason"] == "Invalid")
    assert kubernetes.status()["reserved"] == ["namespaces/default", "http://etcd:2379/3fs"]
    assert kubernetes.status()["version"] == "1"
