"""The scheduler's views of nodes."""

from typing import Any

import pytest
from flyer.kube.cache.node_view import shape_node


def node(allocatable: dict[str, str], capacity: dict[str, str]) -> dict[str, Any]:
    return {
        "metadata": {"name": "a", "labels": {"fireflyer.dev/zone": "A"}},
        "spec": {},
        "status": {
            "allocatable": allocatable,
            "capacity": capacity,
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


@pytest.mark.parametrize(
    ("allocatable", "capacity", "slots", "usable"),
    [
        ({"cpu": "8"}, {"cpu": "8"}, 8, True),
        ({"cpu": "8", "fireflyer.dev/gpu": "4"}, {"fireflyer.dev/gpu": "4"}, 4, True),
        # The plugin found no device: a node without GPUs.
        ({"cpu": "8", "fireflyer.dev/gpu": "0"}, {"fireflyer.dev/gpu": "0"}, 8, True),
        # It has four, and all of them are out of order.
        ({"cpu": "8", "fireflyer.dev/gpu": "0"}, {"fireflyer.dev/gpu": "4"}, 0, False),
    ],
)
def test_slots_are_the_devices_that_work_or_the_cores(
    allocatable: dict[str, str], capacity: dict[str, str], slots: int, usable: bool
) -> None:
    view = shape_node(node(allocatable, capacity)).node
    assert (view.slots, view.ready) == (slots, usable)


def test_only_the_operators_part_of_a_jobs_metadata_is_kept() -> None:
    """Annotations may be 256 KiB large, and the cache has every job."""
    from flyer.kube.cache.job_view import shape_job

    spec = {"containers": [{"name": "t", "image": "i", "command": ["c"]}]}
    value = {
        "apiVersion": "fireflyer.dev/v1alpha1",
        "kind": "FlyerJob",
        "metadata": {
            "name": "gpt", "namespace": "lab", "uid": "u", "managedFields": [{}],
            "finalizers": ["a/b"], "generateName": "g", "selfLink": "s",
            "ownerReferences": [{"apiVersion": "v1", "kind": "X", "name": "x", "uid": "y" * 10**6}],
            "annotations": {"mine": "x" * 200_000, "fireflyer.dev/user": "anna"},
            "labels": {"mine": "x", "kueue.x-k8s.io/queue-name": "q", "fireflyer.dev/x": "y"},
        },
        "spec": {"nodes": 1, "template": {"spec": spec}},
    }  # fmt: skip
    view = shape_job(value)
    assert view.job is not None, view.problem
    assert view.job.metadata.annotations == {"fireflyer.dev/user": "anna"}
    assert view.job.metadata.labels == {"kueue.x-k8s.io/queue-name": "q", "fireflyer.dev/x": "y"}
    keys = {"name", "namespace", "uid", "annotations", "labels"}
    assert view.job.metadata.to_object().keys() == keys
    assert (view.job.user, view.job.queue, view.finalizers) == ("anna", "q", ("a/b",))
    assert len(value["metadata"]["annotations"]) == 2  # type: ignore[arg-type]  the caller's stays


def test_views_share_the_sets_of_given_fields() -> None:
    from flyer.kube.cache.job_view import shape_job

    spec = {"containers": [{"name": "t", "image": "i", "command": ["c"]}]}
    first, second = (
        shape_job({
            "apiVersion": "fireflyer.dev/v1alpha1", "kind": "FlyerJob",
            "metadata": {"name": name, "namespace": "lab"},
            "spec": {"nodes": 1, "template": {"spec": spec}},
        }).job
        for name in ("a", "b")
    )  # fmt: skip
    assert first is not None
    assert second is not None
    assert first.spec.__pydantic_fields_set__ is second.spec.__pydantic_fields_set__
    changed = first.spec.replace(priority="high")
    assert changed.model_fields_set == {"nodes", "template", "priority"}
    assert second.spec.model_fields_set == {"nodes", "template"}


def test_the_table_of_field_sets_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Users choose the fields that they give, and a process runs for months."""
    from flyer.kube.cache import job_view

    table: dict[frozenset[str], set[str]] = {}
    monkeypatch.setattr(job_view, "_FIELD_SETS", table)
    monkeypatch.setattr(job_view, "_FIELD_SETS_MAX", 1)
    job = job_view.shape_job({
        "apiVersion": "fireflyer.dev/v1alpha1", "kind": "FlyerJob",
        "metadata": {"name": "a", "namespace": "lab"},
        "spec": {"nodes": 1, "template": {"spec": {"containers": [{"name": "t", "image": "i"}]}}},
    }).job  # fmt: skip
    assert job is not None
    assert len(table) == 1
    assert job.spec.model_fields_set == {"nodes", "template"}
