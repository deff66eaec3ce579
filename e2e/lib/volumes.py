"""Claims of the chart's StorageClass, and pods with them, as manifests."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from threefs.csi.mount_manager.daemon_factory import ticket_folder

from e2e.lib.chart import NAMESPACE
from e2e.lib.pods import sleeper
from testcluster.handle import wait_for

if TYPE_CHECKING:
    from e2e.lib import chart
    from testcluster.handle import Cluster

__all__ = [
    "ENDS",
    "WRITES",
    "claim",
    "condition",
    "directories",
    "inline_pod",
    "pod_with",
    "sh",
    "signal_daemon",
    "wait_event",
]

DRIVER = "3fs.csi.fireflyer.dev"
EVENT_SECONDS = 120.0

ASK = """
import grpc, json, sys
from threefs.csi.proto import csi_pb2 as csi, csi_pb2_grpc as stubs
stub = stubs.NodeStub(grpc.insecure_channel("unix:///csi/csi.sock"))
path = f"/var/lib/kubelet/pods/{sys.argv[2]}/volumes/kubernetes.io~csi/{sys.argv[1]}/mount"
handle = sys.argv[3]
asked = csi.NodeGetVolumeStatsRequest(volume_id=handle, volume_path=path)
condition = stub.NodeGetVolumeStats(asked, timeout=30).volume_condition
print(json.dumps([condition.abnormal, condition.message]))
"""

# Each line must be stored before the next; whatever fails leaves a gap.
WRITES = """nohup sh -c 'n=0; while [ ! -e /volume/stop ]; do
echo $n >> /volume/lines; sync /volume/lines; n=$((n+1)); sleep 0.1
done; touch /volume/stopped' > /dev/null 2>&1 &"""
ENDS = "touch /volume/stop; while [ ! -e /volume/stopped ]; do sleep 1; done"


def claim(name: str, size: str, mode: str = "ReadWriteMany") -> dict[str, Any]:
    """A claim; as it is, pods on all nodes may write it."""
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name},
        "spec": {
            "storageClassName": "threefs",
            "accessModes": [mode],
            "resources": {"requests": {"storage": size}},
        },
    }


def pod_with(name: str, node: str, claim_name: str, *, read_only: bool = False) -> dict[str, Any]:
    """A pod that does nothing, with this claim at /volume.

    The scheduler puts it on the node, and waits for the claim first; a kubelet that is given a pod
    before its claim is bound looks again only ten seconds later.
    """
    pod = sleeper(name, "", nodeSelector={"kubernetes.io/hostname": node})
    del pod["spec"]["nodeName"]
    claimed = {"claimName": claim_name, **({"readOnly": True} if read_only else {})}
    return _mounted(pod, {"persistentVolumeClaim": claimed})


def inline_pod(name: str, node: str, *, read_only: bool = False, **attributes: str) -> Any:
    """A pod that does nothing, with an inline volume at /volume."""
    own = {"driver": DRIVER, "readOnly": read_only, "volumeAttributes": attributes}
    return _mounted(sleeper(name, node), {"csi": own})


def _mounted(pod: dict[str, Any], source: dict[str, Any]) -> dict[str, Any]:
    pod["spec"]["volumes"] = [{"name": "volume", **source}]
    pod["spec"]["containers"][0]["volumeMounts"] = [{"name": "volume", "mountPath": "/volume"}]
    return pod


def directories(cluster: Cluster, path: str = "/volumes") -> str:
    """Directory listing of 3FS, run in the controller: nodes have tickets only for volumes."""
    return cluster.kubectl(
        "exec", f"--namespace={NAMESPACE}", "deployment/threefs-csi-controller", "--",
        "threefs", "ls", "--cluster=/etc/threefs/clusters/default", path,
    )  # fmt: skip


def wait_event(cluster: Cluster, namespace: str, target: str, words: str) -> None:
    """Waits until an event of this object (`pod/NAME`) contains this text."""

    def reported() -> bool:
        events = cluster.kubectl("events", f"--namespace={namespace}", f"--for={target}")
        return words in events

    wait_for(f"{target}: {words!r}", reported, EVENT_SECONDS)


def sh(cluster: Cluster, namespace: str, pod: str, command: str) -> str:
    """The output of a command in a pod."""
    words = ("--", "sh", "-c", command)
    return cluster.kubectl("exec", f"--namespace={namespace}", pod, *words)


def condition(release: chart.Release, namespace: str, pod: str, claim: str) -> tuple[bool, str]:
    """The condition of a pod's volume, as its node reports it to the kubelet: abnormal, and why."""
    cluster = release.cluster
    where = cluster.get("pod", pod, namespace)
    volume, handle = _volume_of(cluster, namespace, claim)
    (driver,) = release.pods("csi-node", where["spec"]["nodeName"])
    words = ("--container=driver", "--", "python3", "-c", ASK)
    text = cluster.kubectl(
        *("exec", f"--namespace={NAMESPACE}", driver["metadata"]["name"], *words),
        *(volume, where["metadata"]["uid"], handle),
    )
    abnormal, message = json.loads(text)
    return bool(abnormal), str(message)


def signal_daemon(
    release: chart.Release, namespace: str, claim: str, node: str, signal: str
) -> None:
    """Send a signal to the FUSE daemon of a claim on a node; its ticket is on its command line."""
    _, handle = _volume_of(release.cluster, namespace, claim)
    (manager,) = release.pods("csi-mount-manager", node)
    release.cluster.kubectl(
        *("exec", f"--namespace={NAMESPACE}", manager["metadata"]["name"], "--"),
        *("pkill", f"-{signal}", "-f", f"fuse.*{ticket_folder(handle)}"),
    )


def _volume_of(cluster: Cluster, namespace: str, claim: str) -> tuple[str, str]:
    """The PersistentVolume of a claim, and the driver's handle of it."""
    name: str = cluster.get("pvc", claim, namespace)["spec"]["volumeName"]
    handle: str = cluster.get("pv", name)["spec"]["csi"]["volumeHandle"]
    return name, handle
