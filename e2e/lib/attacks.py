"""Attacker of the hostile namespace scenario: its user, pods and manifests."""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from e2e.lib import volumes
from e2e.lib.chart import NAMESPACE
from e2e.lib.jobs import END_SECONDS
from e2e.lib.pods import TRAIN_IMAGE, sleeper
from e2e.lib.victim import NAME
from e2e.workloads import hostile

if TYPE_CHECKING:
    from e2e.lib import chart
    from e2e.lib.users import User
    from e2e.lib.victim import Victim
    from testcluster.handle import Cluster

ATTACK = Path(hostile.__file__).read_text()
SHARED = "node-s1"
DEDICATED = "node-b2"
SLEEPS = "import time\ntime.sleep(3600)"
JOB_LABELS = {"fireflyer.dev/job": NAME, "fireflyer.dev/attempt": "1"}
ROOT: dict[str, Any] = {"runAsUser": 0}
RESTRICTED: dict[str, Any] = {
    "runAsUser": 1000,
    "runAsNonRoot": True,
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}


SUMS = """
import json, os, pathlib, time, torch, torch.distributed as dist, flyer.job
job = flyer.job.current()
dist.init_process_group("hfreduce")
numbers = torch.ones(1 << 10)
dist.all_reduce(numbers)
key = pathlib.Path(os.environ["HFREDUCE_KEY_FILE"]).read_bytes().hex()
where = {"address": os.environ["MASTER_ADDR"], "port": os.environ["MASTER_PORT"], "key": key}
print("store", json.dumps(where), flush=True)
while True:
    dist.all_reduce(numbers)
    numbers /= dist.get_world_size()
    time.sleep(0.1)
"""
READ = """
import datetime, json, sys
from torch.distributed import TCPStore
wait = datetime.timedelta(seconds=30)
store = TCPStore(
    sys.argv[1], int(sys.argv[2]), is_master=False, wait_for_workers=False, timeout=wait
)
print(json.dumps({key: store.get(key).hex() for key in store.list_keys()}))
"""


@dataclass(frozen=True)
class Scene:
    """The two tenants."""

    release: chart.Release
    user: User
    victim: Victim

    @property
    def cluster(self) -> Cluster:
        """The cluster of the release."""
        return self.release.cluster

    def run(self, pod: str, *arguments: str) -> Any:
        """Runs a program of `hostile` in an attacker's pod and returns its JSON output."""
        words = ("exec", pod, "--", "python3", "-c", ATTACK, *arguments)
        return json.loads(self.user.kubectl(*words, deadline_s=END_SECONDS))

    def ready(self, *pods: str) -> None:
        """Wait for pods of the attacker."""
        self.cluster.wait_ready(*pods, namespace=self.user.namespace, deadline_s=END_SECONDS)

    def delete(self, kind: str, *names: str) -> None:
        """Delete objects of the attacker, and wait for their end."""
        self.user.kubectl("delete", kind, *(names or ("--all",)), deadline_s=END_SECONDS)


def attacker_pod(name: str, *command: str, **spec: Any) -> dict[str, Any]:
    """A pod that the scheduler places: without tolerations, on the shared node."""
    pod = sleeper(name, "")
    del pod["spec"]["nodeName"], pod["spec"]["tolerations"]
    pod["spec"] |= spec
    pod["spec"]["containers"][0]["command"] = list(command)
    return pod


def attack_pod(name: str, *arguments: str) -> dict[str, Any]:
    """A pod that runs a program of `hostile`."""
    return attacker_pod(name, "python3", "-c", ATTACK, *arguments)


def with_claim(name: str, claim_name: str, security: dict[str, Any]) -> dict[str, Any]:
    """A pod with this claim at /volume."""
    pod = volumes.pod_with(name, SHARED, claim_name)
    del pod["spec"]["tolerations"]
    pod["spec"]["containers"][0]["securityContext"] = security
    return pod


def inline_pod(name: str, **attributes: str) -> dict[str, Any]:
    """A pod that the scheduler places, with an inline volume named `volume`."""
    pod: dict[str, Any] = volumes.inline_pod(name, SHARED, **attributes)  # type: ignore[arg-type]
    del pod["spec"]["nodeName"], pod["spec"]["tolerations"]
    return pod


def inline_folder(uid: str) -> str:
    """The folder that an inline volume named `volume` of the pod with this uid would have."""
    handle = f"csi-{sha256(f'{uid}volume'.encode()).hexdigest()}"
    return f"sha256-{sha256(handle.encode()).hexdigest()[:40]}"


def daemonset(name: str, labels: dict[str, str], spec: dict[str, Any]) -> dict[str, Any]:
    """A DaemonSet of sleeping pods."""
    selector = {"daemonset": name}
    container = {"name": "main", "image": TRAIN_IMAGE, "command": ["sleep", "infinity"]}
    template = {
        "metadata": {"labels": {**selector, **labels}},
        "spec": {"containers": [container], **spec},
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": name},
        "spec": {"selector": {"matchLabels": selector}, "template": template},
    }


def malformed() -> dict[str, dict[str, Any]]:
    """Pod templates that are wrong in one place each."""
    container = {"name": "train", "image": TRAIN_IMAGE, "command": ["sleep", "3600"]}
    hidden = {"driver": volumes.DRIVER, "volumeAttributes": {"path": "/volumes"}}
    return {
        "no-containers": {"spec": {}},
        "unknown-field": {"spec": {"containers": [{**container, "comand": ["x"]}]}},
        "wrong-type": {"spec": {"containers": [{**container, "env": "PATH=/"}]}},
        "deep": {"spec": {"containers": [{**container, "lifecycle": {"a": {"b": [{}] * 9}}}]}},
        "node-name": {"spec": {"nodeName": DEDICATED, "containers": [container]}},
        "scheduler": {"spec": {"schedulerName": "none", "containers": [container]}},
        "labels": {"metadata": {"labels": JOB_LABELS}, "spec": {"containers": [container]}},
        "negative": {
            "spec": {"containers": [{**container, "resources": {"requests": {"cpu": "-1"}}}]}
        },
        "sidecar": {"spec": {"containers": [container, {**container, "name": "flyer-sidecar"}]}},
        "inline": {"spec": {"containers": [container], "volumes": [{"name": "x", "csi": hidden}]}},
        "host": {"spec": {"containers": [{**container, "securityContext": {"privileged": True}}]}},
    }


def gateway_address(scene: Scene) -> str:
    """The address of the Service, which leads to the leading replica."""
    return str(scene.cluster.get("service", "flyer-gateway", NAMESPACE)["spec"]["clusterIP"])


def ports_of_the_release(scene: Scene) -> list[str]:
    """Every port that a pod of the suite opens, as HOST:PORT."""
    return [
        f"{pod['status']['podIP']}:{port['containerPort']}"
        for pod in scene.cluster.get("pods", namespace=NAMESPACE)
        if pod["status"].get("podIP")
        for container in pod["spec"]["containers"] + pod["spec"].get("initContainers", [])
        for port in container.get("ports", ())
    ]
