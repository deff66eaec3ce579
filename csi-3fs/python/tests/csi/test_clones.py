"""Volumes with the contents of a snapshot or of a volume: calls, retries, sources, sizes.

3FS is in memory here; `tests/services/test_copies.py` copies real trees.
"""

from __future__ import annotations

import threading

import pytest
from threefs.csi.proto import csi_pb2 as csi
from threefs.errors import NoSpace, QuotaExceeded, Unavailable

from .copying import (
    MEBIBYTE,
    Gate,
    Sources,
    clone_request,
    filled,
    leftovers,
    of_snapshot,
    of_volume,
    retried,
    tree,
    wait_for,
)
from .driver import GIBIBYTE, Driver, capability


@pytest.mark.parametrize("kind", ["snapshot", "volume"])
def test_a_new_volume_has_the_contents_of_its_source(driver: Driver, kind: str) -> None:
    volume = filled(driver)
    before = tree(driver, "pvc-1")
    source = of_volume(volume)
    if kind == "snapshot":
        request = csi.CreateSnapshotRequest(source_volume_id=volume, name="snapshot-1")
        source = of_snapshot(driver.call(request).snapshot.snapshot_id)
        driver.files.write("/volumes/pvc-1/data/later", 1)
    reply = retried(driver, clone_request(source))
    assert reply.volume.content_source == source
    assert tree(driver, "pvc-2") == before
    again = driver.call(clone_request(source))
    assert again == reply
    listed = driver.call(csi.ListVolumesRequest()).entries
    assert [entry.volume.content_source for entry in listed] == [Sources(), source]
    assert leftovers(driver) == []
    assert driver.files.claim_of("/volumes/pvc-2") is None
    assert (
        driver.metrics.registry.get_sample_value("threefs_csi_copies_total", {"result": "complete"})
        == 1
    )


def test_a_source_that_changes_meanwhile_is_copied_as_it_was(driver: Driver, gate: Gate) -> None:
    volume = filled(driver)
    before = tree(driver, "pvc-1")
    assert driver.refused(clone_request(of_volume(volume)))[0] == "ABORTED"
    gate.wait_until_copying()
    driver.files.write("/volumes/pvc-1/data/later", 1)
    driver.files.write("/volumes/pvc-1/data/top", 99)
    driver.files.remove("/volumes/pvc-1/data/a/b/file-0")
    gate.open.set()
    retried(driver, clone_request(of_volume(volume)))
    assert tree(driver, "pvc-2") == before
    assert leftovers(driver) == []


def test_an_incomplete_copy_is_not_a_volume(driver: Driver, gate: Gate) -> None:
    request = clone_request(of_volume(filled(driver)))
    code, message = driver.refused(request)
    assert code == "ABORTED"
    assert "copied" in message
    gate.wait_until_copying()
    volume = "v1:default:/volumes/pvc-2"
    refused = [
        csi.ControllerGetVolumeRequest(volume_id=volume),
        csi.CreateSnapshotRequest(source_volume_id=volume, name="s"),
        clone_request(of_volume(volume), "pvc-3"),
        csi.ControllerExpandVolumeRequest(
            volume_id=volume, capacity_range=csi.CapacityRange(required_bytes=2 * GIBIBYTE)
        ),
    ]
    for each in refused:
        assert driver.refused(each)[0] == "NOT_FOUND"
    listed = driver.call(csi.ListVolumesRequest()).entries
    assert [entry.volume.volume_id for entry in listed] == ["v1:default:/volumes/pvc-1"]
    empty = csi.CreateVolumeRequest(name="pvc-2", volume_capabilities=[capability()])
    assert driver.refused(empty)[0] == "ALREADY_EXISTS"
    gate.open.set()
    retried(driver, request)


def test_another_source_size_or_class_is_refused_during_and_after_the_copy(
    driver: Driver, gate: Gate
) -> None:
    one, two = filled(driver), filled(driver, "pvc-9")
    request = clone_request(of_volume(one))
    assert driver.refused(request)[0] == "ABORTED"
    gate.wait_until_copying()
    others = [
        clone_request(of_volume(two)),
        clone_request(of_volume(one), parameters={"uid": "5"}),
        clone_request(
            of_volume(one), capacity_range=csi.CapacityRange(required_bytes=9 * GIBIBYTE)
        ),
        csi.CreateVolumeRequest(name="pvc-2", volume_capabilities=[capability()]),
    ]
    for other in others:
        assert driver.refused(other)[0] == "ALREADY_EXISTS"
    gate.open.set()
    retried(driver, request)
    for other in others:
        assert driver.refused(other)[0] == "ALREADY_EXISTS"


@pytest.mark.parametrize("is_copying", [True, False])
def test_deleting_an_incomplete_volume_cancels_its_copy(
    driver: Driver, gate: Gate, *, is_copying: bool
) -> None:
    volume = filled(driver)
    paths = driver.files.paths()
    assert driver.refused(clone_request(of_volume(volume)))[0] == "ABORTED"
    gate.wait_until_copying()
    if not is_copying:
        gate.error = Unavailable("no reply")
        gate.open.set()
        wait_for(lambda: driver.files.claim_of("/volumes/pvc-2") is None)
    delete = csi.DeleteVolumeRequest(volume_id="v1:default:/volumes/pvc-2")
    if is_copying:
        assert driver.refused(delete)[0] == "ABORTED", "units in progress end first"
        gate.open.set()
    retried(driver, delete)
    assert leftovers(driver) == []
    assert [p for p in driver.files.paths() if p not in paths and not p.startswith("/.csi")] == []
    gate.error = None
    retried(driver, clone_request(of_volume(volume)))


def test_a_deleted_source_volume_is_copied_to_the_end_and_then_removed(
    driver: Driver, gate: Gate
) -> None:
    volume = filled(driver)
    before = tree(driver, "pvc-1")
    request = clone_request(of_volume(volume))
    assert driver.refused(request)[0] == "ABORTED"
    gate.wait_until_copying()
    driver.call(csi.DeleteVolumeRequest(volume_id=volume))
    get = csi.ControllerGetVolumeRequest(volume_id=volume)
    assert driver.refused(get)[0] == "NOT_FOUND"
    gate.open.set()
    retried(driver, request)
    assert tree(driver, "pvc-2") == before
    assert "/volumes/pvc-1" not in driver.files.paths()
    assert leftovers(driver) == []


def test_a_copy_whose_snapshot_is_deleted_ends_and_leaves_nothing(
    driver: Driver, gate: Gate
) -> None:
    volume = filled(driver)
    create = csi.CreateSnapshotRequest(source_volume_id=volume, name="s")
    snapshot = driver.call(create).snapshot.snapshot_id
    assert driver.refused(clone_request(of_snapshot(snapshot)))[0] == "ABORTED"
    gate.wait_until_copying()
    driver.call(csi.DeleteSnapshotRequest(snapshot_id=snapshot))
    gate.open.set()
    wait_for(lambda: "/volumes/pvc-2" not in driver.files.paths())
    code, message = driver.refused(clone_request(of_snapshot(snapshot)))
    assert code == "NOT_FOUND"
    assert snapshot in message


def test_contents_that_do_not_fit_are_out_of_range(driver: Driver, gate: Gate) -> None:
    volume = driver.create("pvc-1").volume_id
    driver.files.write("/volumes/pvc-1/data/file", 5 * MEBIBYTE)
    create = csi.CreateSnapshotRequest(source_volume_id=volume, name="s")
    snapshot = driver.call(create).snapshot
    for source in (of_snapshot(snapshot.snapshot_id), of_volume(volume)):
        for sizes in (
            {"required_bytes": snapshot.size_bytes - 1},
            {"limit_bytes": snapshot.size_bytes - 1},
        ):
            request = clone_request(source, capacity_range=csi.CapacityRange(**sizes))
            assert driver.refused(request)[0] == "OUT_OF_RANGE"
    assert "/volumes/pvc-2" not in driver.files.paths()
    gate.error = QuotaExceeded("no inodes are left")
    gate.open.set()
    request = clone_request(of_snapshot(snapshot.snapshot_id))
    code, message = driver.refused(request)
    assert (code, "no inodes are left" in message) == ("OUT_OF_RANGE", True)
    assert "/volumes/pvc-2" not in driver.files.paths()
    gate.error = NoSpace("a target is full")
    assert driver.refused(request)[0] == "RESOURCE_EXHAUSTED"
    gate.error = None
    smaller = csi.CapacityRange(limit_bytes=GIBIBYTE - 1)
    other = clone_request(request.volume_content_source, capacity_range=smaller)
    assert driver.refused(other)[0] == "ALREADY_EXISTS", "the interrupted copy has another size"
    retried(driver, request)


def test_a_size_that_is_not_requested_is_enough(driver: Driver) -> None:
    capacity = csi.CapacityRange(required_bytes=3 * GIBIBYTE)
    volume = driver.create("pvc-1", capacity_range=capacity).volume_id
    clone = retried(driver, clone_request(of_volume(volume))).volume
    assert clone.capacity_bytes == 3 * GIBIBYTE


def test_the_copy_of_a_volume_with_many_inodes_gets_as_many(driver: Driver) -> None:
    volume = filled(driver)
    for number in range(1200):
        driver.files.write(f"/volumes/pvc-1/data/a/{number}", 0)
    small = csi.CapacityRange(required_bytes=16 * MEBIBYTE)
    create = csi.CreateSnapshotRequest(source_volume_id=volume, name="s")
    snapshot = driver.call(create).snapshot.snapshot_id
    retried(driver, clone_request(of_snapshot(snapshot), capacity_range=small))
    quota = driver.files.quota("/volumes/pvc-2")
    assert quota is not None
    assert quota.inodes_max is not None
    assert quota.inodes_max >= 1209


def test_sources_that_do_not_exist_are_not_found(driver: Driver) -> None:
    driver.create("pvc-1")
    for source in (
        of_snapshot("v1:default:@none"),
        of_snapshot("other-driver"),
        of_volume("v1:default:/volumes/none"),
        of_volume("other-driver"),
        of_volume("v1:default:/inline/node/x"),
    ):
        assert driver.refused(clone_request(source))[0] == "NOT_FOUND"
    assert "/volumes/pvc-2" not in driver.files.paths()


def test_a_source_in_another_cluster_is_refused(driver: Driver) -> None:
    volume = driver.create("pvc-1").volume_id
    other = driver.folder / "clusters" / "other"
    other.mkdir()
    (other / "cluster.json").write_text((other.parent / "default/cluster.json").read_text())
    code, message = driver.refused(
        clone_request(of_volume(volume), parameters={"cluster": "other"})
    )
    assert (code, "`cluster: default`" in message) == ("INVALID_ARGUMENT", True)


def test_many_clones_of_one_volume_are_complete(driver: Driver) -> None:
    volume = filled(driver)
    before = tree(driver, "pvc-1")
    errors: list[Exception] = []

    def clone(number: int) -> None:
        try:
            retried(driver, clone_request(of_volume(volume), f"clone-{number}"))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=clone, args=(number,)) for number in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert errors == []
    for number in range(24):
        assert tree(driver, f"clone-{number}") == before
    assert leftovers(driver) == []


def test_one_tenant_cannot_fill_the_queue(driver: Driver, gate: Gate) -> None:
    volume = filled(driver)

    def request(number: int, namespace: str) -> csi.CreateVolumeRequest:
        return clone_request(
            of_volume(volume),
            f"{namespace}-{number}",
            parameters={"csi.storage.k8s.io/pvc/namespace": namespace},
        )

    driver.copies._waiters = threading.Semaphore(0)
    codes = [driver.code(request(number, "greedy")) for number in range(70)]
    assert codes == ["ABORTED"] * 64 + ["RESOURCE_EXHAUSTED"] * 6
    assert driver.code(request(0, "other")) == "ABORTED"
    gate.open.set()
    retried(driver, request(0, "other"))
