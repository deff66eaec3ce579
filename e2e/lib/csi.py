"""The deployed CSI driver as local processes, with a real 3FS and one or more "nodes"."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
from threefs.csi.errors import CsiError
from threefs.csi.mount_manager import mountinfo
from threefs.csi.mount_manager.launch import mount_manager_command
from threefs.csi.mount_manager_client import MountManagerClient
from threefs.csi.proto import csi_pb2_grpc as stubs

from testcluster import csi_sanity

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Deployed", "NodeProcesses", "has_daemon"]

READY_SECONDS = 90.0
CALL_SECONDS = 90.0
CSI = "import sys; from threefs.csi.main import main; sys.exit(main())"
Process = subprocess.Popen[str]


def has_daemon() -> bool:
    """Whether this build of threefs brings the FUSE daemon."""
    help_text = [sys.executable, "-m", "threefs", "fuse", "--help"]
    result = subprocess.run(help_text, capture_output=True, check=False, timeout=READY_SECONDS)
    return result.returncode == 0


def _let_pass(folder: Path) -> None:
    """FUSE daemons are not root: every folder above their files must let them pass."""
    for path in (folder, *folder.parents):
        mode = path.stat().st_mode
        if not mode & 0o001:
            path.chmod(mode | 0o011)


@dataclass
class NodeProcesses:
    """A mount manager and a node service with their own kubelet folder."""

    name: str
    folder: Path
    mount_manager: Process
    driver: Process

    @property
    def kubelet(self) -> Path:
        """Everything that is mounted is below it."""
        return self.folder / "kubelet"

    @property
    def endpoint(self) -> str:
        """Where its node service listens."""
        return f"unix://{self.folder}/csi.sock"

    @property
    def mount_manager_client(self) -> MountManagerClient:
        """Its mount manager."""
        return MountManagerClient(self.folder / "manager.sock")

    def stub(self) -> Any:
        """Calls of the node service."""
        return stubs.NodeStub(grpc.insecure_channel(self.endpoint))


class Deployed:
    """3FS, the controller and nodes; `stop` removes all of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nodes: list[NodeProcesses] = []
        self._processes: list[Process] = []

    def start(self, nodes: int = 1) -> None:
        """Start everything and wait until it can be used."""
        _let_pass(self.folder)
        serve = [sys.executable, "-m", "threefs", "serve", "--data", str(self.folder / "3fs")]
        self.until_it_says("ready", serve)
        (self.folder / "clusters").mkdir()
        (self.folder / "clusters" / "default").symlink_to(self.folder / "3fs")
        self._driver("controller", self.folder / "controller.sock")
        for number in range(nodes):
            folder = self.folder / f"node-{number}"
            (folder / "kubelet").mkdir(parents=True)
            manager = self.mount_manager(folder)
            self.nodes.append(
                NodeProcesses(folder.name, folder, manager, self.node_service(folder))
            )

    def mount_manager(self, folder: Path) -> Process:
        """Start a mount manager for a node; it takes over from a running one."""
        where = ("--socket", f"{folder}/manager.sock", "--kubelet-dir", f"{folder}/kubelet")
        clusters = ("--clusters", str(self.folder / "clusters"))
        return self.until_it_says("ready", mount_manager_command([*where, *clusters]))

    def node_service(self, folder: Path) -> Process:
        """A node service."""
        own = ("--mount-manager", f"{folder}/manager.sock", "--node-id", folder.name)
        return self._driver("node", folder / "csi.sock", *own)

    @property
    def controller_endpoint(self) -> str:
        """Where the controller listens."""
        return f"unix://{self.folder}/controller.sock"

    def controller(self) -> Any:
        """Calls of the controller."""
        return stubs.ControllerStub(grpc.insecure_channel(self.controller_endpoint))

    def log(self) -> str:
        """The logs of all processes."""
        return (self.folder / "log").read_text()[-20_000:]

    def stop(self) -> None:
        """End everything; what is still mounted is unmounted by the mount managers first."""
        for node in self.nodes:
            # Anything that remains is removed below: processes must end in any case.
            with contextlib.suppress(CsiError):
                for mounted in reversed(node.mount_manager_client.state()[0]):
                    node.mount_manager_client.unmount(mounted.target)
        for process in reversed(self._processes):
            process.terminate()
        for process in reversed(self._processes):
            process.wait(timeout=READY_SECONDS)
        for mount in mountinfo.read():
            if mount.target.startswith(f"{self.folder}/"):
                lazily = ["umount", "-l", mount.target]
                subprocess.run(lazily, check=False, timeout=READY_SECONDS)

    def until_it_says(self, word: str, command: list[str]) -> Process:
        """Start a process and wait for its first line."""
        process = self._start(command)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith(word), self.log()
        return process

    def _driver(self, component: str, socket: Path, *more: str) -> Process:
        shared = ("--clusters", str(self.folder / "clusters"), "--metrics-port", "0")
        named = ("--endpoint", f"unix://{socket}", "--driver-name", csi_sanity.DRIVER_NAME)
        socket.unlink(missing_ok=True)
        process = self._start([sys.executable, "-c", CSI, component, *shared, *named, *more])
        deadline = time.monotonic() + READY_SECONDS
        while not socket.exists():
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.05)
        return process

    def _start(self, command: list[str]) -> Process:
        with (self.folder / "log").open("a") as log:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        self._processes.append(process)
        return process
