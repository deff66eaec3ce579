"""Bytes read by mounts: the counters of their state files, and the node's totals."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from threefs import _native
from threefs.csi.metrics import ReadTotals
from threefs.csi.mount_manager.read_bytes import COUNTERS, DISTANCES, OFFSET, read_bytes

if TYPE_CHECKING:
    from pathlib import Path


def totals(*of_distances: int) -> dict[str, int]:
    return dict(zip(DISTANCES, of_distances, strict=True))


def test_the_offset_is_that_of_the_daemon() -> None:
    assert OFFSET == _native.MOUNT_READS_OFFSET


def test_counters_are_read_and_files_without_them_are_not(tmp_path: Path) -> None:
    file = tmp_path / "state"
    assert read_bytes(file) is None
    # Of a daemon that did not count.
    file.write_bytes(bytes(OFFSET))
    assert read_bytes(file) is None
    file.write_bytes(bytes(OFFSET) + COUNTERS.pack(1, 20, 300, 4000))
    assert read_bytes(file) == [1, 20, 300, 4000]


def test_a_file_that_the_daemon_has_replaced_is_neither_followed_nor_waited_for(
    tmp_path: Path,
) -> None:
    other, link, fifo = tmp_path / "other", tmp_path / "link", tmp_path / "fifo"
    other.write_bytes(bytes(OFFSET + COUNTERS.size))
    link.symlink_to(other)
    os.mkfifo(fifo)
    for path in (link, fifo, tmp_path):
        assert read_bytes(path) is None


def test_totals_never_decrease_and_count_from_the_first_scrape() -> None:
    reads = ReadTotals()
    assert reads.update({"0:41": [100, 0, 0, 7]}) == totals(0, 0, 0, 0)
    assert reads.update({"0:41": [150, 0, 0, 9]}) == totals(50, 0, 0, 2)
    # A new mount counts from 0.
    assert reads.update({"0:41": [150, 0, 0, 9], "0:42": [0, 5, 0, 0]}) == totals(50, 5, 0, 2)
    # Its mount has ended; then another mount has its number.
    assert reads.update({"0:42": [0, 5, 1, 0]}) == totals(50, 5, 1, 2)
    assert reads.update({"0:42": [3, 0, 0, 0]}) == totals(53, 5, 1, 2)
    assert reads.update({}) == totals(53, 5, 1, 2)
