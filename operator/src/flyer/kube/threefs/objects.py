"""Objects of a ThreeFSCluster, and how they are written over stored ones. Pure."""

from __future__ import annotations

import copy
import hashlib
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from flyer.api import API_VERSION
from flyer.api.names import KIND_THREEFS
from flyer.api.threefscluster import DeletionPolicy
from flyer.kube.threefs.names import (
    DIGEST_ANNOTATION,
    KINDS,
    PORTS,
    addresses,
    claim_name,
    component,
    labels,
    replicas_of,
    selector,
)
from flyer.kube.threefs.podspecs import pod_template

if TYPE_CHECKING:
    from flyer.api import ThreeFSCluster
    from flyer.kube.threefs.health import Health
    from flyer.kube.threefs.settings import ClusterSettings

__all__ = [
    "FIRST_SIZE_ANNOTATION",
    "conflict",
    "digest_of",
    "first_size",
    "metadata",
    "small_objects",
    "stateful_set",
    "written",
]

Object = dict[str, Any]

FIRST_SIZE_ANNOTATION: Final = "fireflyer.dev/first-storage-nodes"
# Fields of a StatefulSet that can change.
_MUTABLE: Final = (
    "replicas", "template", "updateStrategy", "persistentVolumeClaimRetentionPolicy",
)  # fmt: skip


def metadata(cluster: ThreeFSCluster, name: str, component_name: str) -> Object:
    """Metadata of an object that the cluster owns."""
    owner = {
        "apiVersion": API_VERSION,
        "kind": KIND_THREEFS,
        "name": cluster.metadata.name,
        "uid": cluster.metadata.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
    return {
        "name": name,
        "namespace": cluster.metadata.namespace,
        "labels": labels(cluster, component_name),
        "ownerReferences": [owner],
    }


def small_objects(cluster: ThreeFSCluster, settings: ClusterSettings) -> list[Object]:
    """Service account, addresses for clients, Services and the disruption budget."""
    return [
        {
            "apiVersion": "v1", "kind": "ServiceAccount",
            "metadata": metadata(cluster, "threefs", "threefs"),
            "automountServiceAccountToken": False,
        },
        {
            "apiVersion": "v1", "kind": "ConfigMap",
            "metadata": metadata(cluster, "threefs-cluster", "threefs"),
            "data": {"cluster.json": _cluster_file(cluster, settings)},
        },
        *(_service(cluster, kind) for kind in KINDS),
        {
            "apiVersion": "policy/v1", "kind": "PodDisruptionBudget",
            "metadata": metadata(cluster, component("storage"), component("storage")),
            "spec": {
                "maxUnavailable": 1,
                "unhealthyPodEvictionPolicy": "AlwaysAllow",
                "selector": {"matchLabels": selector(cluster, component("storage"))},
            },
        },
    ]  # fmt: skip


def _cluster_file(cluster: ThreeFSCluster, settings: ClusterSettings) -> str:
    mgmtd, meta = (addresses(cluster, kind, settings.cluster_domain) for kind in ("mgmtd", "meta"))
    value = {
        "version": 1,
        "mgmtd": mgmtd,
        "meta": meta[0] if len(meta) == 1 else meta,
        "key_file": "key",
        "tls": cluster.spec.tls.enabled,
    }
    return json.dumps(value) + "\n"


def _service(cluster: ThreeFSCluster, kind: str) -> Object:
    name = component(kind)
    port = {"name": kind, "port": PORTS[kind], "targetPort": kind, "protocol": "TCP"}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(cluster, name, name),
        "spec": {
            "clusterIP": "None",
            # A service must find its peers before it can be ready.
            "publishNotReadyAddresses": True,
            "selector": selector(cluster, name),
            "ports": [port],
        },
    }


def stateful_set(
    cluster: ThreeFSCluster, kind: str, replicas: int, settings: ClusterSettings
) -> Object:
    """The StatefulSet of a service. The operator replaces its pods, not the StatefulSet."""
    name = component(kind)
    first = settings.first_storage_nodes or cluster.spec.storage.replicas
    deleted = "Delete" if cluster.spec.deletion_policy is DeletionPolicy.DELETE else "Retain"
    value: Object = {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": metadata(cluster, name, name),
        "spec": {
            "serviceName": name,
            "replicas": replicas,
            "revisionHistoryLimit": 3,
            "podManagementPolicy": "Parallel",
            "updateStrategy": {"type": "OnDelete"},
            "persistentVolumeClaimRetentionPolicy": {
                "whenDeleted": deleted, "whenScaled": "Retain",
            },
            "selector": {"matchLabels": selector(cluster, name)},
            "template": pod_template(
                cluster, kind, replace(settings, first_storage_nodes=first)
            ),
        },
    }  # fmt: skip
    if claims := _claims(cluster, kind):
        value["spec"]["volumeClaimTemplates"] = claims
    value["metadata"]["annotations"] = {FIRST_SIZE_ANNOTATION: str(first)}
    value["metadata"]["annotations"][DIGEST_ANNOTATION] = digest_of(value)
    return value


def _claims(cluster: ThreeFSCluster, kind: str) -> list[Object]:
    embedded, volume = cluster.spec.metadata.embedded, cluster.spec.storage.volume
    disks = 1
    if kind == "storage":
        size, storage_class = volume.size, volume.storage_class
        disks = cluster.spec.storage.disks
    elif embedded is None:
        return []
    else:
        size = embedded.mgmtd_size if kind == "mgmtd" else embedded.meta_size
        storage_class = embedded.storage_class
    spec: Object = {
        "accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": size}},
    }  # fmt: skip
    if storage_class:
        spec["storageClassName"] = storage_class
    return [{"metadata": {"name": claim_name(disk)}, "spec": spec} for disk in range(disks)]


def digest_of(value: Object) -> str:
    """Digest of what the operator sets, without the number of replicas."""
    spec = {key: part for key, part in (value.get("spec") or {}).items() if key != "replicas"}
    owners = [owner["uid"] for owner in value["metadata"]["ownerReferences"]]
    parts = [spec, value.get("data"), value["metadata"]["labels"], owners]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def conflict(cluster: ThreeFSCluster, stored: Object) -> str:
    """Why the stored object cannot become the cluster's; empty: it can, or it is already."""
    of = f"{stored['kind']} {stored['metadata']['name']}"
    for owner in stored["metadata"].get("ownerReferences") or ():
        if owner.get("controller") and owner.get("uid") != cluster.metadata.uid:
            return f"{of} belongs to {owner.get('kind')} {owner.get('name')}"
    if stored["kind"] == "StatefulSet":
        live = (stored["spec"].get("selector") or {}).get("matchLabels") or {}
        if live != selector(cluster, stored["metadata"]["name"]):
            return (
                f"{of} selects {json.dumps(live, sort_keys=True)}, which cannot be changed: delete "
                "it with --cascade=orphan, or give the ThreeFSCluster the name of its instance"
            )
    return ""


def written(stored: Object, wanted: Object) -> Object | None:
    """The stored object with the wanted fields; None: it has them.

    It keeps its resourceVersion, so that the write is a compare-and-swap.
    """
    value = copy.deepcopy(stored)
    meta = value["metadata"]
    for key in ("labels", "annotations"):
        if wanted["metadata"].get(key):
            meta[key] = {**(meta.get(key) or {}), **wanted["metadata"][key]}
    others = [owner for owner in meta.get("ownerReferences") or () if not owner.get("controller")]
    meta["ownerReferences"] = [*others, *wanted["metadata"]["ownerReferences"]]
    if wanted["kind"] == "StatefulSet":
        changes = {key: wanted["spec"][key] for key in _MUTABLE}
        # The API server adds defaults to a template, so the digest decides.
        if (stored["metadata"].get("annotations") or {}).get(DIGEST_ANNOTATION) == wanted[
            "metadata"
        ]["annotations"][DIGEST_ANNOTATION]:
            changes = {"replicas": changes["replicas"]}
    else:
        changes = wanted.get("spec") or {}
    if "spec" in wanted:
        value["spec"] = {**(value.get("spec") or {}), **changes}
    if "data" in wanted:
        value["data"] = wanted["data"]
    return None if value == stored else value


def first_size(stored: Object | None, cluster: ThreeFSCluster, health: Health | None) -> int:
    """Storage services at the creation, as the StatefulSet of mgmtd records.

    Fewer if the number was lowered before there were chains: mgmtd would wait for the others.
    """
    annotations = {} if stored is None else stored["metadata"].get("annotations") or {}
    text, now = str(annotations.get(FIRST_SIZE_ANNOTATION, "")), replicas_of(cluster, "storage")
    first = int(text) if text.isdecimal() else now
    return min(first, now) if health is not None and not health.has_chains else first
