"""Chunk size and stripe of a StorageClass: the layout of the files of its volumes."""

from __future__ import annotations

from typing import Any

import pytest
import threefs
from threefs.csi.proto import csi_pb2 as csi
from threefs.csi.volumes.parameters import Parameters

from .driver import Driver, capability

MEBIBYTE = 1 << 20


def layout(driver: Driver, path: str) -> tuple[int, int]:
    status = driver.files.stat(path)
    return status.chunk_bytes, status.stripe


def create_request(name: str, **parameters: str) -> csi.CreateVolumeRequest:
    return csi.CreateVolumeRequest(
        name=name, volume_capabilities=[capability()], parameters=parameters
    )


def test_the_mounted_directory_has_the_layout_of_the_class(driver: Driver) -> None:
    for name, parameters, expected in [
        ("a", {"chunkSize": "4Mi", "stripe": "3"}, (4 * MEBIBYTE, 3)),
        ("b", {"chunkSize": "64Ki"}, (64 << 10, 0)),
        ("c", {"stripe": "1024"}, (0, 1024)),
        ("d", {"chunkSize": "64Mi", "stripe": "1"}, (64 * MEBIBYTE, 1)),
        ("e", {}, (0, 0)),
    ]:
        driver.create(name, parameters=parameters)
        assert layout(driver, f"/volumes/{name}/data") == expected
        assert layout(driver, f"/volumes/{name}") == (0, 0)


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        *(
            ({"chunkSize": size}, f"parameter `chunkSize` is `{size}`; it must be one of 64Ki, ")
            for size in ("", "0", "1M", "3Mi", "32Ki", "128Mi", "1048576", "4mi", " 4Mi", "4Mi ٣")
        ),
        ({"chunkSize": "9" * 1000}, f"parameter `chunkSize` is `{'9' * 80}`; it must be one of"),
        ({"stripe": "0"}, "parameter `stripe` is `0`; it must be from 1 to 1024"),
        ({"stripe": "1025"}, "parameter `stripe` is `1025`; it must be at most 1024"),
        ({"stripe": "-1"}, "parameter `stripe` is `-1`; it must be a number"),
        ({"stripe": "٣"}, "parameter `stripe` is `٣`; it must be a number"),
        ({"chunksize": "4Mi"}, "unknown parameter `chunksize`; supported are cluster, "),
    ],
)
def test_an_invalid_layout_is_refused_before_anything_is_created(
    driver: Driver, parameters: dict[str, str], words: str
) -> None:
    code, message = driver.refused(create_request("a", **parameters))
    assert (code, words in message) == ("INVALID_ARGUMENT", True), message
    assert driver.files.paths() == ["/"]


def test_a_layout_cannot_be_modified(driver: Driver) -> None:
    volume = driver.create("a", parameters={"chunkSize": "4Mi"})
    for name, text in (("chunkSize", "8Mi"), ("stripe", "2")):
        request = csi.ControllerModifyVolumeRequest(
            volume_id=volume.volume_id, mutable_parameters={name: text}
        )
        code, message = driver.refused(request)
        assert (code, f"`{name}` cannot be changed" in message) == ("INVALID_ARGUMENT", True)
    assert layout(driver, "/volumes/a/data") == (4 * MEBIBYTE, 0)


def test_a_volume_of_another_layout_is_another_volume(driver: Driver) -> None:
    first = driver.create("a", parameters={"chunkSize": "4Mi", "stripe": "2"})
    assert driver.create("a", parameters={"chunkSize": "4Mi", "stripe": "2"}) == first
    code, message = driver.refused(create_request("a", chunkSize="8Mi", stripe="2"))
    assert (code, "chunkSize 4194304 and 8388608 was" in message) == ("ALREADY_EXISTS", True)
    code, message = driver.refused(create_request("a", chunkSize="4Mi"))
    assert (code, "stripe 2 and default was" in message) == ("ALREADY_EXISTS", True)


def test_a_volume_of_an_earlier_release_has_the_default_layout(driver: Driver) -> None:
    driver.create("a")
    record = driver.files.getxattr("/volumes/a", "user.threefs.volume")
    earlier = record.replace(b'"chunkSize": 0, "stripe": 0, ', b"")
    assert earlier != record
    driver.files.setxattr("/volumes/a", "user.threefs.volume", earlier)
    driver.create("a")
    assert driver.refused(create_request("a", stripe="2"))[0] == "ALREADY_EXISTS"


@pytest.mark.parametrize("before", [{}, {"chunkSize": "1Mi", "stripe": "7"}])
@pytest.mark.parametrize("after", [{}, {"chunkSize": "4Mi"}, {"stripe": "7"}])
def test_a_creation_that_was_interrupted_gets_the_layout_of_the_last_request(
    driver: Driver, before: dict[str, str], after: dict[str, str]
) -> None:
    inner = driver.files._begin_call

    def enter(call: str) -> Any:
        if call == "setxattr":
            raise threefs.Unavailable("the connection was lost")
        return inner(call)

    driver.files._begin_call = enter  # type: ignore[method-assign]
    assert driver.refused(create_request("a", **before))[0] == "UNAVAILABLE"
    driver.files._begin_call = inner  # type: ignore[method-assign]
    driver.call(create_request("a", **after))
    expected = Parameters.parse(after)
    assert layout(driver, "/volumes/a/data") == (expected.chunk_bytes, expected.stripe)
