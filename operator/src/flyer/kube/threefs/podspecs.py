"""Pod templates of the services of a ThreeFSCluster: the chart's pods. Pure.

`charts/tests/test_cluster_pods.py` compares them with the templates that the chart renders.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from flyer.kube.threefs.names import (
    PORTS,
    addresses,
    claim_name,
    component,
    labels,
    selector,
)
from flyer.kube.threefs.stores import shared_store, store_mounts, store_values, store_volumes

if TYPE_CHECKING:
    from flyer.api import ThreeFSCluster
    from flyer.api.threefscluster import Placement
    from flyer.kube.threefs.settings import ClusterSettings

__all__ = ["CLUSTER_MOUNTS", "NODE_FAILURE_SECONDS", "container", "pod_template", "shared_volumes"]

Object = dict[str, Any]

NODE_FAILURE_SECONDS: Final = 10
"""Silence after which mgmtd counts a storage service as dead."""
_RESTRICTED: Final = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
_RESTRICTED_POD: Final = {
    "runAsNonRoot": True,
    "runAsUser": 65532,
    "runAsGroup": 65532,
    "fsGroup": 65532,
    "fsGroupChangePolicy": "OnRootMismatch",
    "seccompProfile": {"type": "RuntimeDefault"},
}
_METRICS_RESOURCES: Final = {
    "requests": {"cpu": "10m", "memory": "48Mi"}, "limits": {"memory": "128Mi"},
}  # fmt: skip
CLUSTER_MOUNTS: Final = (
    {"name": "cluster", "mountPath": "/etc/threefs", "readOnly": True},
    {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 - in the container
)


def pod_template(cluster: ThreeFSCluster, kind: str, settings: ClusterSettings) -> Object:
    """The pod template of a service."""
    spec = cluster.spec
    placement: Placement = getattr(spec, kind)
    containers = [_service(cluster, kind, settings)]
    if kind == "mgmtd":
        containers.append(_exporter(cluster, settings))
    store = shared_store(cluster, kind)
    pod: Object = {
        "serviceAccountName": "threefs",
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 30,
        **pod_basics(cluster, placement),
        "affinity": {"podAntiAffinity": _apart(cluster, kind)},
        "containers": containers,
        "volumes": [*shared_volumes(cluster), *store_volumes(store)],
    }
    return {"metadata": {"labels": labels(cluster, component(kind))}, "spec": pod}


def pod_basics(cluster: ThreeFSCluster, placement: Placement) -> Object:
    """What every pod has: user, placement, priority, credentials of the registry."""
    spec = cluster.spec
    basics: Object = {"securityContext": _RESTRICTED_POD}
    if spec.image_pull_secrets:
        basics["imagePullSecrets"] = [{"name": name} for name in spec.image_pull_secrets]
    if spec.priority_class_name:
        basics["priorityClassName"] = spec.priority_class_name
    if placement.node_selector:
        basics["nodeSelector"] = dict(placement.node_selector)
    if placement.tolerations:
        basics["tolerations"] = [
            {key: value for key, value in toleration.to_object().items() if value}
            for toleration in placement.tolerations
        ]
    return basics


def container(cluster: ThreeFSCluster, name: str, command: list[str]) -> Object:
    """A container of the cluster's image."""
    return {
        "name": name,
        "image": cluster.spec.image,
        "imagePullPolicy": "IfNotPresent",
        "command": command,
        "securityContext": _RESTRICTED,
    }


def shared_volumes(cluster: ThreeFSCluster) -> list[Object]:
    """Addresses and key of the cluster, and a folder for temporary files."""
    key = {"name": cluster.spec.key_secret, "items": [{"key": "key", "path": "key"}]}
    sources = [{"configMap": {"name": "threefs-cluster"}}, {"secret": key}]
    return [
        # Readable by the group of the pod only.
        {"name": "cluster", "projected": {"defaultMode": 0o440, "sources": sources}},
        {"name": "tmp", "emptyDir": {"sizeLimit": "64Mi"}},
    ]


def _service(cluster: ThreeFSCluster, kind: str, settings: ClusterSettings) -> Object:
    port = {"port": kind}
    store = shared_store(cluster, kind)
    data = [] if store else _disk_mounts(cluster, kind)
    return {
        **container(cluster, kind, ["threefs-service", kind]),
        "env": _environment(cluster, kind, settings),
        "ports": [{"name": kind, "containerPort": PORTS[kind]}],
        # Liveness depends only on this port: failures of other services must not restart this one.
        "livenessProbe": {
            "tcpSocket": port, "periodSeconds": 20, "timeoutSeconds": 10, "failureThreshold": 6,
        },
        "readinessProbe": _readiness(kind),
        "startupProbe": {
            "tcpSocket": port, "periodSeconds": 2, "timeoutSeconds": 5,
            "failureThreshold": 300,
        },
        "resources": _resources(getattr(cluster.spec, kind).resources.to_object()),
        "volumeMounts": [
            *data,
            *store_mounts(store),
            *CLUSTER_MOUNTS,
        ],
    }  # fmt: skip


def _disk_mounts(cluster: ThreeFSCluster, kind: str) -> list[Object]:
    paths = ["/data", *(_further_disks(cluster) if kind == "storage" else [])]
    return [
        {"name": claim_name(disk), "mountPath": path} for disk, path in enumerate(paths)
    ]  # fmt: skip


def _further_disks(cluster: ThreeFSCluster) -> list[str]:
    """Paths of the disks of a storage service after the first."""
    return [f"/disks/{disk}" for disk in range(1, cluster.spec.storage.disks)]


def _readiness(kind: str) -> Object:
    if kind == "mgmtd":
        return {"tcpSocket": {"port": kind}, "periodSeconds": 10, "timeoutSeconds": 5}
    # It starts a process, so the period and the timeout are long.
    command = ["threefs-service", "check", kind, "--ready"]
    return {"exec": {"command": command}, "periodSeconds": 15, "timeoutSeconds": 30}


def _exporter(cluster: ThreeFSCluster, settings: ClusterSettings) -> Object:
    return {
        **container(cluster, "metrics", ["python3", "-m", "threefs.exporter"]),
        "env": [
            {"name": "THREEFS_CLUSTER", "value": "/etc/threefs/cluster.json"},
            {"name": "THREEFS_METRICS_PORT", "value": str(settings.metrics_port)},
        ],
        "ports": [{"name": "metrics", "containerPort": settings.metrics_port}],
        "livenessProbe": {
            "httpGet": {"path": "/healthz", "port": "metrics"},
            "periodSeconds": 30, "timeoutSeconds": 10, "failureThreshold": 6,
        },
        "resources": _METRICS_RESOURCES,
        "volumeMounts": list(CLUSTER_MOUNTS),
    }  # fmt: skip


def _environment(cluster: ThreeFSCluster, kind: str, settings: ClusterSettings) -> list[Object]:
    spec = cluster.spec
    values: dict[str, str] = {"THREEFS_LISTEN": f"0.0.0.0:{PORTS[kind]}"}
    if advertise := _advertised(cluster, kind, settings.cluster_domain):
        values["THREEFS_ADVERTISE"] = advertise
    store = shared_store(cluster, kind)
    values |= store_values(store) if store else {"THREEFS_DATA": "/data"}
    values |= {
        "THREEFS_KEY_FILE": "/etc/threefs/key",
        "THREEFS_TLS": str(spec.tls.enabled).lower(),
        "THREEFS_TLS_TRANSITION": str(spec.tls.transition).lower(),
    }
    if kind == "mgmtd":
        values |= {
            "THREEFS_STORAGE_NODES": str(settings.first_storage_nodes or spec.storage.replicas),
            "THREEFS_REPLICAS": str(spec.storage.replication),
            "THREEFS_CHAINS_PER_NODE": str(spec.storage.chains_per_node),
        }
    else:
        values["THREEFS_MGMTD"] = ",".join(addresses(cluster, "mgmtd", settings.cluster_domain))
    if kind == "meta":
        values["THREEFS_CHUNK_SIZE"] = spec.meta.chunk_size
    else:
        values["THREEFS_NODE_FAILURE_MS"] = str(1000 * NODE_FAILURE_SECONDS)
    if kind == "storage":
        values["THREEFS_CAPACITY"] = spec.storage.volume.size
        if further := _further_disks(cluster):
            values["THREEFS_DISKS"] = ":".join(further)
    fields = {"POD_NAME": "metadata.name"}
    if kind == "storage":
        fields["THREEFS_HOST"] = "spec.nodeName"
    # The name of the pod comes first: other variables refer to it.
    return [
        *({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
          for name, path in fields.items()),
        *({"name": name, "value": value} for name, value in values.items()),
    ]  # fmt: skip


def _advertised(cluster: ThreeFSCluster, kind: str, domain: str) -> str:
    """The name of a pod is stable, its address is not."""
    if kind == "meta":
        return ""
    if kind == "mgmtd" and cluster.spec.mgmtd.replicas == 1:
        return addresses(cluster, kind, domain)[0]
    service = f"{component(kind)}.{cluster.metadata.namespace}.svc.{domain}"
    return f"$(POD_NAME).{service}:{PORTS[kind]}"


def _apart(cluster: ThreeFSCluster, kind: str) -> Object:
    term = {
        "topologyKey": "kubernetes.io/hostname",
        "labelSelector": {"matchLabels": selector(cluster, component(kind))},
    }
    if kind == "storage":
        return {"requiredDuringSchedulingIgnoredDuringExecution": [term]}
    preferred = {"weight": 100, "podAffinityTerm": term}
    return {"preferredDuringSchedulingIgnoredDuringExecution": [preferred]}


def _resources(amounts: Object) -> Object:
    return {key: value for key, value in amounts.items() if value}
