"""Removal of old builds from the cache: those of this version, recent ones and those in progress
are kept.
"""

from __future__ import annotations

import fcntl
import os
import sys
import time
from typing import TYPE_CHECKING

from programs import binaries
from testcluster import __main__ as command
from testcluster.prune import DAY_SECONDS, prune

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

NOW = time.time()


def make_build(path: Path, days: float) -> Path:
    """A build that was used this number of days ago."""
    path.mkdir(parents=True)
    program = path / "program"
    program.write_bytes(b"x" * 3000)
    for entry in (program, path):
        os.utime(entry, (NOW - days * DAY_SECONDS,) * 2)
    return path


def test_only_old_builds_of_other_versions_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FLYER_E2E_CACHE", str(tmp_path))
    current = make_build(next(iter(binaries.folders())), 90)
    old = make_build(tmp_path / "bin" / "kwok-old", 20)
    fresh = make_build(tmp_path / "bin" / "kwok-new", 1)
    building = make_build(tmp_path / "bin" / "kwok-building", 20)
    wheel = make_build(tmp_path / "wheels" / "flyer-old", 20)
    image = tmp_path / "images" / "storage-old.tar"
    image.parent.mkdir()
    image.write_bytes(b"x" * 5000)
    os.utime(image, (NOW - 20 * DAY_SECONDS,) * 2)
    with (building / ".lock").open("w") as lock:
        os.utime(building / ".lock", (NOW - 20 * DAY_SECONDS,) * 2)
        os.utime(building, (NOW - 20 * DAY_SECONDS,) * 2)
        fcntl.flock(lock, fcntl.LOCK_EX)
        monkeypatch.setattr(sys, "argv", ["cluster", "prune", "--dry-run"])
        assert command.main() == 0
        assert "3 old builds would be removed" in capsys.readouterr().out
        assert old.exists()
        pruned = prune(14, NOW)
    assert [(build.path, build.bytes) for build in pruned] == [
        (image, 5000),
        (old, 3000),
        (wheel, 3000),
    ]
    assert not any(path.exists() for path in (old, wheel, image))
    assert all(path.exists() for path in (current, fresh, building))


def test_the_timestamp_of_a_used_build_is_updated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLYER_E2E_CACHE", str(tmp_path))
    path = binaries._path("kwok")
    make_build(path.parent, 90)
    path.touch()
    os.utime(path.parent, (NOW - 90 * DAY_SECONDS,) * 2)
    binaries.require("kwok")
    assert path.parent.stat().st_mtime > NOW - DAY_SECONDS
