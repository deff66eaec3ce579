"""The chart on a test cluster: installs it with the test images, upgrades and removes it."""

from __future__ import annotations

import json
import os
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from charts import helm
from charts.generate import CHART
from e2e.lib.hardware import AGENT_VALUES

if TYPE_CHECKING:
    from testcluster.handle import Cluster

__all__ = ["IMAGES", "NAMESPACE", "RELEASE", "VALUES", "Release"]

ROOT = Path(__file__).parents[2]
RELEASE, NAMESPACE = "fire-flyer", "fireflyer-system"
INSTALL_SECONDS = 300.0  # a loaded machine; a minute is the aim

IMAGES = (
    "controller",
    "collectives",
    "node-agent",
    "storage",
    "csi-provisioner",
    "csi-resizer",
    "csi-node-driver-registrar",
    "livenessprobe",
)
"""Images of the chart's pods and of job pods: `cluster.load_images(*IMAGES)`."""


EVERYWHERE = [{"operator": "Exists"}]
FOLDER = "/var/lib/fire-flyer/3fs"
DISKS, DISK = "local-disks", "/var/lib/fire-flyer/disk"

VALUES: dict[str, Any] = {
    "images": yaml.safe_load((ROOT / "testcluster" / "values.yaml").read_text())["images"],
    "operator": {
        "extraEnv": [
            # A scenario reads job progress that is at most one second old.
            {"name": "FLYER_PROGRESS_COMMIT_SECONDS", "value": "1"},
        ],
        "resources": {"requests": {"cpu": "300m", "memory": "192Mi"}},
    },
    "nodeAgent": AGENT_VALUES,
    "csi": {
        "node": {"maxUnavailable": "100%"},
        "mountManager": {"maxSurge": "100%"},
        "inline": {"enabled": True},
    },
    "threefs": {
        "nodeFailureMs": 3000,
        "mgmtd": {"volume": {"hostPath": FOLDER}},
        "meta": {"volume": {"hostPath": FOLDER}},
        # Three services on three machines; those of the test belong to jobs.
        "storage": {"tolerations": EVERYWHERE, "volume": {"storageClass": DISKS, "size": "8Gi"}},
    },
}


def _disk(node: str) -> dict[str, Any]:
    on_node = {"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": f"disk-{node}"},
        "spec": {
            "storageClassName": DISKS,
            "capacity": {"storage": "8Gi"},
            "accessModes": ["ReadWriteOnce"],
            "persistentVolumeReclaimPolicy": "Retain",
            "local": {"path": DISK},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [on_node]}]}},
        },
    }


@dataclass
class Release:
    """The one release of a cluster."""

    cluster: Cluster
    values: dict[str, Any] = field(default_factory=dict)
    """Further values, with dots: {"operator.replicas": 1}."""

    def install(self) -> float:
        """Installs or upgrades and waits until all is ready; the seconds that it took."""
        self._prepare_disks()
        started_at = time.monotonic()
        sets = [
            word
            for key, value in self.values.items()
            for word in ("--set-json", f"{key}={json.dumps(value)}")
        ]
        self.helm(
            "upgrade", "--install", RELEASE, str(CHART), "--create-namespace", "--values=-", *sets,
            "--wait", f"--timeout={INSTALL_SECONDS:.0f}s",
            stdin=json.dumps(VALUES), deadline_s=INSTALL_SECONDS + 60,
        )  # fmt: skip
        return time.monotonic() - started_at

    def _prepare_disks(self) -> None:
        """As with local disks: pins each storage service to the node that holds its chunks."""
        for node in self.cluster.state.nodes:
            self.cluster.run_on(node, "mkdir", "-p", DISK)
        self.cluster.apply(
            {
                "apiVersion": "storage.k8s.io/v1",
                "kind": "StorageClass",
                "metadata": {"name": DISKS},
                "provisioner": "kubernetes.io/no-provisioner",
                "volumeBindingMode": "WaitForFirstConsumer",
            },
            *(_disk(node) for node in self.cluster.state.nodes),
        )

    def uninstall(self) -> None:
        """Uninstalls the release; definitions, the key and claims stay."""
        self.helm("uninstall", RELEASE, "--ignore-not-found", "--wait", "--timeout=180s")

    def helm(self, *arguments: str, stdin: str = "", deadline_s: float = INSTALL_SECONDS) -> str:
        """Output of Helm; raises AssertionError with its error and the state of the pods."""
        result = subprocess.run(
            [helm.find(), f"--namespace={NAMESPACE}", *arguments],
            env={**os.environ, "KUBECONFIG": self.cluster.kubeconfig},
            input=stdin,
            capture_output=True,
            text=True,
            timeout=deadline_s,
            check=False,
        )
        if result.returncode != 0:
            raise AssertionError(f"helm {arguments[0]}: {result.stderr}\n{self.diagnosis()}")
        return result.stdout

    def pods(self, component: str, node: str = "") -> list[dict[str, Any]]:
        """The running pods of a component, on one node or on all."""
        items = self.cluster.get(
            "pods", namespace=NAMESPACE, selector=f"app.kubernetes.io/component={component}"
        )
        return [
            pod
            for pod in items
            if node in ("", pod["spec"].get("nodeName"))
            and "deletionTimestamp" not in pod["metadata"]
        ]

    def table(self) -> str:
        """Text output of the release's pods."""
        return self.cluster.kubectl("get", "pods", f"--namespace={NAMESPACE}", "--output=wide")

    def diagnosis(self, lines: int = 15) -> str:
        """Diagnostics for a component of the release that does not start.

        `lines`: the last ones of each container's log.
        """
        namespaced = f"--namespace={NAMESPACE}"
        events = self.cluster.kubectl("events", namespaced).splitlines()[-30:]
        logs = self.cluster.kubectl(
            *("logs", namespaced, "--selector=app.kubernetes.io/name=fire-flyer"),
            *("--all-containers", "--prefix", f"--tail={lines}", "--ignore-errors"),
        )
        return "\n".join([self.table(), *events, logs])
