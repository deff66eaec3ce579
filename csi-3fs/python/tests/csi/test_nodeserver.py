"""Staging, publishing and unmounting; stats and condition; calls in any order and invalid paths."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import threefs
from threefs.csi.errors import DirtyMount, Unreachable
from threefs.csi.proto import csi_pb2 as csi

from .driver import GIBIBYTE, Driver, Mode, capability, publish_request, stage_request


def targets(driver: Driver) -> list[str]:
    return sorted(mounted.target for mounted in driver.mount_manager.state()[0])


def unstage(volume: str, path: str = "/k/stage") -> csi.NodeUnstageVolumeRequest:
    return csi.NodeUnstageVolumeRequest(volume_id=volume, staging_target_path=path)


def unpublish(volume: str, path: str = "/k/pod") -> csi.NodeUnpublishVolumeRequest:
    return csi.NodeUnpublishVolumeRequest(volume_id=volume, target_path=path)


def stats(volume: str, path: str = "/k/pod") -> csi.NodeGetVolumeStatsRequest:
    return csi.NodeGetVolumeStatsRequest(volume_id=volume, volume_path=path)


@pytest.fixture
def volume(driver: Driver) -> str:
    volume_id: str = driver.create("a").volume_id
    return volume_id


def test_every_step_of_a_volume_on_a_node_can_be_repeated(driver: Driver, volume: str) -> None:
    for _ in range(2):
        driver.stage(volume)
    assert driver.mount_manager.roots() == ["default:/volumes/a/data"]
    for path in ("/k/pod", "/k/pod", "/k/other"):
        driver.publish(volume, path)
    assert targets(driver) == ["/k/other", "/k/pod", "/k/stage"]
    for path in ("/k/pod", "/k/pod", "/k/other"):
        driver.call(unpublish(volume, path))
    for _ in range(2):
        driver.call(unstage(volume))
    assert targets(driver) == []


def test_a_node_can_unmount_without_the_cluster(driver: Driver, volume: str) -> None:
    driver.stage(volume)
    driver.publish(volume)
    driver.files.fail = threefs.Unavailable("everything is down")
    driver.call(unpublish(volume))
    driver.call(unstage(volume))
    assert targets(driver) == []


def test_unmounting_a_deleted_volume(driver: Driver, volume: str) -> None:
    driver.stage(volume)
    driver.call(csi.DeleteVolumeRequest(volume_id=volume))
    driver.call(unstage(volume))
    assert targets(driver) == []


@pytest.mark.parametrize(
    ("request_", "code", "words"),
    [
        (stage_request(""), "INVALID_ARGUMENT", "volume_id is missing"),
        (stage_request("V", ""), "INVALID_ARGUMENT", "staging_target_path is missing"),
        (stage_request("V", "relative"), "INVALID_ARGUMENT", "absolute path"),
        (stage_request("V", "/k/../etc"), "INVALID_ARGUMENT", "without `..`"),
        (stage_request("V", "/k/\0"), "INVALID_ARGUMENT", "staging_target_path"),
        (stage_request("V", "/" + "a" * 5000), "INVALID_ARGUMENT", "longer than"),
        (
            csi.NodeStageVolumeRequest(volume_id="V", staging_target_path="/k/s"),
            "INVALID_ARGUMENT",
            "volume_capability is missing",
        ),
        (stage_request("unknown"), "NOT_FOUND", "does not exist"),
        (stage_request("v1:default:/volumes/b"), "NOT_FOUND", "does not exist"),
        (stage_request("v1:default:/volumes/../.."), "INVALID_ARGUMENT", "volume_id"),
        (stage_request("v1:other:/volumes/b"), "INVALID_ARGUMENT", "unknown cluster `other`"),
        (stage_request("x" * 129), "INVALID_ARGUMENT", "longer than 128"),
        (publish_request(""), "INVALID_ARGUMENT", "volume_id is missing"),
        (publish_request("V", ""), "INVALID_ARGUMENT", "target_path is missing"),
        (publish_request("V", stage=""), "FAILED_PRECONDITION", "stage the volume first"),
        (publish_request("V"), "FAILED_PRECONDITION", "is not staged at `/k/stage`"),
        (
            csi.NodePublishVolumeRequest(volume_id="V", target_path="/k/pod"),
            "INVALID_ARGUMENT",
            "volume_capability is missing",
        ),
        (unpublish(""), "INVALID_ARGUMENT", "volume_id is missing"),
        (unpublish("V", ""), "INVALID_ARGUMENT", "target_path is missing"),
        (unpublish("V", "/a/../../b"), "INVALID_ARGUMENT", "without `..`"),
        (unstage(""), "INVALID_ARGUMENT", "volume_id is missing"),
        (unstage("V", ""), "INVALID_ARGUMENT", "staging_target_path is missing"),
        (stats("", "/k/pod"), "INVALID_ARGUMENT", "volume_id is missing"),
        (stats("V", ""), "INVALID_ARGUMENT", "volume_path is missing"),
        (stats("V", "/k/none"), "NOT_FOUND", "is not mounted at `/k/none`"),
        (csi.NodeExpandVolumeRequest(volume_id="V"), "INVALID_ARGUMENT", "volume_path is missing"),
        (csi.NodeExpandVolumeRequest(volume_path="/k"), "INVALID_ARGUMENT", "volume_id"),
        (
            csi.NodeExpandVolumeRequest(volume_id="V", volume_path="/k"),
            "NOT_FOUND",
            "is not mounted",
        ),
    ],
)
def test_the_error_of_an_invalid_request_names_its_field_and_nothing_is_mounted(
    driver: Driver, volume: str, request_: Any, code: str, words: str
) -> None:
    if request_.volume_id == "V":
        request_ = type(request_).FromString(request_.SerializeToString())
        request_.volume_id = volume
    status, message = driver.refused(request_)
    assert status == code
    assert words in message
    assert targets(driver) == []


def test_calls_for_one_volume_do_not_unmount_another(driver: Driver, volume: str) -> None:
    other = driver.create("b").volume_id
    driver.stage(volume)
    driver.publish(volume)
    for request in (unpublish(other), unstage(other), unpublish("csi-inline"), unpublish(other)):
        if isinstance(request, csi.NodeUnpublishVolumeRequest):
            assert driver.refused(request)[0] == "NOT_FOUND"
    assert driver.refused(unstage(other))[0] == "NOT_FOUND"
    assert driver.refused(unstage(volume))[0] == "FAILED_PRECONDITION"
    assert targets(driver) == ["/k/pod", "/k/stage"]
    assert driver.refused(stage_request(other))[0] == "ALREADY_EXISTS"


def test_read_only_is_set_by_the_mode_the_flag_or_the_pod(driver: Driver, volume: str) -> None:
    driver.stage(volume)
    driver.publish(volume, "/k/rw")
    driver.publish(volume, "/k/pod-ro", readonly=True)
    driver.publish(volume, "/k/flag-ro", volume_capability=capability(flags=("ro",)))
    mode = capability(Mode.MULTI_NODE_READER_ONLY)
    driver.publish(volume, "/k/mode-ro", volume_capability=mode)
    by_target = {mounted.target: mounted.read_only for mounted in driver.mount_manager.state()[0]}
    assert by_target == {
        "/k/stage": False,
        "/k/rw": False,
        "/k/pod-ro": True,
        "/k/flag-ro": True,
        "/k/mode-ro": True,
    }
    again = publish_request(volume, "/k/rw", readonly=True)
    assert driver.refused(again)[0] == "ALREADY_EXISTS"


def test_a_single_pods_volume_is_published_once(driver: Driver, volume: str) -> None:
    single_pod = capability(Mode.SINGLE_NODE_SINGLE_WRITER)
    driver.stage(volume, volume_capability=single_pod)
    for _ in range(2):
        driver.publish(volume, "/k/pod", volume_capability=single_pod)
    code, words = driver.refused(publish_request(volume, "/k/two", volume_capability=single_pod))
    assert code == "FAILED_PRECONDITION"
    assert "ReadWriteOncePod" in words
    driver.call(unpublish(volume))
    driver.publish(volume, "/k/two", volume_capability=single_pod)


def test_many_pods_of_a_node_may_share_a_single_node_volume(driver: Driver, volume: str) -> None:
    many = capability(Mode.SINGLE_NODE_MULTI_WRITER)
    driver.stage(volume, volume_capability=many)
    for path in ("/k/1", "/k/2", "/k/3"):
        driver.publish(volume, path, volume_capability=many)


def test_stats_are_read_from_the_quota_and_the_condition_from_the_daemon(
    driver: Driver, volume: str
) -> None:
    driver.stage(volume)
    driver.publish(volume)
    driver.files.write("/volumes/a/data/file", 1000)
    reply = driver.call(stats(volume))
    usage = {line.unit: line for line in reply.usage}
    in_bytes = usage[csi.VolumeUsage.BYTES]
    assert (in_bytes.total, in_bytes.used) == (GIBIBYTE, 1000)
    assert in_bytes.available == GIBIBYTE - 1000
    assert usage[csi.VolumeUsage.INODES].used == 2
    assert not reply.volume_condition.abnormal
    for state, words in (
        ("down", "is being replaced"),
        ("stopped", "stopped by a signal"),
        ("starting", "programs wait"),
        ("ended", "delete the pod"),
    ):
        driver.mount_manager.states[volume] = state
        condition = driver.call(stats(volume)).volume_condition
        assert condition.abnormal
        assert words in condition.message
    driver.mount_manager.die()
    condition = driver.call(stats(volume, "/k/stage")).volume_condition
    assert condition.abnormal
    assert "mount manager" in condition.message
    driver.files.fail = threefs.Unavailable("no answer")
    reply = driver.call(stats(volume))
    assert reply.volume_condition.abnormal
    assert len(reply.usage) == 1


def test_an_expansion_is_visible_on_the_node(driver: Driver, volume: str) -> None:
    driver.stage(volume)
    driver.call(
        csi.ControllerExpandVolumeRequest(
            volume_id=volume, capacity_range=csi.CapacityRange(required_bytes=5 * GIBIBYTE)
        )
    )
    ask = csi.NodeExpandVolumeRequest(volume_id=volume, volume_path="/k/stage")
    assert driver.call(ask).capacity_bytes == 5 * GIBIBYTE


def test_unwritten_data_is_counted_and_reported(
    driver: Driver, volume: str, capfd: pytest.CaptureFixture[str]
) -> None:
    driver.stage(volume)
    real = driver.mount_manager.unmount

    def not_yet(target: str) -> Any:
        driver.mount_manager.unmount = real  # type: ignore[method-assign]
        raise DirtyMount(f"`{target}` has data that is not in 3FS yet")

    driver.mount_manager.unmount = not_yet  # type: ignore[method-assign]
    code, words = driver.refused(unstage(volume))
    assert (code, "not in 3FS yet" in words) == ("UNAVAILABLE", True)
    driver.mount_manager.clean, driver.mount_manager.data_lost = False, "its daemon is stopped"
    driver.call(unstage(volume))
    outcome = "threefs_csi_unmounts_total"
    assert driver.metrics.registry.get_sample_value(outcome, {"result": "data_lost"}) == 1
    log = "".join(capfd.readouterr())
    assert "detached, data not written" in log
    assert "its daemon is stopped" in log


def test_calls_without_a_mount_manager_fail_with_a_hint(driver: Driver, volume: str) -> None:
    driver.stage(volume)
    driver.mount_manager.fail = Unreachable("the mount manager does not answer; look at its pod")
    for request in (publish_request(volume), unpublish(volume), unstage(volume), stats(volume)):
        code, words = driver.refused(request)
        assert code == "UNAVAILABLE"
        assert "look at its pod" in words
    assert driver.metrics.registry.get_sample_value("threefs_csi_mount_manager_up") == 0
    driver.mount_manager.fail = None
    assert driver.metrics.registry.get_sample_value("threefs_csi_mount_manager_up") == 1
    mounts = driver.metrics.registry.get_sample_value("threefs_csi_mounts", {"state": "serving"})
    assert mounts == 1


def test_read_bytes_of_mounts_are_exported_by_distance(driver: Driver) -> None:
    def exported(distance: str) -> float | None:
        name = "threefs_csi_read_bytes_total"
        return driver.metrics.registry.get_sample_value(name, {"distance": distance})

    assert exported("host") == 0
    driver.mount_manager.reads = {"0:41": [4096, 0, 0, 512]}
    assert (exported("host"), exported("rack"), exported("remote")) == (4096, 0, 512)


def test_concurrent_calls_in_any_order_end_in_a_consistent_state(
    driver: Driver, volume: str
) -> None:
    other = driver.create("b").volume_id
    expected = ("OK", "NOT_FOUND", "ABORTED", "ALREADY_EXISTS", "FAILED_PRECONDITION")
    codes: list[str] = []

    def call(seed: int) -> None:
        for step in range(12):
            kind = (seed * 7 + step * 5) % 4
            target = (volume, other)[(seed + step) % 2]
            path = f"/k/pod-{(seed * step) % 3}"
            request: Any = [
                stage_request(target, f"/k/stage-{target[-1]}"),
                publish_request(target, path, f"/k/stage-{target[-1]}"),
                unpublish(target, path),
                unstage(target, f"/k/stage-{target[-1]}"),
            ][kind]
            codes.append(driver.code(request))

    threads = [threading.Thread(target=call, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert len(codes) == 96
    assert set(codes) <= set(expected)
    for volume_id in (volume, other):
        for number in range(3):
            assert driver.code(unpublish(volume_id, f"/k/pod-{number}")) in ("OK", "NOT_FOUND")
    for volume_id in (volume, other):
        driver.call(unstage(volume_id, f"/k/stage-{volume_id[-1]}"))
    assert targets(driver) == []
