"""Copies whose controllers are killed, stopped or replaced at any step; 3FS is in memory."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
from threefs.csi.copies.copies import Copies
from threefs.csi.copies.volume_copy import sweep_copies
from threefs.csi.metrics import Metrics
from threefs.csi.proto import csi_pb2 as csi
from threefs.csi.volumes.volumes import Volumes
from threefs.errors import Unavailable

from .copying import (
    MEBIBYTE,
    Gate,
    clone_request,
    filled,
    leftovers,
    of_volume,
    retried,
    tree,
    wait_for,
)

if TYPE_CHECKING:
    from .driver import Driver

STEPS = [
    "make_directory",
    "claim",
    "setxattr",
    "set_quota",
    "symlink",
    "create_snapshot",
    "open_directory",
    "copy",
    "copy_attributes",
    "remove_snapshot",
    "remove",
    "remove_tree",
    "removexattr",
    "unclaim",
]


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("step", STEPS)
def test_a_copy_continues_after_a_controller_is_killed_at_any_step(
    driver: Driver, step: str, number: int, *, after: bool
) -> None:
    volume = filled(driver)
    before = tree(driver, "pvc-1")
    request = clone_request(of_volume(volume))
    real = driver.files._begin_call
    calls = 0
    dead = threading.Event()

    class Last:
        """The lock of the last call, after which its process is dead."""

        def __enter__(self) -> None:
            driver.files._lock.acquire()

        def __exit__(self, *_: object) -> None:
            driver.files._lock.release()
            dead.set()
            raise Unavailable("killed")

    def start_call(call: str) -> Any:
        nonlocal calls
        if dead.is_set():
            raise Unavailable("killed")
        if call == step:
            calls += 1
            if calls == number:
                if after:
                    return Last()
                dead.set()
                raise Unavailable("killed")
        return real(call)

    driver.files._begin_call = start_call  # type: ignore[method-assign]
    driver.code(request)
    wait_for(lambda: not driver.copies._pool._jobs)
    driver.files._begin_call = real  # type: ignore[method-assign]
    if STEPS.index(step) > STEPS.index("create_snapshot"):
        driver.files.write("/volumes/pvc-1/data/later", 1)
    # Another controller continues, with no knowledge but what is stored.
    other = Copies(driver.clusters, Metrics(), workers=2, watch_seconds=0.0)
    other.start()
    driver.controller._copies = other
    reply = retried(driver, request)
    assert reply.volume.volume_id == "v1:default:/volumes/pvc-2"
    assert tree(driver, "pvc-2") == before
    sweep_copies(Volumes("default", driver.files))
    assert leftovers(driver) == []
    assert driver.files.claim_of("/volumes/pvc-2") is None
    other.stop()


def test_of_two_controllers_one_copies(driver: Driver, gate: Gate) -> None:
    volume = filled(driver)
    request = clone_request(of_volume(volume))
    assert driver.refused(request)[0] == "ABORTED"
    gate.wait_until_copying()
    other = Copies(driver.clusters, Metrics(), workers=2)
    other.start()
    first, driver.controller._copies = driver.controller._copies, other
    code, message = driver.refused(request)
    assert (code, "another controller" in message) == ("ABORTED", True)
    gate.open.set()
    driver.controller._copies = first
    retried(driver, request)
    assert len(driver.files.snapshots("/volumes/pvc-1").all()) == 0
    assert leftovers(driver) == []
    other.stop()


def test_a_controller_that_lost_its_claim_changes_nothing_more(driver: Driver, gate: Gate) -> None:
    volume = filled(driver)
    before = tree(driver, "pvc-1")
    request = clone_request(of_volume(volume))
    assert driver.refused(request)[0] == "ABORTED"
    gate.wait_until_copying()
    copy, job = driver.copies._jobs["v1:default:/volumes/pvc-2"]
    claim = driver.files.claim_of("/volumes/pvc-2")
    driver.files.claim("/volumes/pvc-2", "another", claim)
    assert not copy.renew()
    gate.open.set()
    assert job.ended.wait(30)
    assert driver.files.claim_of("/volumes/pvc-2") == ("another", 2)
    assert not any(path.startswith("/volumes/pvc-2/data/a/b/file") for path in driver.files.paths())
    driver.files.unclaim("/volumes/pvc-2", "another")
    retried(driver, request)
    assert tree(driver, "pvc-2") == before


def test_a_claim_that_another_controller_released_is_not_taken_again(
    driver: Driver, gate: Gate
) -> None:
    request = clone_request(of_volume(filled(driver)))
    assert driver.refused(request)[0] == "ABORTED"
    gate.wait_until_copying()
    copy, _ = driver.copies._jobs["v1:default:/volumes/pvc-2"]
    driver.files._entries["/volumes/pvc-2"].claim = None
    assert not copy.renew()
    assert driver.files.claim_of("/volumes/pvc-2") is None
    gate.open.set()
    retried(driver, request)


def test_snapshots_of_copies_that_do_not_exist_any_more_are_removed(
    driver: Driver, gate: Gate
) -> None:
    volume = filled(driver)
    assert driver.refused(clone_request(of_volume(volume)))[0] == "ABORTED"
    gate.wait_until_copying()
    volumes = Volumes("default", driver.files)
    assert sweep_copies(volumes) == 0, "this one is in progress"
    driver.files.remove_tree("/volumes/pvc-2")
    gate.open.set()
    wait_for(lambda: not driver.copies._pool._jobs)
    driver.call(csi.DeleteVolumeRequest(volume_id=volume))
    assert sweep_copies(volumes) == 1
    assert leftovers(driver) == []
    assert "/volumes/pvc-1" not in driver.files.paths()
    driver.files.symlink("not json", "/.csi/copies/damaged")
    assert sweep_copies(volumes) == 0


def test_a_copy_that_another_controller_has_answered_is_not_remembered(driver: Driver) -> None:
    volume = filled(driver)
    request = clone_request(of_volume(volume))
    driver.copies._waiters = threading.Semaphore(0)
    assert driver.refused(request)[0] == "ABORTED"
    wait_for(lambda: not driver.copies._pool._jobs)
    # Deleted through the other controller, and created again with another size.
    driver.files.remove_tree("/volumes/pvc-2")
    limit = csi.CapacityRange(limit_bytes=MEBIBYTE * 512)
    clone = retried(driver, clone_request(of_volume(volume), capacity_range=limit)).volume
    assert clone.capacity_bytes == MEBIBYTE * 512


def test_a_controller_that_stops_leaves_the_copy_to_another_one(driver: Driver, gate: Gate) -> None:
    request = clone_request(of_volume(filled(driver)))
    assert driver.refused(request)[0] == "ABORTED"
    gate.wait_until_copying()
    stopping = threading.Thread(target=driver.copies.stop)
    stopping.start()
    gate.open.set()
    stopping.join(30)
    assert driver.files.claim_of("/volumes/pvc-2") is None, "no wait for the claim to expire"
    assert driver.refused(request)[0] == "ABORTED"
