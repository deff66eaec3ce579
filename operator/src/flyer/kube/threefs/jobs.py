"""Jobs that drain storage services, and that cancel a drain. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from flyer.kube.threefs.names import COMPONENT_DRAIN, NODES_ANNOTATION, labels
from flyer.kube.threefs.objects import metadata
from flyer.kube.threefs.podspecs import (
    CLUSTER_MOUNTS,
    container,
    pod_basics,
    shared_volumes,
)

if TYPE_CHECKING:
    from collections.abc import Collection

    from flyer.api import ThreeFSCluster

__all__ = ["DRAIN_JOB", "KEEP_JOB", "drain_job"]

DRAIN_JOB: Final = "threefs-drain"
KEEP_JOB: Final = "threefs-drain-cancel"
_DEADLINE_SECONDS: Final = 7 * 24 * 3600
"""A drain that makes progress may take days; one without progress ends after ten minutes."""
_RESOURCES: Final = {"requests": {"cpu": "10m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}}


def drain_job(cluster: ThreeFSCluster, nodes: Collection[int], *, cancel: bool) -> dict[str, Any]:
    """The Job. It ends with success once the services are empty, or kept; it is not repeated."""
    numbers = [str(node) for node in sorted(nodes)]
    # Of a service with one disk, earlier images know the number only.
    several = cluster.spec.storage.disks > 1
    names = [f"service-{number}" for number in numbers] if several else numbers
    command = ["threefs", "drain", *(["--cancel"] if cancel else []), *names, "--apply"]
    meta = metadata(cluster, KEEP_JOB if cancel else DRAIN_JOB, COMPONENT_DRAIN)
    meta["annotations"] = {NODES_ANNOTATION: ",".join(numbers)}
    pod = {
        "serviceAccountName": "threefs",
        "automountServiceAccountToken": False,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 10,
        **pod_basics(cluster, cluster.spec.mgmtd),
        "containers": [
            {
                **container(cluster, "drain", [*command, "--cluster", "/etc/threefs/cluster.json"]),
                "terminationMessagePolicy": "FallbackToLogsOnError",
                "resources": _RESOURCES,
                "volumeMounts": list(CLUSTER_MOUNTS),
            }
        ],
        "volumes": shared_volumes(cluster),
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": meta,
        "spec": {
            "backoffLimit": 0,
            "activeDeadlineSeconds": _DEADLINE_SECONDS,
            "template": {
                "metadata": {"labels": labels(cluster, COMPONENT_DRAIN)}, "spec": pod,
            },
        },
    }  # fmt: skip
