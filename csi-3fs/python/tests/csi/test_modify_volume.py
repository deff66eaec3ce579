"""Limits of an existing volume change through a VolumeAttributesClass."""

from __future__ import annotations

from threefs.csi.proto import csi_pb2 as csi

from .driver import GIBIBYTE, Driver


def modify(volume_id: str, **parameters: str) -> csi.ControllerModifyVolumeRequest:
    return csi.ControllerModifyVolumeRequest(volume_id=volume_id, mutable_parameters=parameters)


def limits(driver: Driver, path: str) -> tuple[int | None, int | None, int]:
    """Bytes, inodes and retention."""
    quota = driver.files.quota(path)
    assert quota is not None
    return quota.bytes_max, quota.inodes_max, driver.files.keep_seconds(path)


def test_limits_are_modified_and_stay_modified(driver: Driver) -> None:
    volume = driver.create(
        "a",
        capacity_range=csi.CapacityRange(required_bytes=GIBIBYTE),
        parameters={"trash": "7d"},
        mutable_parameters={"inodes": "2000"},
    )
    assert limits(driver, "/volumes/a") == (GIBIBYTE, 2000, 7 * 86_400)
    for _ in range(2):  # the resizer repeats a call whose answer it has not seen
        driver.call(modify(volume.volume_id, inodes="5000", trash="1d"))
    assert limits(driver, "/volumes/a") == (GIBIBYTE, 5000, 86_400)
    driver.call(modify(volume.volume_id, trash="0"))
    assert limits(driver, "/volumes/a") == (GIBIBYTE, 5000, 0)
    driver.call(modify(volume.volume_id))
    # A later expansion keeps the number of inodes; 0 derives it from the size again.
    driver.call(
        csi.ControllerExpandVolumeRequest(
            volume_id=volume.volume_id,
            capacity_range=csi.CapacityRange(required_bytes=3 * GIBIBYTE),
        )
    )
    assert limits(driver, "/volumes/a") == (3 * GIBIBYTE, 5000, 0)
    driver.call(modify(volume.volume_id, inodes="0"))
    assert limits(driver, "/volumes/a") == (3 * GIBIBYTE, 196608, 0)


def test_an_invalid_modification_changes_nothing(driver: Driver) -> None:
    volume = driver.create("a", parameters={"inodes": "2000", "trash": "1d"})
    before = limits(driver, "/volumes/a")
    for request, code, words in [
        (modify(volume.volume_id, inodes="1000", trash="1w"), "INVALID_ARGUMENT", "`1w`"),
        (modify(volume.volume_id, inodes="1000", path="/x"), "INVALID_ARGUMENT", "`path` cannot"),
        (modify("", trash="1d"), "INVALID_ARGUMENT", "volume_id is missing"),
        (modify("v1:default:/volumes/b", trash="1d"), "NOT_FOUND", "does not exist"),
        (modify("other", trash="1d"), "NOT_FOUND", "does not exist"),
    ]:
        refused_code, message = driver.refused(request)
        assert (refused_code, words in message) == (code, True), message
    assert limits(driver, "/volumes/a") == before
