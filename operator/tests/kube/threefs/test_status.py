"""The status of a ThreeFSCluster after a change, on the in-memory API server."""

from __future__ import annotations

import pytest
from flyer.kube.threefs import rollout

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
