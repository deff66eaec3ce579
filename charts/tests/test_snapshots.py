"""VolumeSnapshots: the sidecar, its permissions and the class are rendered only if enabled."""

from __future__ import annotations

from typing import Any

import pytest

from .conftest import Object, Render, Rendered, containers, pods, template, variables

GROUP = "snapshot.storage.k8s.io"
LEASE = "external-snapshotter-leader-3fs-csi-fireflyer-dev"


def controller(objects: Rendered) -> Object:
    return dict(pods(objects))["Deployment/threefs-csi-controller"]


def rules(objects: Rendered) -> dict[str, list[str]]:
    """Verbs by resource of the group, for the CSI controller."""
    [role] = [
        item
        for item in objects.of("ClusterRole")
        if item["metadata"]["name"].endswith("csi-controller")
    ]
    return {
        resource: rule["verbs"]
        for rule in role["rules"]
        if rule["apiGroups"] == [GROUP]
        for resource in rule["resources"]
    }


def leases(objects: Rendered) -> list[str]:
    role = objects.named("Role", "threefs-csi-controller")
    names: list[str] = role["rules"][1]["resourceNames"]
    return names


def test_nothing_of_snapshots_is_rendered_by_default(render: Render) -> None:
    objects = render()
    names = [each["name"] for each in containers(controller(objects))]
    assert "snapshotter" not in names
    assert rules(objects) == {}
    assert LEASE not in leases(objects)
    assert objects.of("VolumeSnapshotClass") == []


def test_the_snapshotter_runs_next_to_the_other_sidecars(render: Render) -> None:
    objects = render(**{"csi.snapshots.enabled": True})
    by_name = {each["name"]: each for each in containers(controller(objects))}
    snapshotter, resizer = by_name["snapshotter"], by_name["resizer"]
    assert "csi-snapshotter" in snapshotter["image"]
    assert set(resizer["args"]) - set(snapshotter["args"]) == {
        "--http-endpoint=:8092",
        "--handle-volume-inuse-error=false",
    }
    for part in ("securityContext", "volumeMounts", "resources"):
        assert snapshotter[part] == resizer[part]
    assert LEASE in leases(objects)
    verbs = rules(objects)
    assert set(verbs) == {
        "volumesnapshots",
        "volumesnapshotclasses",
        "volumesnapshotcontents",
        "volumesnapshotcontents/status",
    }
    assert all("create" not in each and "delete" not in each for each in verbs.values())


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, {"name": "threefs", "deletionPolicy": "Delete", "default": False}),
        (
            {"name": "nightly", "deletionPolicy": "Retain", "default": True},
            {"name": "nightly", "deletionPolicy": "Retain", "default": True},
        ),
    ],
    ids=str,
)
def test_the_class_is_of_this_driver(
    render: Render, values: dict[str, Any], expected: dict[str, Any]
) -> None:
    prefixed = {f"csi.snapshots.snapshotClass.{name}": each for name, each in values.items()}
    (made,) = render(**{"csi.snapshots.enabled": True}, **prefixed).of("VolumeSnapshotClass")
    annotations = made["metadata"].get("annotations", {})
    assert made["driver"] == "3fs.csi.fireflyer.dev"
    assert {
        "name": made["metadata"]["name"],
        "deletionPolicy": made["deletionPolicy"],
        "default": annotations.get("snapshot.storage.kubernetes.io/is-default-class") == "true",
    } == expected


def test_without_the_class_only_the_sidecar_is_rendered(render: Render) -> None:
    objects = render(**{"csi.snapshots.enabled": True, "csi.snapshots.snapshotClass.create": False})
    assert objects.of("VolumeSnapshotClass") == []
    assert "snapshotter" in [each["name"] for each in containers(controller(objects))]


def test_the_snapshotter_needs_a_digest_like_all_images() -> None:
    values = {"images.allowTags": False, "csi.snapshots.enabled": True}
    result = template(values)
    assert result.returncode != 0
    assert "csiLivenessProbe, csiSnapshotter" in result.stderr


def test_the_number_of_copying_threads_reaches_the_driver(render: Render) -> None:
    pod = controller(render(**{"csi.controller.copyWorkers": 9}))
    [driver] = [each for each in containers(pod) if each["name"] == "driver"]
    assert variables(driver)["THREEFS_COPY_WORKERS"] == "9"
    assert template({"csi.controller.copyWorkers": 0}).returncode != 0
