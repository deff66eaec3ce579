"""Loss of power after a save: what was not flushed is gone, and the saved step still loads.

`os.fsync` is recorded: of a file its content at that moment, of a folder its names. Everything else
is lost, so a flush that is missing shows.
"""

import os
import stat
import threading
from pathlib import Path

import pytest
from threefs.checkpoint import CheckpointManager, LocalFiles


class Disk:
    """Durable content by inode."""

    def __init__(self, root):
        self._root = root
        self._lock = threading.Lock()
        self._contents = {}
        self._names = {root.stat().st_ino: {}}

    def fsync(self, descriptor):
        """In the place of `os.fsync`."""
        status = os.fstat(descriptor)
        with self._lock:
            if stat.S_ISDIR(status.st_mode):
                names = {}
                for entry in os.scandir(f"/proc/self/fd/{descriptor}"):
                    names[entry.name] = entry.inode()
                self._names[status.st_ino] = names
            else:
                self._names.pop(status.st_ino, None)  # a folder that was removed had this number
                path = f"/proc/self/fd/{descriptor}"
                self._contents[status.st_ino] = Path(path).read_bytes()

    def after_power_loss(self, folder):
        """Make `folder` what is left of the root."""
        with self._lock:
            self._restore(self._root.stat().st_ino, folder)

    def _restore(self, inode, path):
        path.mkdir()
        for name, below in self._names.get(inode, {}).items():
            if below in self._names:
                self._restore(below, path / name)
            else:
                # A file that was not flushed itself has a name and no data.
                (path / name).write_bytes(self._contents.get(below, b""))


class Folders(LocalFiles):
    """Reports to the disk which inodes are folders: a folder that was never flushed is empty."""

    def __init__(self, root, disk):
        super().__init__(root)
        self._disk = disk

    def mkdir(self, path, **options):
        """Make it, and note it."""
        super().mkdir(path, **options)
        folder = self._local(path)
        for directory in (folder, *folder.parents):
            if directory == self._root:
                break
            self._disk._names.setdefault(directory.stat().st_ino, {})


@pytest.fixture
def disk(tmp_path, monkeypatch):
    root = tmp_path / "root"
    root.mkdir()
    recorded = Disk(root)
    monkeypatch.setattr(os, "fsync", recorded.fsync)
    return recorded


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_step_that_is_durable_survives_a_loss_of_power(tmp_path, disk, ranks):
    files = Folders(tmp_path / "root", disk)
    managers = [
        CheckpointManager(files, "/jobs/c", rank, ranks, attempt="a", keep=2)
        for rank in range(ranks)
    ]
    for step in range(1, 5):
        state = {"step": step, "x": [bytes([step, part]) * 6000 for part in range(5)]}
        for handle in [manager.save(step, state) for manager in managers]:
            handle.wait(20)
        remains = tmp_path / f"left-{step}"
        disk.after_power_loss(remains)
        loaded = CheckpointManager(LocalFiles(remains), "/jobs/c", attempt="reader").load()
        assert (loaded.step, loaded.state) == (step, state)
        assert loaded.report.skipped == []
