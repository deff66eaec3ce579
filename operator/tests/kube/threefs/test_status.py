"""The status of a ThreeFSCluster after a change, on the in-memory API server."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from flyer.api.timestamps import format_timestamp
from flyer.kube.threefs import rollout

from fakekube import Fault

from .conftest import NAMESPACE

pytestmark = pytest.mark.usefixtures("operator")

SERVICES = ("mgmtd", "meta", "storage")
REQUESTS = {"resources": {"requests": {"cpu": "20m"}}}


@pytest.fixture(autouse=True)
def no_settling(monkeypatch):
    monkeypatch.setattr(rollout, "SETTLE_SECONDS", 0.0)


async def ready(kubernetes, until):
    await until(lambda: kubernetes.status().get("phase") == "Ready")


def changed(kubernetes, **spec) -> int:
    """The generation of a change that is made while the StatefulSet controller is down."""
    kubernetes.paused = True
    kubernetes.edit(**spec)
    return kubernetes.store.get("threefsclusters", "main", NAMESPACE)["metadata"]["generation"]


async def looked(kubernetes, until):
    """Waits for several steps of the controller."""
    looks = len(kubernetes.asked)
    await until(lambda: len(kubernetes.asked) > looks + 4)


def condition_of(status, name):
    return next(each for each in status["conditions"] if each["type"] == name)


async def test_no_status_of_a_change_is_ready_before_its_pods_serve(kubernetes, until):
    kubernetes.create()
    await ready(kubernetes, until)
    before = {pod["metadata"]["uid"] for pod in kubernetes.pods()}
    generation = changed(kubernetes, **dict.fromkeys(SERVICES, REQUESTS))
    await until(lambda: kubernetes.statuses(generation))
    await looked(kubernetes, until)
    for status in kubernetes.statuses(generation):
        assert status["phase"] == "Progressing"
        assert [status[kind]["updated"] for kind in SERVICES] == [0, 0, 0]
        progressing = condition_of(status, "Progressing")
        assert (progressing["status"], progressing["reason"]) == ("True", "Updating")
        assert progressing["message"].endswith(": update of storage, mgmtd, meta")
    kubernetes.paused = False
    await ready(kubernetes, until)
    *earlier, last = kubernetes.statuses(generation)
    assert not [status for status in earlier if status["phase"] == "Ready"]
    assert [last[kind]["updated"] for kind in SERVICES] == [1, 1, 4]
    assert before.isdisjoint(pod["metadata"]["uid"] for pod in kubernetes.pods())


async def test_a_change_of_one_service_leaves_the_others_updated(kubernetes, until):
    kubernetes.create()
    await ready(kubernetes, until)
    generation = changed(kubernetes, meta=REQUESTS)
    await until(lambda: kubernetes.statuses(generation))
    await looked(kubernetes, until)
    for status in kubernetes.statuses(generation):
        assert status["phase"] == "Progressing"
        assert [status[kind]["updated"] for kind in SERVICES] == [1, 0, 4]


async def test_a_corrected_image_is_not_reported_as_blocked(kubernetes, until):
    kubernetes.create()
    await ready(kubernetes, until)
    kubernetes.broken = {"r/threefs:2"}
    kubernetes.edit(image="r/threefs:2")
    await until(lambda: kubernetes.status()["phase"] == "Blocked")
    generation = changed(kubernetes, image="r/threefs:3")
    await until(lambda: kubernetes.statuses(generation))
    await looked(kubernetes, until)
    assert {status["phase"] for status in kubernetes.statuses(generation)} == {"Progressing"}
    kubernetes.paused = False
    await ready(kubernetes, until)


async def test_a_change_without_effect_on_pods_replaces_none(kubernetes, until):
    kubernetes.create()
    await ready(kubernetes, until)
    # The retention policy of claims: a StatefulSet has changed, but no pod.
    generation = changed(kubernetes, deletionPolicy="Delete")
    await until(lambda: kubernetes.statuses(generation))
    assert kubernetes.status()["phase"] == "Progressing"
    kubernetes.paused = False
    await ready(kubernetes, until)
    assert not kubernetes.replaced


async def test_an_upgrade_progresses_until_its_last_pod_is_ready(kubernetes, until):
    kubernetes.create()
    await ready(kubernetes, until)
    kubernetes.slow = {"threefs-meta-0"}
    kubernetes.edit(image="r/threefs:2")
    await until(lambda: "waiting: threefs-meta-0 is not ready" in message(kubernetes))
    await looked(kubernetes, until)
    progressing = kubernetes.condition("Progressing")
    assert (progressing["status"], progressing["reason"]) == ("True", "Upgrading")
    assert kubernetes.status()["phase"] == "Progressing"
    kubernetes.become_ready("threefs-meta-0")
    await ready(kubernetes, until)
    assert kubernetes.condition("Progressing")["status"] == "False"


async def test_a_last_pod_that_does_not_start_blocks_the_upgrade(kubernetes, until):
    kubernetes.create()
    await ready(kubernetes, until)
    kubernetes.broken_pods = {"threefs-meta-0"}
    kubernetes.edit(image="r/threefs:2")
    await until(lambda: kubernetes.status()["phase"] == "Blocked")
    await looked(kubernetes, until)
    why = kubernetes.condition("UpgradeBlocked")["message"]
    assert why.startswith("threefs-meta-0 does not become ready: ImagePullBackOff")
    assert kubernetes.condition("Progressing")["reason"] == "Upgrading"
    kubernetes.broken_pods = set()
    kubernetes.edit(image="r/threefs:1")
    await ready(kubernetes, until)
    assert kubernetes.condition("UpgradeBlocked")["status"] == "False"


async def test_a_change_lasts_until_its_chains_are_whole(kubernetes, until):
    kubernetes.create()
    await ready(kubernetes, until)
    whole = kubernetes.health

    async def degrade():
        kubernetes.health = replace(whole, whole=3, degraded=1)

    kubernetes.edit(storage={"replicas": 5})
    kubernetes.before_health = degrade
    await until(lambda: "waiting: 1 chains degraded" in message(kubernetes))
    await looked(kubernetes, until)
    progressing = kubernetes.condition("Progressing")
    assert (progressing["status"], progressing["reason"]) == ("True", "Resizing")
    kubernetes.health = whole
    await ready(kubernetes, until)


async def test_a_failure_after_a_change_is_not_reported_as_progress(kubernetes, until):
    kubernetes.create()
    await ready(kubernetes, until)
    kubernetes.health = replace(kubernetes.health, whole=3, degraded=1)
    await until(lambda: kubernetes.status()["phase"] == "Degraded")
    assert kubernetes.condition("Progressing")["status"] == "False"


async def test_a_rejected_change_does_not_stop_the_report_of_the_services(
    kubernetes, until, api_server
):
    kubernetes.create()
    await ready(kubernetes, until)
    api_server.faults.add(
        Fault(
            "refuse", verb="update", resource="statefulsets", code=422, reason="Invalid",
            times=1_000_000,
        )
    )  # fmt: skip
    kubernetes.edit(storage={"replicas": 5}, image="r/threefs:2")
    await until(lambda: kubernetes.condition("Accepted")["reason"] == "Rejected")
    kubernetes.health = replace(kubernetes.health, whole=3, degraded=1)
    await until(lambda: kubernetes.status()["chains"]["degraded"] == 1)
    status = kubernetes.status()
    assert (status["phase"], status["ready"], status["version"]) == ("Blocked", "6/6", "1")
    assert [status[kind]["updated"] for kind in SERVICES] == [0, 0, 0]
    held = {each["type"]: each["status"] for each in status["conditions"]}
    assert held == {"Accepted": "False", "Available": "True", "Degraded": "True"}
    kubernetes.health = replace(kubernetes.health, whole=4, degraded=0)
    api_server.faults.clear()
    await until(lambda: kubernetes.status().get("version") == "2")
    await ready(kubernetes, until)


async def test_a_rejected_read_is_reported(kubernetes, until, api_server):
    kubernetes.create()
    await ready(kubernetes, until)
    api_server.faults.add(
        Fault("refuse", verb="list", resource="pods", code=403, reason="Forbidden", times=1_000_000)
    )
    await until(lambda: kubernetes.condition("Accepted")["reason"] == "Rejected")
    api_server.faults.clear()
    await ready(kubernetes, until)


def event(kubernetes, name, message, age_seconds=0.0, kind="meta", **fields):
    """An event of the StatefulSet of a service."""
    uid = kubernetes.stateful_set(kind)["metadata"]["uid"]
    value = {
        "apiVersion": "v1", "kind": "Event", "metadata": {"name": name}, "type": "Warning",
        "reason": "FailedCreate", "message": message,
        "involvedObject": {"kind": "StatefulSet", "name": f"threefs-{kind}", "uid": uid},
        "lastTimestamp": format_timestamp(time.time() - age_seconds), **fields,
    }  # fmt: skip
    kubernetes.store.create("events", value, NAMESPACE)


async def without_a_pod_of_meta(kubernetes, until):
    kubernetes.refused = {"threefs-meta"}
    kubernetes.create()
    await until(lambda: "0 of 1 pods" in kubernetes.condition("Progressing").get("message", ""))


def message(kubernetes):
    return kubernetes.condition("Progressing")["message"]


async def test_a_pod_that_cannot_be_created_has_its_reason_in_the_status(kubernetes, until):
    await without_a_pod_of_meta(kubernetes, until)
    event(kubernetes, "older", "create Pod failed: another reason", age_seconds=300.0)
    event(kubernetes, "newest", "create Pod failed:\n exceeded quota: small", age_seconds=200.0)
    # Of an earlier StatefulSet of this name; others are not failed creations.
    other = {"kind": "StatefulSet", "name": "threefs-meta", "uid": "other"}
    event(kubernetes, "foreign", "create Pod failed: foreign", involvedObject=other)
    event(kubernetes, "normal", "create Pod successful", type="Normal")
    event(kubernetes, "deletion", "delete Pod failed", reason="FailedDelete")
    why = "threefs-meta: 0 of 1 pods exist: FailedCreate: create Pod failed: exceeded quota: small"
    await until(lambda: why in message(kubernetes))
    await looked(kubernetes, until)
    assert message(kubernetes) == why
    kubernetes.refused = set()
    await ready(kubernetes, until)
    assert "quota" not in message(kubernetes)


async def test_the_reason_is_recent_and_bounded(kubernetes, until):
    await without_a_pod_of_meta(kubernetes, until)
    event(kubernetes, "old", "create Pod failed: old", age_seconds=3600.0)
    await looked(kubernetes, until)
    assert "FailedCreate" not in message(kubernetes)
    micro = {"lastObservedTime": format_timestamp(time.time()), "count": 3}
    event(kubernetes, "series", "x" * 1000, lastTimestamp=None, series=micro)
    await until(lambda: "FailedCreate" in message(kubernetes))
    assert message(kubernetes).count("x" * 300) == 1
    assert message(kubernetes).count("x") < 420


async def test_an_upgrade_that_waits_for_a_pod_names_why_it_is_not_created(kubernetes, until):
    kubernetes.create()
    await ready(kubernetes, until)
    kubernetes.refused = {"threefs-storage"}
    event(kubernetes, "quota", "exceeded quota: small", kind="storage")
    kubernetes.edit(storage=REQUESTS)
    why = "waiting: threefs-storage: 3 of 4 pods exist: FailedCreate: exceeded quota: small"
    await until(lambda: why in message(kubernetes))
    await looked(kubernetes, until)
    assert len(kubernetes.pods("storage")) == 3, "no other pod is evicted"
    kubernetes.refused = set()
    await ready(kubernetes, until)


async def test_without_the_right_to_read_events_the_numbers_are_reported(
    kubernetes, until, api_server
):
    api_server.faults.add(
        Fault("refuse", verb="list", resource="events", code=403, reason="Forbidden", times=10_000)
    )
    await without_a_pod_of_meta(kubernetes, until)
    event(kubernetes, "quota", "exceeded quota: small")
    await looked(kubernetes, until)
    assert "FailedCreate" not in message(kubernetes)
    assert kubernetes.condition("Accepted")["status"] == "True"
