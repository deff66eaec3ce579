"""`threefs mount` and `threefs umount` with a real mount."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
from rings import wait_for
from threefs.cli import mount
from threefs.errors import ThreeFSError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WAIT_SECONDS = 60.0
STATE = "state/" + "long" * 30
"""A path that is longer than the limit of a UNIX socket's address."""


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "threefs", *map(str, arguments)]


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=WAIT_SECONDS, check=False
    )


def read(path: Path) -> str:
    """Read in a child process, so that a hung read fails the test with a timeout."""
    result = subprocess.run(
        ["cat", path], capture_output=True, text=True, timeout=WAIT_SECONDS, check=True
    )
    return result.stdout


@pytest.fixture
def mounted(cluster: Any, folder: str, tmp_path: Path) -> Callable[..., list[str | Path]]:
    """Arguments of `threefs mount` for a directory of the shared cluster."""

    def arguments(*options: str) -> list[str | Path]:
        where = ["--cluster", cluster.file, "--root", folder, "--state", tmp_path / STATE]
        return ["mount", *where, *options, tmp_path / "mnt"]

    return arguments


def test_a_directory_is_mounted_in_the_background_and_unmounted(
    mounted: Callable[..., list[str | Path]], tmp_path: Path, client: Any, folder: str
) -> None:
    target, state = tmp_path / "mnt", tmp_path / STATE
    client.write_file(f"{folder}/hello", b"from the client\n")
    result = run(*mounted())
    assert (result.returncode, result.stdout) == (0, f"mounted 3fs:{folder} at {target}\n"), (
        result.stderr
    )
    try:
        assert read(target / "hello") == "from the client\n"
        (target / "back").write_text("from the mount\n")
        assert client.read_file(f"{folder}/back") == b"from the mount\n"
        assert "is already mounted" in run(*mounted()).stderr
        with (target / "hello").open():
            busy = run("umount", "--state", state, target)
            assert busy.returncode == 1
            assert "is busy" in busy.stderr
        assert os.path.ismount(target)
    finally:
        result = run("umount", "--state", state, target)
    assert result.returncode == 0, result.stderr
    assert not os.path.ismount(target)
    assert list(target.iterdir()) == list(state.iterdir()) == []


def test_a_foreground_mount_is_unmounted_at_the_end(
    mounted: Callable[..., list[str | Path]], tmp_path: Path
) -> None:
    target = tmp_path / "mnt"
    process = subprocess.Popen(
        command(*mounted("--foreground", "--read-only")), stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("mounted")
    with pytest.raises(OSError, match="Read-only"):
        (target / "new").write_text("")
    process.send_signal(signal.SIGINT)
    assert process.wait(WAIT_SECONDS) == 0
    assert not os.path.ismount(target)
    assert list((tmp_path / STATE).iterdir()) == []


def test_a_signal_during_the_mount_is_not_lost(
    mounted: Callable[..., list[str | Path]], tmp_path: Path
) -> None:
    state = tmp_path / STATE
    process = subprocess.Popen(command(*mounted("--foreground")), stdout=subprocess.DEVNULL)
    wait_for(lambda: list(state.glob("*/clusters")), WAIT_SECONDS)
    process.send_signal(signal.SIGINT)
    assert process.wait(WAIT_SECONDS) == 0
    assert not os.path.ismount(tmp_path / "mnt")
    assert list(state.iterdir()) == []


def test_a_mount_that_fails_leaves_nothing(
    mounted: Callable[..., list[str | Path]], tmp_path: Path
) -> None:
    started = time.monotonic()
    result = run(*mounted("--root", "/does/not/exist"))
    assert result.returncode == 1
    assert "does not serve" in result.stderr
    assert not os.path.ismount(tmp_path / "mnt")
    assert list((tmp_path / STATE).iterdir()) == []
    assert time.monotonic() - started < WAIT_SECONDS


def test_a_directory_that_is_not_mounted_is_refused(tmp_path: Path) -> None:
    result = run("umount", "--state", tmp_path, tmp_path / "mnt")
    assert result.returncode == 102
    assert "is not mounted by `threefs mount`" in result.stderr


def test_a_manager_that_never_becomes_ready_is_killed_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = [sys.executable, "-c", "import signal; signal.pause()"]
    monkeypatch.setattr(mount, "mount_manager_command", lambda _arguments: silent)
    monkeypatch.setattr(mount, "START_SECONDS", 0.2)
    with pytest.raises(ThreeFSError, match=r"did not start within 0\.2 s; see `.*manager\.log`"):
        mount._start_manager(tmp_path, tmp_path / "mnt")
