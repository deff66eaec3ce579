"""Helpers of the tests of copies, with 3FS in memory."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from threefs.csi.proto import csi_pb2 as csi

from .doubles.directories import MemoryCopier
from .driver import Driver, capability

if TYPE_CHECKING:
    from collections.abc import Callable

MEBIBYTE = 1 << 20
Sources = csi.VolumeContentSource


def of_snapshot(snapshot: str) -> Sources:
    return Sources(snapshot=Sources.SnapshotSource(snapshot_id=snapshot))


def of_volume(volume: str) -> Sources:
    return Sources(volume=Sources.VolumeSource(volume_id=volume))


def clone_request(source: Sources, name: str = "pvc-2", **more: Any) -> csi.CreateVolumeRequest:
    return csi.CreateVolumeRequest(
        name=name, volume_capabilities=[capability()], volume_content_source=source, **more
    )


def retried(driver: Driver, request: Any, seconds: float = 30.0) -> Any:
    """The reply of a call that is repeated while it is aborted, as the provisioner repeats it."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return driver.call(request)
        except grpc.RpcError as error:
            call: Any = error
            if call.code().name != "ABORTED" or time.monotonic() > deadline:
                raise


def wait_for(look: Callable[[], Any], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not look():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def filled(driver: Driver, name: str = "pvc-1", **more: Any) -> str:
    """A volume with some files."""
    volume: str = driver.create(name, **more).volume_id
    data = f"/volumes/{name}/data"
    driver.files.make_directory(f"{data}/a", 0o750)
    driver.files.make_directory(f"{data}/a/b", 0o700)
    for number in range(5):
        driver.files.write(f"{data}/a/b/file-{number}", number * MEBIBYTE)
    driver.files.write(f"{data}/top", 10)
    driver.files.symlink("top", f"{data}/link")
    driver.files.setxattr(f"{data}/top", "user.color", b"red")
    driver.files.chown(f"{data}/a", 7, 8)
    return volume


def tree(driver: Driver, name: str) -> dict[str, tuple[Any, ...]]:
    root = f"/volumes/{name}/data"
    entries = driver.files._entries
    return {
        path.removeprefix(root): (
            entry.is_directory,
            entry.mode,
            entry.owner,
            entry.size,
            entry.target,
            entry.attributes,
        )
        for path, entry in entries.items()
        if path == root or path.startswith(f"{root}/")
    }


class Gate:
    """Copies of files that wait until they are let through."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.waiting = threading.Semaphore(0)
        self.copied: list[str] = []
        self.tenants: list[str] = []
        self.error: Exception | None = None
        real = MemoryCopier.copy
        gate = self

        def copy(
            copier: MemoryCopier, source: int, directory: int, name: str, offset: int
        ) -> tuple[int, int | None]:
            gate.waiting.release()
            assert gate.open.wait(60)
            gate.copied.append(name)
            if gate.error is not None:
                raise gate.error
            return real(copier, source, directory, name, offset)

        monkeypatch.setattr(MemoryCopier, "copy", copy)

    def wait_until_copying(self) -> None:
        assert self.waiting.acquire(timeout=30)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


def leftovers(driver: Driver) -> list[str]:
    """What copies have left: snapshots, records, links."""
    names = [path for path in driver.files.paths() if "/.copy" in path or "/copies/" in path]
    return names + [
        name
        for of_volume in driver.files._snapshots.values()
        for name in of_volume
        if name.startswith("copy-")
    ]
