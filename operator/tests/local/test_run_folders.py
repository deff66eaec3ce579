"""Run folders in the temporary folder: removed only after their state directory."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from flyer.local import run_folders
from flyer.local.store import Store

if TYPE_CHECKING:
    from collections.abc import Iterator

LATER = 10 * run_folders.UNSIGNED_SECONDS


@pytest.fixture
def states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder whose paths are too long for sockets, and a separate temporary folder."""
    with tempfile.TemporaryDirectory(prefix="rf") as short:
        monkeypatch.setattr(tempfile, "tempdir", short)
        yield tmp_path / ("long-" * 20)


def later() -> float:
    return time.time() + LATER


class Later:
    """The module `time` in the future."""

    time = staticmethod(later)


def test_the_folder_of_a_dead_driver_is_removed_by_the_next_driver(
    states: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Store.open(states / "first")
    first.close()
    run = first.paths.run
    assert run.parent == Path(tempfile.gettempdir())
    assert (run / run_folders.OWNER).read_text() == f"{first.paths.root}\n"
    second = Store.open(states / "second")
    assert run.exists(), "just touched"
    second.close()
    monkeypatch.setattr(run_folders, "time", Later)
    third = Store.open(states / "third")
    assert not run.exists()
    assert third.paths.run.exists()
    third.close()
    again = Store.open(states / "first")  # a removed folder is recreated
    assert again.paths.run == run
    assert run.exists()
    again.close()


def test_the_folder_of_a_running_driver_is_kept(states: Path) -> None:
    living, other = Store.open(states / "living"), Store.open(states / "other")
    assert run_folders.remove_dead(other.paths, now=later()) == 0
    assert living.paths.run.exists()
    living.close()
    assert run_folders.remove_dead(other.paths, now=later()) == 1
    assert not living.paths.run.exists()
    other.close()


def test_a_folder_whose_state_was_deleted_is_removed_and_a_foreign_one_kept(states: Path) -> None:
    deleted, other = Store.open(states / "gone"), Store.open(states / "other")
    deleted.close()
    for path in sorted(deleted.paths.root.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    deleted.paths.root.rmdir()
    base = Path(tempfile.gettempdir()) / f"flyer-{os.getuid()}-"
    open_to_all = Path(f"{base}open")
    open_to_all.mkdir(mode=0o700)
    open_to_all.chmod(0o777)
    lying = Path(f"{base}lying")
    lying.mkdir(mode=0o700)
    (lying / run_folders.OWNER).write_text(f"{states / 'elsewhere'}\n")
    young = Path(f"{base}young")
    young.mkdir(mode=0o700)
    link = Path(f"{base}link")
    link.symlink_to(other.paths.root)
    moment = time.time() + run_folders.QUIET_SECONDS + 60
    assert run_folders.remove_dead(other.paths, now=moment) == 1
    assert not deleted.paths.run.exists()
    for item in (open_to_all, lying, young, link, other.paths.root, other.paths.run):
        assert item.exists()
    assert run_folders.remove_dead(other.paths, now=later()) == 1
    assert not young.exists(), "unsigned, and old"
    other.close()
