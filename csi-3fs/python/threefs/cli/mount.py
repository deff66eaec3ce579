"""`threefs mount` and `threefs umount`: mounts on this machine, each with its own mount manager.

::

    STATE/DIGEST/manager.sock                  socket of the mount manager
    STATE/DIGEST/manager.log                   its log, and the last lines of the FUSE daemon
    STATE/DIGEST/clusters/default/cluster.json copy of the cluster file, for the FUSE daemon
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from threefs.cluster import CLUSTER_FILE, ClusterFile
from threefs.csi.mount_manager.launch import mount_manager_command
from threefs.csi.mount_manager.protocol import Refused, exchange
from threefs.errors import Exists, InvalidArgument, NotFound, ThreeFSError, Unavailable

__all__ = ["mount_path", "umount_path"]

START_SECONDS = 30.0
CALL_SECONDS = 30.0
STOP_SECONDS = 10.0
DIGEST_CHARACTERS = 16
MNT_EXPIRE, UMOUNT_NOFOLLOW = 4, 8


def mount_path(
    cluster: Path | None,
    path: Path,
    root: str,
    state: Path,
    *,
    read_only: bool,
    foreground: bool,
) -> None:
    """Mount a directory of 3FS; in the foreground, return after it was unmounted."""
    if cluster is None:
        raise InvalidArgument("no cluster given: pass --cluster FILE or set THREEFS_CLUSTER")
    if not root.startswith("/"):
        raise InvalidArgument(
            f"invalid root `{root}`: expected an absolute path, for example /data"
        )
    file = ClusterFile.read(cluster)
    target = path.resolve()
    folder = _state_folder(state, target)
    if (folder / "manager.sock").exists():
        raise Exists(f"`{target}` is already mounted; unmount it with `threefs umount {target}`")
    # Before there is anything that a signal could leave behind.
    signals = _collect_signals() if foreground else []
    settings = folder / "clusters" / "default"
    settings.mkdir(mode=0o700, parents=True, exist_ok=True)
    file.write(settings / CLUSTER_FILE)
    manager = _start_manager(folder, target)
    try:
        _call(
            folder,
            op="mount",
            volume=root,
            cluster="default",
            root=root,
            target=str(target),
            read_only=read_only,
        )
    except ThreeFSError:
        _stop_manager(manager.pid, manager)
        shutil.rmtree(folder, ignore_errors=True)
        raise
    sys.stdout.write(f"mounted 3fs:{root} at {target}\n")
    sys.stdout.flush()
    if foreground:
        _wait_for_signal(signals, manager)
        umount_path(target, state, force=True)
        manager.wait(STOP_SECONDS)


def umount_path(path: Path, state: Path, *, force: bool) -> None:
    """Unmount a directory and stop its mount manager; the directory itself stays."""
    target = path.absolute() if path.is_symlink() else path.parent.resolve() / path.name
    folder = _state_folder(state, target)
    if not folder.is_dir():
        raise NotFound(
            f"`{target}` is not mounted by `threefs mount` (state folder `{state}`); check --state",
            path=str(target),
        )
    if not force and _is_busy(target):
        raise ThreeFSError(
            f"`{target}` is busy: close its open files (`fuser -vm {target}` lists them), or use "
            "--force"
        )
    pid = int(_call(folder, op="hello")["pid"])
    outcome = _call(folder, op="unmount", target=str(target))
    _stop_manager(pid)
    shutil.rmtree(folder, ignore_errors=True)
    target.mkdir(exist_ok=True)
    if outcome["data_lost"]:
        raise ThreeFSError(f"`{target}` is unmounted, data not written: {outcome['data_lost']}")


def _state_folder(state: Path, target: Path) -> Path:
    return state / hashlib.sha256(str(target).encode()).hexdigest()[:DIGEST_CHARACTERS]


def _start_manager(folder: Path, target: Path) -> subprocess.Popen[str]:
    command = mount_manager_command(
        [
            *("--socket", str(folder / "manager.sock")),
            *("--clusters", str(folder / "clusters")),
            *("--kubelet-dir", str(target.parent)),
            *("--daemon", sys.executable, "-P", "-m", "threefs", "fuse"),
        ]
    )
    with (folder / "manager.log").open("w") as log:
        manager = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
    assert manager.stdout is not None
    ready, _, _ = select.select([manager.stdout], [], [], START_SECONDS)
    if not ready or manager.stdout.readline() != "ready\n":
        manager.kill()
        manager.wait(STOP_SECONDS)
        raise ThreeFSError(
            f"the mount manager did not start within {START_SECONDS:g} s; "
            f"see `{folder / 'manager.log'}`"
        )
    return manager


def _call(folder: Path, **request: object) -> dict[str, Any]:
    path = folder / "manager.sock"
    try:
        reply = exchange(path, CALL_SECONDS, **request)
    except (OSError, Refused) as error:
        raise Unavailable(
            f"the mount manager at `{path}` does not answer ({error}); if its process is gone, "
            f"unmount with `umount -l` and remove `{folder}`"
        ) from error
    if reply.get("ok") is not True:
        raise ThreeFSError(str(reply.get("message")))
    return reply


def _is_busy(target: Path) -> bool:
    """Whether files of a mount are open: MNT_EXPIRE fails with EBUSY, and has no other effect."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.umount2(os.fsencode(target), MNT_EXPIRE | UMOUNT_NOFOLLOW)
    return ctypes.get_errno() == errno.EBUSY


def _stop_manager(pid: int, process: subprocess.Popen[str] | None = None) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + STOP_SECONDS
    while time.monotonic() < deadline:
        if process is not None and process.poll() is not None:
            return
        if not Path(f"/proc/{pid}").exists():
            return
        if process is None and _is_zombie(pid):
            return
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def _collect_signals() -> list[int]:
    """A list that receives every SIGINT and SIGTERM from now on."""
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _frame: signals.append(received))
    return signals


def _wait_for_signal(signals: list[int], manager: subprocess.Popen[str]) -> None:
    """Return after a signal, or when the mount manager has ended."""
    while not signals and manager.poll() is None:
        time.sleep(0.1)
