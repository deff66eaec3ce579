"""Files that are removed, replaced or lost while a client reads them: an error, never zeros."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import threefs

MIB = 1 << 20
FILE_MIB = 48


def content(seed: int) -> bytes:
    block = random.Random(seed).randbytes(MIB)
    assert block.count(0) < MIB // 64
    return block * FILE_MIB


def read_repeatedly(reader: threefs.file.RawFile, data: bytes) -> None:
    buffer = bytearray(8 * MIB)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        reader.seek(0)
        for offset in range(0, len(data), len(buffer)):
            count = reader.readinto(buffer)
            assert buffer[:count] == data[offset : offset + count], "zeros, or another file"


@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_a_reader_gets_an_error_and_never_zeros(
    cluster: Any, client: threefs.Client, folder: str, how: str
) -> None:
    path, data = f"{folder}/big", content(1)
    client.write_file(path, data)
    with cluster.client() as other, client.open_raw(path) as reader:
        if how == "removed":
            other.remove(path)
        else:
            other.write_file(path, content(2))
        with pytest.raises(threefs.Stale, match="open it again"):
            read_repeatedly(reader, data)
        if how == "replaced":
            assert client.read_file(path) == content(2)


def test_holes_stay_holes(client: threefs.Client, folder: str) -> None:
    path = f"{folder}/sparse"
    client.write_file(path, b"x" * (2 * MIB))
    with client.open_raw(path, "r+") as file:
        file.truncate(20 * MIB)
        file.seek(9 * MIB)
        file.write(b"y" * MIB)
    expected = b"x" * (2 * MIB) + bytes(7 * MIB) + b"y" * MIB + bytes(10 * MIB)
    assert client.read_file(path) == expected
    with client.open_raw(path, "r+") as file:
        file.truncate(MIB)
        file.truncate(3 * MIB)
    assert client.read_file(path) == b"x" * MIB + bytes(2 * MIB)
