"""Calls for snapshots: names, ids, pages, and volumes that are deleted before their snapshots."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
from threefs.csi.proto import csi_pb2 as csi
from threefs.csi.volumes.snapshot_id import SnapshotId
from threefs.errors import Unavailable

from .driver import GIBIBYTE, Driver, capability

if TYPE_CHECKING:
    from collections.abc import Sequence

HOSTILE_IDS = [
    "v1:default:@",
    "v1:default:@../../volumes/pvc-1",
    "v1:default:@.hidden",
    "v1:default:@a/b",
    "v1:default:@a\nb",
    "v1:default:/volumes/pvc-1",
    "v1:../etc:@a",
    "v1::@a",
    "v1:@a",
    "v1:default:@" + "a" * 64,
    "v1:default:@" + "a" * 4096,
    "v1:default:@é",
]


def snapshot(driver: Driver, volume: str, name: str = "snapshot-1") -> Any:
    request = csi.CreateSnapshotRequest(source_volume_id=volume, name=name)
    return driver.call(request).snapshot


def listed(driver: Driver, **filters: Any) -> Sequence[str]:
    reply = driver.call(csi.ListSnapshotsRequest(**filters))
    return [entry.snapshot.snapshot_id for entry in reply.entries]


def test_a_snapshot_is_created_listed_and_deleted(driver: Driver) -> None:
    volume = driver.create("pvc-1").volume_id
    driver.files.write("/volumes/pvc-1/data/file", 5 << 20)
    created = snapshot(driver, volume)
    assert created.snapshot_id == "v1:default:@snapshot-1"
    assert (created.source_volume_id, created.ready_to_use) == (volume, True)
    assert created.size_bytes == 5 << 20
    assert created.creation_time.seconds > 0
    assert [each.name for each in driver.files.snapshots("/volumes/pvc-1").all()] == [
        "csi-snapshot-1"
    ]
    again = snapshot(driver, volume)
    assert again == created, "a repeated call returns the first snapshot"
    request = csi.GetSnapshotRequest(snapshot_id=created.snapshot_id)
    assert driver.call(request).snapshot == created
    assert listed(driver) == [created.snapshot_id]
    for _ in range(2):
        driver.call(csi.DeleteSnapshotRequest(snapshot_id=created.snapshot_id))
    assert listed(driver) == []
    assert driver.refused(request)[0] == "NOT_FOUND"
    assert driver.files.snapshots("/volumes/pvc-1").all() == []
    assert not any(path.startswith("/.csi/snapshots/") for path in driver.files.paths())


def test_a_name_belongs_to_one_volume(driver: Driver) -> None:
    one, two = (driver.create(name).volume_id for name in ("pvc-1", "pvc-2"))
    snapshot(driver, one)
    request = csi.CreateSnapshotRequest(source_volume_id=two, name="snapshot-1")
    code, message = driver.refused(request)
    assert (code, one in message) == ("ALREADY_EXISTS", True)
    assert driver.files.snapshots("/volumes/pvc-2").all() == []


@pytest.mark.parametrize("name", ["../etc", "a" * 128, "ä ö", "sha256-abc", "line\nbreak", "-x"])
def test_a_name_that_is_no_directory_name_is_replaced_by_a_digest(
    driver: Driver, name: str
) -> None:
    volume = driver.create("pvc-1").volume_id
    created = snapshot(driver, volume, name)
    assert created.snapshot_id.startswith("v1:default:@sha256-")
    assert len(created.snapshot_id) <= 128
    assert snapshot(driver, volume, name) == created
    assert listed(driver) == [created.snapshot_id]


def test_two_names_of_a_digest_are_not_one_snapshot(driver: Driver) -> None:
    volume = driver.create("pvc-1").volume_id
    created = snapshot(driver, volume, "not plain")
    # The digest as a name gets another digest.
    other = snapshot(driver, volume, created.snapshot_id.rpartition("@")[2])
    assert other.snapshot_id != created.snapshot_id


@pytest.mark.parametrize("text", HOSTILE_IDS)
def test_a_hostile_id_is_refused_everywhere_and_changes_nothing(driver: Driver, text: str) -> None:
    volume = driver.create("pvc-1").volume_id
    snapshot(driver, volume)
    paths = driver.files.paths()
    source = csi.VolumeContentSource(
        snapshot=csi.VolumeContentSource.SnapshotSource(snapshot_id=text)
    )
    requests: list[Any] = [
        csi.DeleteSnapshotRequest(snapshot_id=text),
        csi.GetSnapshotRequest(snapshot_id=text),
        csi.ListSnapshotsRequest(snapshot_id=text),
        csi.CreateVolumeRequest(
            name="pvc-2", volume_capabilities=[capability()], volume_content_source=source
        ),
    ]
    for request in requests:
        code, message = driver.refused(request)
        assert code == "INVALID_ARGUMENT"
        assert "snapshot_id" in message
        assert len(message) < 400
    assert driver.files.paths() == paths


@pytest.mark.parametrize("text", ["other-driver", "v2:default:@a", "x" * 4096])
def test_an_id_of_another_driver_is_an_unknown_snapshot(driver: Driver, text: str) -> None:
    driver.call(csi.DeleteSnapshotRequest(snapshot_id=text))
    assert listed(driver, snapshot_id=text) == []
    assert driver.refused(csi.GetSnapshotRequest(snapshot_id=text))[0] == "NOT_FOUND"


def test_an_id_parses_to_what_it_was_made_from() -> None:
    for name in ("snapshot-1", "a" * 63, "a" * 64, "ä"):
        for cluster in ("default", "c" * 63):
            made = SnapshotId.make(cluster, name)
            assert SnapshotId.parse(str(made)) == made
            assert len(str(made)) <= 128


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (csi.CreateSnapshotRequest(source_volume_id="v1:default:/volumes/pvc-1"), "name"),
        (csi.CreateSnapshotRequest(name="a"), "source_volume_id"),
        (
            csi.CreateSnapshotRequest(
                name="a", source_volume_id="v1:default:/volumes/pvc-1", parameters={"depth": "1"}
            ),
            "`depth`",
        ),
        (csi.DeleteSnapshotRequest(), "snapshot_id"),
        (csi.GetSnapshotRequest(), "snapshot_id"),
        (csi.ListSnapshotsRequest(max_entries=-1), "max_entries"),
        (csi.CreateSnapshotRequest(name="a", source_volume_id="v1:x:/"), "volume_id"),
    ],
)
def test_an_invalid_request_names_its_field(driver: Driver, request_: Any, words: str) -> None:
    driver.create("pvc-1")
    code, message = driver.refused(request_)
    assert (code, words in message) == ("INVALID_ARGUMENT", True)


def test_a_snapshot_needs_an_existing_volume(driver: Driver) -> None:
    for volume in ("v1:default:/volumes/none", "other-driver", "v1:default:/inline/n/x"):
        request = csi.CreateSnapshotRequest(source_volume_id=volume, name="snapshot-1")
        assert driver.refused(request)[0] == "NOT_FOUND"
    assert listed(driver) == []


def test_snapshots_are_listed_page_by_page_and_by_volume(driver: Driver) -> None:
    one, two = (driver.create(name).volume_id for name in ("pvc-1", "pvc-2"))
    for number in range(7):
        snapshot(driver, one if number % 2 else two, f"snapshot-{number}")
    ids = [f"v1:default:@snapshot-{number}" for number in range(7)]
    assert listed(driver) == ids
    assert listed(driver, source_volume_id=one) == ids[1::2]
    assert listed(driver, source_volume_id="v1:default:/volumes/none") == []
    assert listed(driver, snapshot_id=ids[3]) == [ids[3]]
    assert listed(driver, snapshot_id=ids[3], source_volume_id=two) == []
    for filters in ({}, {"source_volume_id": one}):
        pages, token = [], ""
        while True:
            reply = driver.call(
                csi.ListSnapshotsRequest(max_entries=2, starting_token=token, **filters)
            )
            pages.append([entry.snapshot.snapshot_id for entry in reply.entries])
            if not (token := reply.next_token):
                break
        assert max(map(len, pages)) <= 2
        assert [each for page in pages for each in page] == listed(driver, **filters)
    for token in ("garbage", "djE6ZGVmYXVsdDovdm9sdW1lcy9wdmMtMQ=="):
        assert driver.refused(csi.ListSnapshotsRequest(starting_token=token))[0] == "ABORTED"


def test_snapshots_outlive_their_volume(driver: Driver) -> None:
    volume = driver.create("pvc-1", parameters={"trash": "1d"}).volume_id
    driver.files.write("/volumes/pvc-1/data/file", 1 << 20)
    one, two = (snapshot(driver, volume, name).snapshot_id for name in ("one", "two"))
    for _ in range(2):
        driver.call(csi.DeleteVolumeRequest(volume_id=volume))
    assert listed(driver) == [one, two]
    assert listed(driver, source_volume_id=volume) == [one, two]
    assert "/volumes/pvc-1/data" not in driver.files.paths(), "the data is removed at once"
    assert driver.files.keep_seconds("/volumes/pvc-1") == 0
    get = csi.ControllerGetVolumeRequest(volume_id=volume)
    assert driver.refused(get)[0] == "NOT_FOUND"
    assert driver.call(csi.ListVolumesRequest()).entries == []
    again = csi.CreateVolumeRequest(name="pvc-1", volume_capabilities=[capability()])
    code, message = driver.refused(again)
    assert (code, "its snapshots remain" in message) == ("ALREADY_EXISTS", True)
    more = csi.CreateSnapshotRequest(name="three", source_volume_id=volume)
    assert driver.refused(more)[0] == "NOT_FOUND"
    driver.call(csi.DeleteSnapshotRequest(snapshot_id=one))
    assert "/volumes/pvc-1" in driver.files.paths()
    driver.call(csi.DeleteSnapshotRequest(snapshot_id=two))
    assert "/volumes/pvc-1" not in driver.files.paths(), "removed with its last snapshot"
    assert driver.create("pvc-1").volume_id == volume


def test_a_volume_with_snapshots_of_an_administrator_is_not_deleted(driver: Driver) -> None:
    volume = driver.create("pvc-1").volume_id
    snapshot(driver, volume)
    driver.files.snapshots("/volumes/pvc-1").create("before-upgrade")
    request = csi.DeleteVolumeRequest(volume_id=volume)
    code, message = driver.refused(request)
    assert code == "FAILED_PRECONDITION"
    assert "`before-upgrade`" in message
    assert "threefs snapshot remove /volumes/pvc-1" in message
    assert driver.call(csi.ControllerGetVolumeRequest(volume_id=volume))
    driver.files.snapshots("/volumes/pvc-1").remove("before-upgrade")
    driver.call(request)


def test_a_creation_is_completed_after_a_lost_reply(driver: Driver) -> None:
    volume = driver.create("pvc-1").volume_id
    create = driver.files.snapshots

    class Lost:
        """The snapshot is created and its reply is lost."""

        def __init__(self, path: str) -> None:
            self._snapshots = create(path)

        def create(self, name: str) -> Any:
            self._snapshots.create(name)
            raise Unavailable("no reply")

        def all(self) -> Any:
            return self._snapshots.all()

    driver.files.snapshots = Lost  # type: ignore[assignment,method-assign]
    request = csi.CreateSnapshotRequest(source_volume_id=volume, name="snapshot-1")
    assert driver.refused(request)[0] == "UNAVAILABLE"
    driver.files.snapshots = create  # type: ignore[method-assign]
    assert driver.call(request).snapshot.snapshot_id == "v1:default:@snapshot-1"
    assert len(driver.files.snapshots("/volumes/pvc-1").all()) == 1


def test_a_deletion_is_completed_after_a_crash_between_its_steps(driver: Driver) -> None:
    volume = driver.create("pvc-1").volume_id
    snapshot_id = snapshot(driver, volume).snapshot_id
    driver.call(csi.DeleteVolumeRequest(volume_id=volume))
    # Killed after the snapshot was removed, before its volume and record were.
    driver.files.snapshots("/volumes/pvc-1").remove("csi-snapshot-1")
    assert listed(driver) == []
    driver.call(csi.DeleteSnapshotRequest(snapshot_id=snapshot_id))
    assert [path for path in driver.files.paths() if "pvc-1" in path or "snapshot-1" in path] == []


def test_a_damaged_record_hides_one_snapshot(driver: Driver) -> None:
    volume = driver.create("pvc-1").volume_id
    snapshot(driver, volume)
    for number, record in enumerate(["{}", "not json", '{"name": 1, "volume": "v1:a:/b"}', "[]"]):
        driver.files.symlink(record, f"/.csi/snapshots/damaged-{number}")
        damaged = f"v1:default:@damaged-{number}"
        request = csi.CreateSnapshotRequest(source_volume_id=volume, name=f"damaged-{number}")
        assert driver.refused(request)[0] == "ALREADY_EXISTS"
        assert driver.refused(csi.GetSnapshotRequest(snapshot_id=damaged))[0] == "NOT_FOUND"
    assert listed(driver) == ["v1:default:@snapshot-1"]


def test_a_snapshot_of_a_full_volume_fits_into_a_volume_of_its_size(driver: Driver) -> None:
    volume = driver.create("pvc-1").volume_id
    driver.files.write("/volumes/pvc-1/data/file", GIBIBYTE + 4096)
    assert snapshot(driver, volume).size_bytes == GIBIBYTE


def test_concurrent_calls_for_one_name_create_one_snapshot(driver: Driver) -> None:
    volumes = [driver.create(f"pvc-{number}").volume_id for number in range(4)]
    codes: list[str] = []

    def call(volume: str) -> None:
        codes.append(driver.code(csi.CreateSnapshotRequest(source_volume_id=volume, name="one")))

    threads = [threading.Thread(target=call, args=(volume,)) for volume in volumes * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert set(codes) <= {"OK", "ALREADY_EXISTS", "ABORTED"}
    assert "OK" in codes
    made = [len(driver.files.snapshots(f"/volumes/pvc-{number}").all()) for number in range(4)]
    assert sum(made) == 1
