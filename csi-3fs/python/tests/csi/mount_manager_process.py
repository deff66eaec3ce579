"""A mount manager process, with the small daemon or the real one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from threefs.csi.mount_manager import mountinfo
from threefs.csi.mount_manager.launch import mount_manager_command
from threefs.csi.mount_manager_client import MountManagerClient, MountStatus

from .doubles import fuse_daemon

WAIT_SECONDS = 60.0
SMALL_DAEMON = [sys.executable, "-I", fuse_daemon.__file__]


def can_mount() -> bool:
    """Whether this user can create FUSE mounts here."""
    return os.geteuid() == 0 and Path("/dev/fuse").exists()


@dataclass
class MountManagerProcess:
    """One node's folder, and the mount managers that ran there."""

    folder: Path
    daemon: list[str] = field(default_factory=lambda: SMALL_DAEMON)
    processes: list[subprocess.Popen[str]] = field(default_factory=list)
    fd_store: Path | None = None
    arguments: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.kubelet.mkdir(parents=True)
        cluster = self.folder / "clusters" / "default"
        cluster.mkdir(parents=True)
        (cluster / "cluster.json").write_text("{}")

    @property
    def kubelet(self) -> Path:
        return self.folder / "kubelet"

    @property
    def socket(self) -> Path:
        return self.folder / "manager.sock"

    @property
    def client(self) -> MountManagerClient:
        return MountManagerClient(self.socket)

    def place(self, name: str) -> str:
        return str(self.kubelet / name)

    def start_fd_store(self) -> subprocess.Popen[str]:
        """Start a descriptor store, for mount managers that start after it."""
        self.fd_store = self.folder / "fd-store.sock"
        with (self.folder / "manager.log").open("a") as log:
            process = subprocess.Popen(
                mount_manager_command(["--socket", str(self.fd_store)], "fd_store"),
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", self.log()
        # First, so that the newest process is a manager.
        self.processes.insert(0, process)
        return process

    def start(self) -> subprocess.Popen[str]:
        command = mount_manager_command(
            [
                *(("--fd-store", str(self.fd_store)) if self.fd_store else ()),
                *self.arguments,
                *("--socket", str(self.socket)),
                *("--clusters", str(self.folder / "clusters")),
                *("--kubelet-dir", str(self.kubelet)),
                *("--daemon", *self.daemon),
            ]
        )
        with (self.folder / "manager.log").open("a") as log:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", self.log()
        self.processes.append(process)
        return process

    def mount(self, name: str, *, read_only: bool = False, node: str = "") -> str:
        self.client.mount(
            f"v1:default:/volumes/{name}",
            "default",
            f"/volumes/{name}/data",
            self.place(name),
            read_only=read_only,
            node=node,
        )
        return self.place(name)

    def served(self, name: str) -> MountStatus:
        mounts = self.client.state()[1]
        return next(mount for mount in mounts if mount.volume.endswith(f"/{name}"))

    def wait_state(self, name: str, state: str) -> MountStatus:
        deadline = time.monotonic() + WAIT_SECONDS
        while (served := self.served(name)).state != state:
            assert time.monotonic() < deadline, served
            time.sleep(0.01)
        return served

    def log(self) -> str:
        return (self.folder / "manager.log").read_text()

    def mounts(self) -> list[str]:
        """Mount points below this folder."""
        inside = str(self.folder)
        return [mount.target for mount in mountinfo.read() if mount.target.startswith(inside)]

    def close(self) -> None:
        """Stop all processes that were started here and unmount everything."""
        pids = set()
        if self.processes and self.processes[-1].poll() is None:
            pids = {served.pid for served in self.client.state()[1] if served.pid}
        for process in self.processes:
            process.kill()
            process.wait()
        for pid in pids:
            end(pid)
        for target in reversed(self.mounts()):
            subprocess.run(["umount", "-l", target], check=False, timeout=WAIT_SECONDS)


def end(pid: int) -> None:
    """Kill a process that may already have ended."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
