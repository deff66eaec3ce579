"""Simulated hardware of the test cluster's nodes: driver, sysfs and device nodes.

Everything is below /var/lib/flyer-fake of a node, which is also a folder of this host, so a test
breaks the hardware by writing a file. The chart's agent reads it there (`AGENT_VALUES`).
"""

from __future__ import annotations

import os
import shutil
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deviceplugin.testing.nvml import StubDriver, build_stub
from deviceplugin.testing.sysfs import paper_node, write_sysfs

if TYPE_CHECKING:
    from pathlib import Path

    from testcluster.handle import Cluster

__all__ = ["AGENT_VALUES", "FakeHardware", "fake_hardware"]

FOLDER = "/var/lib/flyer-fake"
POLICY = """
version = "e2e"
[timers]
gpu_hold = 1.0
gpu_probation = 1.0
[[xid]]
code = 79
class = "uncorrectable"
action = "unhealthy"
reset = true
remedy = "node reboot"
source = "paper: uncorrectable"
"""

_OF_JOBS = {"key": "fireflyer.dev/node-class", "operator": "Exists"}

AGENT_VALUES: dict[str, Any] = {
    # Not on kind's control plane, which has no hardware.
    "affinity": {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchExpressions": [_OF_JOBS]}]
            }
        }
    },
    "maxUnavailable": "100%",
    "deviceMode": "nodes",  # the test cluster's containerd 1.6 has no CDI
    "extraArgs": [
        f"--sysfs-root={FOLDER}/sys",
        f"--device-root={FOLDER}/dev",
        f"--device-view={FOLDER}/dev",
        f"--policy={FOLDER}/policy.toml",
    ],
    "extraEnv": [
        {"name": "LD_LIBRARY_PATH", "value": f"{FOLDER}/lib"},
        {"name": "FLYER_STUB_NVML", "value": f"{FOLDER}/driver"},
    ],
    "extraVolumes": [{"name": "fake", "hostPath": {"path": FOLDER, "type": "Directory"}}],
    "extraVolumeMounts": [{"name": "fake", "mountPath": FOLDER, "readOnly": True}],
}
"""The chart's `nodeAgent`: the agent as it is, but for where it looks."""


@dataclass(frozen=True)
class FakeHardware:
    """Handle of one node's hardware for tests."""

    node: str
    folder: Path
    """On this machine."""
    driver: StubDriver

    @property
    def kubelet_socket(self) -> Path:
        """The kubelet's registration socket, as this machine sees it."""
        return self.folder.parent / "kubelet/device-plugins/kubelet.sock"


def fake_hardware(cluster: Cluster, node: str) -> FakeHardware:
    """Gives a node the paper's hardware without faults; repairs existing hardware.

    The folder is never recreated: the agent has it mounted. Its policy is written last.
    """
    folder = cluster.state.folder / "nodes" / node / "var-lib" / "flyer-fake"
    machine = paper_node(seed=1 + cluster.state.nodes.index(node))
    driver = StubDriver(folder / "driver", machine)
    policy = folder / "policy.toml"
    if not policy.exists():
        for path in folder.glob("*"):
            shutil.rmtree(path)
        write_sysfs(machine, folder / "sys")
        build_stub(folder / "lib")
        _make_devices(folder / "dev")
        policy.write_text(POLICY)
    driver.write()
    return FakeHardware(node, folder, driver)


def _make_devices(folder: Path) -> None:
    (folder / "infiniband").mkdir(parents=True)
    names = [f"nvidia{index}" for index in range(8)]
    for name in (*names, "nvidiactl", "nvidia-uvm", "infiniband/uverbs0", "infiniband/rdma_cm"):
        os.mknod(folder / name, 0o666 | stat.S_IFCHR, os.makedev(1, 3))  # as /dev/null
