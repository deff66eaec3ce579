"""Files, folders and batches of the Python client."""

import io
import random
import subprocess
import sys
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import threefs

CHUNK = 1 << 20


def noise(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


@pytest.mark.parametrize("size", [0, 1, 4095, 4097, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 12345])
def test_what_was_written_is_read(client: threefs.Client, folder: str, size: int) -> None:
    data = noise(size)
    client.write_file(f"{folder}/file", data)
    assert client.read_file(f"{folder}/file") == data
    assert client.stat(f"{folder}/file").size == size


def test_writes_at_odd_offsets_agree_with_a_bytearray(client: threefs.Client, folder: str) -> None:
    seeded = random.Random(7)
    model = bytearray()
    path = f"{folder}/file"
    client.write_file(path, b"")
    for step in range(40):
        offset, size = seeded.randrange(3 * CHUNK), seeded.randrange(1, 200_000)
        data = noise(size, step)
        client.batch_write([(path, offset, data)])
        model.extend(bytes(max(0, offset + size - len(model))))
        model[offset : offset + size] = data
        start, length = seeded.randrange(4 * CHUNK), seeded.randrange(CHUNK * 2)
        assert client.batch_read([(path, start, length)]) == [bytes(model[start : start + length])]
    assert client.read_file(path) == model


def test_a_hole_reads_as_zeros(client: threefs.Client, folder: str) -> None:
    path = f"{folder}/sparse"
    client.batch_write([(path, 5 * CHUNK + 17, b"end")])
    data = client.read_file(path)
    assert len(data) == 5 * CHUNK + 20
    assert data.strip(b"\0") == b"end"


def test_a_batch_of_thousands_of_small_files(client: threefs.Client, folder: str) -> None:
    files = [(f"{folder}/{number}", noise(number % 700, number)) for number in range(2000)]
    client.batch_write([(path, 0, data) for path, data in files])
    assert client.batch_read([(path, 0, None) for path, _ in files]) == [data for _, data in files]
    assert len(client.listdir(folder)) == 2000


def test_writes_to_one_range_of_a_batch_keep_their_order(
    client: threefs.Client, folder: str
) -> None:
    path = f"{folder}/file"
    client.batch_write([(path, 0, bytes([number]) * 1000) for number in range(50)])
    assert client.read_file(path) == bytes([49]) * 1000


def test_buffers_of_every_kind_are_written_and_read(client: threefs.Client, folder: str) -> None:
    path = f"{folder}/array"
    array = np.arange(300_000, dtype=np.float64)
    client.batch_write([(path, 0, array)])
    out = np.zeros_like(array)
    assert client.batch_read_into([(path, 0, out)]) == [array.nbytes]
    assert (array == out).all()
    reused = bytearray(b"first")
    client.write_file(f"{folder}/reused", reused)
    reused.extend(b" and more")  # Raises BufferError if the write still holds the buffer.
    assert client.read_file(f"{folder}/reused") == b"first"


def test_a_read_only_buffer_to_read_into_is_refused(client: threefs.Client, folder: str) -> None:
    client.write_file(f"{folder}/file", b"data")
    with pytest.raises(BufferError):
        client.batch_read_into([(f"{folder}/file", 0, b"read only")])


def test_replacing_a_file_never_shows_a_mixture(client: threefs.Client, folder: str) -> None:
    path = f"{folder}/file"
    client.write_file(path, b"old" * CHUNK)
    client.write_file(path, b"new")
    assert client.read_file(path) == b"new"
    assert client.listdir(folder) == ["file"]


def test_rename_replaces_a_file(client: threefs.Client, folder: str) -> None:
    client.write_file(f"{folder}/a", b"a")
    client.write_file(f"{folder}/b", b"b")
    client.rename(f"{folder}/a", f"{folder}/b")
    assert client.listdir(folder) == ["b"]
    assert client.read_file(f"{folder}/b") == b"a"


def test_folders(client: threefs.Client, folder: str) -> None:
    client.mkdir(f"{folder}/x/y/z", parents=True)
    client.mkdir(f"{folder}/x/y/z", parents=True)
    with pytest.raises(threefs.Exists):
        client.mkdir(f"{folder}/x")
    client.mkdir(f"{folder}/x", exist_ok=True)
    client.write_file(f"{folder}/x/file", b"1")
    assert [(e.name, e.stat.kind) for e in client.scandir(f"{folder}/x")] == [
        ("file", "file"),
        ("y", "directory"),
    ]
    with pytest.raises(threefs.DirectoryNotEmpty, match="not empty"):
        client.rmdir(f"{folder}/x")
    client.rmtree(f"{folder}/x")
    assert not client.exists(f"{folder}/x")
    client.rmtree(f"{folder}/x", missing_ok=True)


def test_symbolic_links_are_followed(client: threefs.Client, folder: str) -> None:
    client.write_file(f"{folder}/file", b"data")
    client.symlink("file", f"{folder}/link")
    assert client.read_file(f"{folder}/link") == b"data"
    assert client.readlink(f"{folder}/link") == "file"
    assert client.stat(f"{folder}/link", follow_symlinks=False).kind == "symlink"


def test_hard_links_share_the_file_and_replace_nothing(client: threefs.Client, folder: str) -> None:
    client.write_file(f"{folder}/file", b"data")
    client.link(f"{folder}/file", f"{folder}/link")
    assert client.stat(f"{folder}/link") == client.stat(f"{folder}/file")
    assert client.open_raw(f"{folder}/link").inode == client.stat(f"{folder}/file").inode
    with pytest.raises(threefs.Exists):
        client.link(f"{folder}/file", f"{folder}/link")
    client.remove(f"{folder}/file")
    assert client.read_file(f"{folder}/link") == b"data"
    with pytest.raises(threefs.PermissionDenied):
        client.link(folder, f"{folder}/again")


def test_a_directory_that_is_removed_after_it_was_found_is_reported_as_existing(
    client: threefs.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    native = Mock()
    native.make_directory.side_effect = threefs.Exists("it exists")
    native.stat.side_effect = threefs.NotFound("it was removed")
    monkeypatch.setattr(client, "_native", native)
    with pytest.raises(threefs.Exists):
        client.make_directory("/directory")


def test_file_objects_behave_as_those_of_python(client: threefs.Client, folder: str) -> None:
    path = f"{folder}/text"
    with client.open(path, "w") as file:
        file.write("one\ntwo\n")
    with client.open(path, "a") as file:
        file.write("three\n")
    with client.open(path, "r") as file:
        assert file.readlines() == ["one\n", "two\n", "three\n"]
    with client.open(path, "r+b") as file:
        file.seek(4)
        file.write(b"TWO")
        file.seek(-6, io.SEEK_END)
        assert file.read() == b"three\n"
        file.truncate(8)
    assert client.read_file(path) == b"one\nTWO\n"
    with client.open(path, "w") as file:
        file.write("new")
    assert client.read_file(path) == b"new"
    with pytest.raises(threefs.Exists):
        client.open(path, "x")
    with pytest.raises(io.UnsupportedOperation, match="not for writing"):
        client.open_raw(path).write(b"no")


def test_an_open_file_follows_its_inode(client: threefs.Client, folder: str) -> None:
    client.write_file(f"{folder}/before", b"data")
    with client.open(f"{folder}/before") as file:
        client.rename(f"{folder}/before", f"{folder}/after")
        assert file.read() == b"data"


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda c, f: c.read_file(f"{f}/none"), threefs.NotFound, "/none"),
        (lambda c, f: c.read_file(f), threefs.IsADirectory, "directory"),
        (lambda c, f: c.write_file(f"{f}/none/file", b""), threefs.NotFound, "/none"),
        (lambda c, f: c.write_file(f, b""), threefs.IsADirectory, "directory"),
        (lambda c, f: c.listdir(f"{f}/file"), threefs.NotADirectory, "/file"),
        (lambda c, f: c.remove(f), threefs.IsADirectory, "directory"),
        (lambda c, f: c.open(f"{f}/file", "q"), threefs.InvalidArgument, "mode `q`"),
        (lambda c, f: c.readlink(f"{f}/file"), threefs.InvalidArgument, "symbolic link"),
        (lambda c, f: c.batch_write([("x" * 300, 0, b"")]), threefs.InvalidArgument, "255"),
        (lambda c, f: c.batch_write([(f"{f}/file", 1 << 60, b"x")]), threefs.InvalidArgument, "f"),
    ],
)
def test_errors_name_the_cause_and_the_path(
    client: threefs.Client, folder: str, call: object, kind: type[Exception], words: str
) -> None:
    client.write_file(f"{folder}/file", b"1")
    with pytest.raises(kind, match=words):
        call(client, folder)  # type: ignore[operator]


def test_errors_are_also_builtin_exceptions_with_an_errno(
    client: threefs.Client, folder: str
) -> None:
    with pytest.raises(FileNotFoundError) as excinfo:
        client.read_file(f"{folder}/none")
    assert excinfo.value.errno == 2
    assert isinstance(excinfo.value, threefs.ThreeFSError)
    assert excinfo.value.path == f"{folder}/none"


def test_buffers_that_share_memory_are_refused(client: threefs.Client, folder: str) -> None:
    client.write_file(f"{folder}/file", b"data")
    memory = memoryview(bytearray(100))
    reads = [(f"{folder}/file", 0, memory[:60]), (f"{folder}/file", 0, memory[59:])]
    with pytest.raises(threefs.InvalidArgument, match="share memory"):
        client.batch_read_into(reads)
    assert client.batch_read_into([(f"{folder}/file", 0, memory[:50])]) == [4]


FORKING = """
import os, sys, threefs
client = threefs.connect(sys.argv[1])
assert client.read_file(sys.argv[2]) == b"data"
child = os.fork()
if child == 0:
    status = 1
    try:
        client.read_file(sys.argv[2])
    except threefs.InvalidArgument as error:
        with threefs.connect(sys.argv[1]) as fresh:
            same = fresh.read_file(sys.argv[2]) == b"data"
        status = 0 if same and "create a new one" in str(error) else 2
    finally:
        del client
        os._exit(status)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert client.read_file(sys.argv[2]) == b"data"
"""


def test_a_forked_child_gets_an_error_that_asks_to_reconnect(
    client: threefs.Client, cluster: Any, folder: str
) -> None:
    """In a separate process: locks that other threads of pytest hold would stay held in a child."""
    client.write_file(f"{folder}/file", b"data")
    result = subprocess.run(
        [sys.executable, "-c", FORKING, str(cluster.file), f"{folder}/file"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr


def test_calls_on_a_closed_client_raise_value_error(client: threefs.Client) -> None:
    client.close()
    client.close()
    with pytest.raises(ValueError, match="closed"):
        client.listdir("/")
