"""A node of the test cluster with the paper's hardware: stand-in driver, sysfs and device nodes.

Everything lies below /var/lib/flyer-fake of the node, which is a folder of this machine too, so a
test breaks the hardware by writing a file.
"""

from __future__ import annotations

import os
import shutil
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flyer_node.testing.nvml import StubDriver, build_stub
from flyer_node.testing.sysfs import paper_node, write_sysfs

from e2e.tests.pods import train_pod

if TYPE_CHECKING:
    from pathlib import Path

    from e2e.cluster.handle import Cluster

__all__ = [
    "AGENT_IMAGE",
    "NAMESPACE",
    "FakeHardware",
    "agent_objects",
    "agent_pod",
    "fake_hardware",
]

AGENT_IMAGE = "docker.io/fireflyer/node-agent:test"
NAMESPACE = "fireflyer-system"
FOLDER = "/var/lib/flyer-fake"
STATE = "/var/lib/fire-flyer/node"
METRICS_PORT = 9400
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


@dataclass(frozen=True)
class FakeHardware:
    """One node's hardware in the hands of a test."""

    node: str
    folder: Path
    """On this machine."""
    driver: StubDriver

    @property
    def kubelet_socket(self) -> Path:
        """The kubelet's registration socket, as this machine sees it."""
        return self.folder.parent / "kubelet/device-plugins/kubelet.sock"


def fake_hardware(cluster: Cluster, node: str, seed: int) -> FakeHardware:
    """Puts the paper's node under a node of the cluster."""
    folder = cluster.state.folder / "nodes" / node / "var-lib" / "flyer-fake"
    if folder.exists():
        shutil.rmtree(folder)
    machine = paper_node(seed=seed)
    write_sysfs(machine, folder / "sys")
    build_stub(folder / "lib")
    (folder / "policy.toml").write_text(POLICY)
    devices = folder / "dev"
    (devices / "infiniband").mkdir(parents=True)
    names = [f"nvidia{index}" for index in range(8)]
    for name in (*names, "nvidiactl", "nvidia-uvm", "infiniband/uverbs0", "infiniband/rdma_cm"):
        os.mknod(devices / name, 0o666 | stat.S_IFCHR, os.makedev(1, 3))  # as /dev/null
    driver = StubDriver(folder / "driver", machine)
    driver.write()
    return FakeHardware(node, folder, driver)


def agent_objects() -> list[dict[str, Any]]:
    """What the agent needs in the cluster: its namespace, account and rights."""
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "flyer-node"}
    account = {"kind": "ServiceAccount", "name": "flyer-node", "namespace": NAMESPACE}
    rules = [
        {
            "apiGroups": ["fireflyer.dev"],
            "resources": ["nodehealths", "nodehealths/status"],
            "verbs": ["create", "get", "patch", "update"],
        },
        {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get"]},
    ]
    rbac = "rbac.authorization.k8s.io/v1"
    meta = {"name": "flyer-node"}
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}},
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta | {"namespace": NAMESPACE}},
        {"apiVersion": rbac, "kind": "ClusterRole", "metadata": meta, "rules": rules},
        {
            "apiVersion": rbac,
            "kind": "ClusterRoleBinding",
            "metadata": meta,
            "roleRef": role,
            "subjects": [account],
        },
    ]


def agent_pod(node: str) -> dict[str, Any]:
    """The agent on a node with fake hardware; unprivileged, as in the chart."""
    paths = {
        "plugins": "/var/lib/kubelet/device-plugins",
        "fake": FOLDER,
        "state": STATE,
    }
    pod = train_pod(f"flyer-node-{node}", node, "flyer-node", "run")
    pod["metadata"]["namespace"] = NAMESPACE
    spec = pod["spec"]
    spec["serviceAccountName"] = "flyer-node"
    spec["restartPolicy"] = "Always"
    spec["volumes"] = [
        {"name": name, "hostPath": {"path": path, "type": "DirectoryOrCreate"}}
        for name, path in paths.items()
    ]
    values = {
        "FLYER_NODE_SYSFS_ROOT": f"{FOLDER}/sys",
        "FLYER_NODE_DEVICE_ROOT": f"{FOLDER}/dev",
        "FLYER_NODE_POLICY": f"{FOLDER}/policy.toml",
        "FLYER_NODE_KERNEL_LOG": "",
        "FLYER_NODE_METRICS_PORT": str(METRICS_PORT),
        "LD_LIBRARY_PATH": f"{FOLDER}/lib",
        "FLYER_STUB_NVML": f"{FOLDER}/driver",
    }
    own_node = {"fieldRef": {"fieldPath": "spec.nodeName"}}
    container = spec["containers"][0]
    container["image"] = AGENT_IMAGE
    container["imagePullPolicy"] = "Never"
    container["env"] = [{"name": "FLYER_NODE_NAME", "valueFrom": own_node}]
    container["env"] += [{"name": name, "value": value} for name, value in values.items()]
    container["readinessProbe"] = {
        "httpGet": {"path": "/readyz", "port": METRICS_PORT},
        "periodSeconds": 1,
    }
    container["securityContext"] = {
        "runAsUser": 0,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    container["volumeMounts"] = [
        {"name": name, "mountPath": path, "readOnly": name == "fake"}
        for name, path in paths.items()
    ]
    return pod
