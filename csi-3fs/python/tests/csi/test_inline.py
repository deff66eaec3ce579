"""Inline volumes: their parameters, directories and lifetime."""

from __future__ import annotations

from typing import Any

import pytest
import threefs
from threefs.csi.proto import csi_pb2 as csi
from threefs.csi.services.inline_volumes import InlineVolumes

from .driver import (
    GIBIBYTE,
    INLINE_MAX,
    Driver,
    capability,
    publish_request,
    stage_request,
)

EPHEMERAL = {
    "csi.storage.k8s.io/ephemeral": "true",
    "csi.storage.k8s.io/pod.name": "pod-1",
    "csi.storage.k8s.io/pod.namespace": "default",
}


def targets(driver: Driver) -> list[str]:
    return sorted(mounted.target for mounted in driver.mount_manager.state()[0])


def unpublish(volume: str, path: str = "/k/pod") -> csi.NodeUnpublishVolumeRequest:
    return csi.NodeUnpublishVolumeRequest(volume_id=volume, target_path=path)


def inline(name: str, target: str = "/k/pod", **attributes: str) -> csi.NodePublishVolumeRequest:
    return publish_request(name, target, stage="", volume_context={**EPHEMERAL, **attributes})


def test_an_inline_volume_has_the_lifetime_of_its_pod(driver: Driver) -> None:
    place = f"{driver.inline.parent}/csi-0123abcd"
    for _ in range(2):
        driver.call(inline("csi-0123abcd", size="2Gi"))
    quota = driver.files.quota(place)
    assert quota is not None
    assert quota.bytes_max == 2 * GIBIBYTE
    assert driver.files.mode_and_owner(f"{place}/data") == (0o777, 0, 0)
    request = csi.NodeGetVolumeStatsRequest(volume_id="csi-0123abcd", volume_path="/k/pod")
    assert driver.call(request).usage[0].total == 2 * GIBIBYTE
    assert not driver.call(csi.ListVolumesRequest()).entries
    for _ in range(2):
        driver.call(unpublish("csi-0123abcd"))
    assert place not in driver.files.paths()
    assert targets(driver) == []


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({"size": "much"}, "attribute `size` is `much`"),
        ({"size": "0"}, "attribute `size`"),
        ({"size": "4Pi"}, "above the"),
        ({"colour": "red"}, "unknown attribute `colour`"),
        ({"path": "/volumes/pvc-1/data"}, "unknown attribute `path`"),
        ({"cluster": "default"}, "unknown attribute `cluster`"),
        ({"uid": "0"}, "unknown attribute `uid`"),
        ({"mode": "4777"}, "unknown attribute `mode`"),
    ],
)
def test_a_pod_can_set_only_the_size(
    driver: Driver, attributes: dict[str, str], words: str
) -> None:
    before = driver.files.paths()
    code, message = driver.refused(inline("csi-1", **attributes))
    assert code == "INVALID_ARGUMENT"
    assert words in message
    assert driver.files.paths() == before
    assert targets(driver) == []


def test_the_administrator_sets_the_maximum_and_default_size(driver: Driver) -> None:
    driver.call(inline("csi-1", size="4Gi"))
    driver.call(inline("csi-2", "/k/pod2"))
    sizes = [driver.files.quota(f"{driver.inline.parent}/csi-{number}") for number in (1, 2)]
    assert [quota.bytes_max for quota in sizes if quota] == [INLINE_MAX, GIBIBYTE]


def test_inline_volumes_are_off_without_a_maximum_size(driver: Driver) -> None:
    off = InlineVolumes(
        "node-a",
        driver.clusters,
        driver.tickets,
        driver.mount_manager,
        driver.metrics,
        GIBIBYTE,
        0,
    )
    driver.node._inline = off
    code, message = driver.refused(inline("csi-1"))
    assert code == "INVALID_ARGUMENT"
    assert "disabled" in message
    assert "PersistentVolumeClaim" in message
    assert driver.files.paths() == ["/"]


def test_a_forged_record_in_a_claims_volume_is_ignored(driver: Driver) -> None:
    """A pod with a writable volume creates a directory there that looks like an inline volume."""
    driver.create("a")
    forged = "/volumes/a/data/csi-1"
    driver.files.make_directory(forged)
    record = b'{"version":1,"name":"csi-1","capacity_bytes":1,"parameters":{"inline":"node-a"}}'
    driver.files.setxattr(forged, "user.threefs.volume", record)
    assert driver.refused(inline("csi-1", path="/volumes/a/data"))[0] == "INVALID_ARGUMENT"
    driver.call(inline("csi-1"))
    mounted = driver.mount_manager.state()[0][0]
    assert mounted.volume == f"v1:default:{driver.inline.parent}/csi-1"
    driver.inline.sweep()
    driver.call(unpublish("csi-1"))
    driver.inline.sweep()
    assert forged in driver.files.paths()


def test_an_inline_volume_is_not_a_claims_volume(driver: Driver) -> None:
    driver.call(inline("csi-1"))
    volume_id = f"v1:default:{driver.inline.parent}/csi-1"
    assert driver.refused(csi.ControllerGetVolumeRequest(volume_id=volume_id))[0] == "NOT_FOUND"
    assert driver.refused(stage_request(volume_id))[0] == "NOT_FOUND"
    assert driver.refused(csi.DeleteVolumeRequest(volume_id=volume_id))[0] == "FAILED_PRECONDITION"
    for path in ("/inline", "/inline/x"):
        request = csi.CreateVolumeRequest(
            name="pvc-1", volume_capabilities=[capability()], parameters={"path": path}
        )
        code, message = driver.refused(request)
        assert code == "INVALID_ARGUMENT"
        assert "inline volumes" in message
    driver.create("csi-1")
    assert "/volumes/csi-1/data" in driver.files.paths()
    assert f"{driver.inline.parent}/csi-1/data" in driver.files.paths()


def test_an_inline_volume_that_3fs_could_not_remove_is_swept(driver: Driver) -> None:
    driver.call(inline("csi-1"))
    driver.call(inline("csi-2", "/k/pod2"))
    driver.files.fail = threefs.Unavailable("no answer")
    driver.call(unpublish("csi-1"))
    driver.files.fail = None
    assert f"{driver.inline.parent}/csi-1" in driver.files.paths()
    assert driver.inline.sweep() == 1
    assert f"{driver.inline.parent}/csi-1" not in driver.files.paths()
    assert f"{driver.inline.parent}/csi-2/data" in driver.files.paths()


def test_a_sweep_lists_only_its_node_and_reads_no_records(driver: Driver) -> None:
    other = InlineVolumes(
        "node-b",
        driver.clusters,
        driver.tickets,
        driver.mount_manager,
        driver.metrics,
        GIBIBYTE,
        INLINE_MAX,
    )
    with other.create("csi-9", EPHEMERAL):
        pass
    for number in (1, 2, 3):
        driver.call(inline(f"csi-{number}", f"/k/{number}"))
        driver.create(f"pvc-{number}")
    driver.files.setxattr(f"{driver.inline.parent}/csi-1", "user.threefs.volume", b"no record")
    for number in (1, 2):
        driver.mount_manager.unmount(f"/k/{number}")
    driver.files.calls.clear()
    assert driver.inline.sweep() == 2
    assert driver.files.calls == ["listdir", "remove_tree", "remove_tree"]
    assert driver.files.listdir(driver.inline.parent) == ["csi-3"]
    assert driver.files.listdir(other.parent) == ["csi-9"]
    driver.files.calls.clear()
    driver.call(unpublish("csi-3", "/k/3"))
    assert driver.files.calls == ["remove_tree"]


def test_a_sweep_skips_a_volume_that_is_being_mounted(driver: Driver) -> None:
    real, swept = driver.mount_manager.mount, []

    def mount(*arguments: Any, **more: Any) -> None:
        swept.append(driver.inline.sweep())
        real(*arguments, **more)

    driver.mount_manager.mount = mount  # type: ignore[method-assign]
    driver.call(inline("csi-1"))
    assert swept == [0]
    assert f"{driver.inline.parent}/csi-1/data" in driver.files.paths()


@pytest.mark.parametrize("broken_at", range(1, 17))
def test_an_interrupted_inline_volume_leaves_nothing(driver: Driver, broken_at: int) -> None:
    inner, calls = driver.files._begin_call, [0]

    def enter(call: str) -> Any:
        calls[0] += 1
        if calls[0] == broken_at:
            raise threefs.Unavailable("the connection was lost")
        return inner(call)

    driver.files._begin_call = enter  # type: ignore[method-assign]
    driver.code(inline("csi-1"))
    driver.files._begin_call = inner  # type: ignore[method-assign]
    driver.call(unpublish("csi-1"))
    driver.inline.sweep()
    assert not [path for path in driver.files.paths() if "csi-1" in path]
