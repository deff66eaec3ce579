"""Copies of volumes of a real cluster by real controllers, which are killed in the middle."""

from __future__ import annotations

import random
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import threefs
from controllers import (
    Controller,
    leftovers,
    of_snapshot,
    of_volume,
    volume_request,
)
from threefs.csi.proto import csi_pb2 as csi

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

MEBIBYTE = 1 << 20
CHUNK = MEBIBYTE


@pytest.fixture(scope="module")
def control(cluster: Any) -> Iterator[threefs.Client]:
    from threefs.cluster import ClusterFile

    with threefs.Client(ClusterFile.read(cluster.file), control_plane=True) as client:
        yield client


@pytest.fixture
def start(cluster: Any, tmp_path: Path) -> Iterator[Callable[..., Controller]]:
    """Start controllers: `start("a")`; the same name starts another one in its place."""
    running: list[Controller] = []

    def make(name: str = "a", **more: Any) -> Controller:
        running.append(Controller(cluster.file, tmp_path / name, **more))
        return running[-1]

    yield make
    for controller in running:
        controller.close()


@pytest.fixture
def names(control: threefs.Client) -> Iterator[Callable[[str], str]]:
    """Unique names of volumes, which are removed at the end."""
    made: list[str] = []
    prefix = f"copies-{random.randrange(1 << 30)}"

    def name(text: str) -> str:
        made.append(f"{prefix}-{text}")
        return made[-1]

    yield name
    for each in made:
        path = f"/volumes/{each}"
        if control.exists(path):
            for snapshot in control.snapshots(path).all():
                control.snapshots(path).remove(snapshot.name)
            control.make_directory(f"/{each}", exist_ok=True)
            control.rename(path, f"/{each}/volume")
            control.remove_tree(f"/{each}")


def fill(client: threefs.Client, root: str, files: int, seed: int = 1) -> None:
    """Make directories, small files, one of many chunks, and one with holes."""
    chance = random.Random(seed)
    client.make_directory(f"{root}/deep", 0o750)
    client.make_directory(f"{root}/deep/deeper", 0o2775)
    client.chown(f"{root}/deep/deeper", 11, 12)
    client.batch_write(
        [
            (f"{root}/deep/file-{number:04}", 0, chance.randbytes(chance.randrange(3000)))
            for number in range(files)
        ]
    )
    client.write_file(f"{root}/large", chance.randbytes(20 * CHUNK + 17))
    with client.open_raw(f"{root}/sparse", "wb") as file:
        for offset in (3 * CHUNK + 5, 40 * CHUNK, 77 * CHUNK - 1):
            file.seek(offset)
            file.write(b"data")
        file.truncate(90 * CHUNK)
    client.write_file(f"{root}/empty", b"")
    client.symlink("../nowhere", f"{root}/deep/link")
    client.setxattr(f"{root}/large", "user.color", b"red\0")
    client.chmod(f"{root}/empty", 0o4711)


def tree(client: threefs.Client, root: str) -> dict[str, tuple[Any, ...]]:
    """All names below a directory with what a copy must keep."""
    copier = client.copier()
    result: dict[str, tuple[Any, ...]] = {}
    stack = [(root, client.stat(root).inode)]
    while stack:
        path, inode = stack.pop()
        after, more = "", True
        while more:
            entries, more = copier.page(inode, after, 100)
            for entry in entries:
                after = entry.name
                name = f"{path}/{entry.name}"
                content: Any = None
                if entry.kind == "directory":
                    stack.append((name, entry.inode))
                elif entry.kind == "symlink":
                    content = client.readlink(name)
                elif entry.size < 50 * MEBIBYTE:
                    content = client.read_file(name)
                else:
                    offsets = range(0, entry.size, CHUNK)
                    content = hash(tuple(client.batch_read([(name, o, CHUNK) for o in offsets])))
                attributes = {key: client.getxattr(name, key) for key in client.listxattr(name)}
                result[name.removeprefix(root)] = (
                    entry.kind,
                    entry.size,
                    entry.mode,
                    entry.uid,
                    entry.gid,
                    entry.links,
                    entry.modified_ns,
                    entry.accessed_ns,
                    content,
                    tuple(sorted(attributes.items())),
                )
    return result


def test_a_snapshot_and_a_volume_are_copied_with_everything(
    start: Callable[..., Controller],
    control: threefs.Client,
    names: Callable[[str], str],
) -> None:
    controller = start()
    source, copy, clone = names("source"), names("copy"), names("clone")
    size = csi.CapacityRange(required_bytes=1 << 30)
    volume = controller.call(volume_request(source, capacity_range=size)).volume.volume_id
    data = f"/volumes/{source}/data"
    fill(control, data, 300)
    before = tree(control, data)
    request = csi.CreateSnapshotRequest(name=names("s"), source_volume_id=volume)
    snapshot = controller.call(request).snapshot
    control.write_file(f"{data}/later", b"later")
    control.write_file(f"{data}/large", b"other")
    control.remove(f"{data}/deep/file-0001")
    changed = tree(control, data)
    controller.retried(volume_request(copy, of_snapshot(snapshot.snapshot_id)))
    controller.retried(volume_request(clone, of_volume(volume)))
    assert tree(control, f"/volumes/{copy}/data") == before
    assert tree(control, f"/volumes/{clone}/data") == changed
    assert control.stat(f"/volumes/{copy}/data").mode == control.stat(data).mode
    used, of_copy = control.quota(f"/volumes/{clone}"), control.quota(f"/volumes/{copy}")
    assert used is not None
    assert of_copy is not None
    assert of_copy.bytes_used <= snapshot.size_bytes
    assert leftovers(control, [source, copy, clone]) == []


def test_a_copy_is_complete_after_any_number_of_kills(
    start: Callable[..., Controller],
    control: threefs.Client,
    names: Callable[[str], str],
) -> None:
    controller = start(workers=2)
    source, clone = names("source"), names("clone")
    size = csi.CapacityRange(required_bytes=1 << 30)
    volume = controller.call(volume_request(source, capacity_range=size)).volume.volume_id
    data = f"/volumes/{source}/data"
    fill(control, data, 400)
    before = tree(control, data)
    request = volume_request(clone, of_volume(volume))
    kills, done = 0, False
    chance = random.Random(7)
    while kills < 4 and not done:
        # Until it copies again; the claim of the killed one expires first.
        copied = len(tree_names(control, clone))
        deadline = time.monotonic() + 60
        while not done and len(tree_names(control, clone)) < copied + 1 + chance.randrange(60):
            code, message = controller.code(request)
            assert code in ("OK", "ABORTED"), message
            done = code == "OK"
            assert time.monotonic() < deadline
        controller.kill()
        kills += 1
        # No other version of the contents is ever seen.
        control.write_file(f"{data}/later-{kills}", b"later")
        controller = start(workers=2)
    assert kills > 1
    controller.retried(request)
    copied_tree = tree(control, f"/volumes/{clone}/data")
    assert copied_tree == before
    assert leftovers(control, [source, clone]) == []


def tree_names(control: threefs.Client, volume: str) -> list[str]:
    path = f"/volumes/{volume}/data/deep"
    try:
        return control.listdir(path)
    except (threefs.NotFound, threefs.NotADirectory):
        return []


def test_two_controllers_complete_one_copy(
    start: Callable[..., Controller],
    control: threefs.Client,
    names: Callable[[str], str],
) -> None:
    one, two = start("one"), start("two")
    source, clone = names("source"), names("clone")
    size = csi.CapacityRange(required_bytes=1 << 30)
    volume = one.call(volume_request(source, capacity_range=size)).volume.volume_id
    fill(control, f"/volumes/{source}/data", 200)
    before = tree(control, f"/volumes/{source}/data")
    request = volume_request(clone, of_volume(volume))
    errors: list[BaseException] = []

    def copy(controller: Controller) -> None:
        try:
            controller.retried(request)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=copy, args=(each,)) for each in (one, two)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(180)
    assert errors == []
    assert tree(control, f"/volumes/{clone}/data") == before
    assert leftovers(control, [source, clone]) == []


def test_a_clone_of_a_volume_that_is_written_is_its_state_at_one_moment(
    start: Callable[..., Controller],
    control: threefs.Client,
    names: Callable[[str], str],
    client: threefs.Client,
) -> None:
    controller = start()
    source, clone = names("source"), names("clone")
    volume = controller.call(volume_request(source)).volume.volume_id
    data = f"/volumes/{source}/data"
    fill(control, data, 100)
    stop = threading.Event()
    with (
        client.open_raw(f"{data}/first", "wb") as first,
        client.open_raw(f"{data}/second", "wb") as second,
    ):
        written = 0

        def write() -> None:
            nonlocal written
            while not stop.is_set():
                written += 1
                for file in (first, second):
                    file.seek(0)
                    file.write(written.to_bytes(8, "big"))

        writer = threading.Thread(target=write)
        writer.start()
        try:
            controller.retried(volume_request(clone, of_volume(volume)))
        finally:
            stop.set()
            writer.join(60)
    values = [
        int.from_bytes(control.read_file(f"/volumes/{clone}/data/{name}"), "big")
        for name in ("first", "second")
    ]
    assert 0 <= values[0] - values[1] <= 1
    assert leftovers(control, [source, clone]) == []


def test_contents_that_exceed_the_limit_of_inodes_are_refused_and_removed(
    start: Callable[..., Controller],
    control: threefs.Client,
    names: Callable[[str], str],
) -> None:
    controller = start()
    source, clone = names("source"), names("clone")
    volume = controller.call(volume_request(source)).volume.volume_id
    fill(control, f"/volumes/{source}/data", 100)
    request = volume_request(clone, of_volume(volume), parameters={"inodes": "50"})
    code, message = "ABORTED", ""
    deadline = time.monotonic() + 60
    while code == "ABORTED" and time.monotonic() < deadline:
        code, message = controller.code(request)
    assert code == "OUT_OF_RANGE", message
    assert "limit of inodes" in message
    assert not control.exists(f"/volumes/{clone}")
    assert leftovers(control, [source]) == []


def test_a_volume_with_a_snapshot_is_deleted_with_it(
    start: Callable[..., Controller],
    control: threefs.Client,
    names: Callable[[str], str],
) -> None:
    controller = start()
    source, copy = names("source"), names("copy")
    volume = controller.call(volume_request(source)).volume.volume_id
    fill(control, f"/volumes/{source}/data", 20)
    before = tree(control, f"/volumes/{source}/data")
    request = csi.CreateSnapshotRequest(name=names("s"), source_volume_id=volume)
    snapshot = controller.call(request).snapshot.snapshot_id
    controller.call(csi.DeleteVolumeRequest(volume_id=volume))
    assert not control.exists(f"/volumes/{source}/data")
    controller.retried(volume_request(copy, of_snapshot(snapshot)))
    assert tree(control, f"/volumes/{copy}/data") == before
    controller.call(csi.DeleteSnapshotRequest(snapshot_id=snapshot))
    assert not control.exists(f"/volumes/{source}"), "also while its rows are freed"
    assert controller.call(csi.ListSnapshotsRequest()).entries == []
    controller.call(csi.DeleteVolumeRequest(volume_id=f"v1:default:/volumes/{copy}"))
    assert not control.exists(f"/volumes/{copy}")


def test_a_snapshot_that_is_deleted_ends_its_copy(
    start: Callable[..., Controller],
    control: threefs.Client,
    names: Callable[[str], str],
) -> None:
    controller = start(workers=1)
    source, copy = names("source"), names("copy")
    size = csi.CapacityRange(required_bytes=1 << 30)
    volume = controller.call(volume_request(source, capacity_range=size)).volume.volume_id
    fill(control, f"/volumes/{source}/data", 1500)
    create = csi.CreateSnapshotRequest(name=names("s"), source_volume_id=volume)
    snapshot = controller.call(create).snapshot.snapshot_id
    request = volume_request(copy, of_snapshot(snapshot))
    deadline = time.monotonic() + 60
    while not tree_names(control, copy):
        assert controller.code(request)[0] == "ABORTED"
        assert time.monotonic() < deadline
    controller.call(csi.DeleteSnapshotRequest(snapshot_id=snapshot))
    code, message = "ABORTED", ""
    while code == "ABORTED" and time.monotonic() < deadline:
        code, message = controller.code(request)
    assert code == "NOT_FOUND", message
    assert not control.exists(f"/volumes/{copy}")
