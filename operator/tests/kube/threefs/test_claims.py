"""Claims that cannot be bound: named in the status of a ThreeFSCluster, with a remedy."""

from __future__ import annotations

import pytest
from flyer.api.timestamps import format_timestamp
from flyer.kube.threefs.claims import missing_classes
from flyer.kube.threefs.observed import PendingClaim

from fakekube import Fault

from .conftest import NAMESPACE

pytestmark = pytest.mark.usefixtures("operator")

DEFAULT = {"storageclass.kubernetes.io/is-default-class": "true"}
SLOW = {f"threefs-storage-{ordinal}" for ordinal in range(4)}


def storage_class(kubernetes, name, annotations=None):
    metadata = {"name": name, "annotations": annotations or {}}
    kubernetes.store.create(
        "storageclasses",
        {"apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": metadata,
         "provisioner": "example.com/x"},
    )  # fmt: skip


def claim(kubernetes, pod="threefs-storage-0", storage_class=None, *, labels=None, phase="Pending"):
    kind = pod.rpartition("-")[0]
    name = f"data-{pod}"
    labels = {
        "app.kubernetes.io/instance": "main", "app.kubernetes.io/component": kind, **(labels or {}),
    }  # fmt: skip
    spec = {
        "accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "100Gi"}},
        **({} if storage_class is None else {"storageClassName": storage_class}),
    }  # fmt: skip
    created = kubernetes.store.create(
        "persistentvolumeclaims",
        {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "spec": spec,
         "metadata": {"name": name, "labels": labels}},
        NAMESPACE,
    )  # fmt: skip
    bind(kubernetes, pod, phase)
    return created


def bind(kubernetes, pod, phase="Bound"):
    kubernetes.store.patch(
        "persistentvolumeclaims", f"data-{pod}", {"status": {"phase": phase}}, NAMESPACE, "status"
    )


def event(kubernetes, claim, reason, message, name="e", kind="Warning"):
    now = format_timestamp(kubernetes.store.clock())
    about = {
        "kind": "PersistentVolumeClaim", "namespace": NAMESPACE,
        "name": claim["metadata"]["name"], "uid": claim["metadata"]["uid"],
    }  # fmt: skip
    kubernetes.store.create(
        "events",
        {"apiVersion": "v1", "kind": "Event", "metadata": {"name": name}, "involvedObject": about,
         "reason": reason, "message": message, "type": kind, "lastTimestamp": now,
         "firstTimestamp": now, "count": 1, "source": {"component": "x"}},
        NAMESPACE,
    )  # fmt: skip


async def looked(kubernetes, until):
    looks = len(kubernetes.asked)
    await until(lambda: len(kubernetes.asked) > looks + 3)


async def test_a_missing_class_is_named_until_it_exists(kubernetes, until):
    kubernetes.slow = set(SLOW)
    for ordinal in range(4):
        claim(kubernetes, f"threefs-storage-{ordinal}", "fast")
    kubernetes.create(storage={"replicas": 4, "volume": {"storageClass": "fast", "size": "100Gi"}})
    await until(lambda: kubernetes.condition("Progressing").get("reason") == "StorageClassMissing")
    await until(
        lambda: kubernetes.condition("Progressing")["message"] == (
            "StorageClass fast does not exist: claim data-threefs-storage-0 and 3 more cannot be "
            "bound; create it, or delete the ThreeFSCluster and its claims, and create it with "
            "another StorageClass"
        )
    )  # fmt: skip
    assert kubernetes.condition("Progressing")["status"] == "False"
    assert kubernetes.status()["phase"] == "Blocked"
    storage_class(kubernetes, "fast")
    await until(lambda: kubernetes.condition("Progressing").get("reason") == "Creating")
    assert kubernetes.status()["phase"] != "Blocked"
    for ordinal in range(4):
        bind(kubernetes, f"threefs-storage-{ordinal}")
        kubernetes.become_ready(f"threefs-storage-{ordinal}")
    await until(lambda: kubernetes.status()["phase"] == "Ready")


async def test_no_default_class_is_named(kubernetes, until):
    storage_class(kubernetes, "other")
    kubernetes.slow = set(SLOW)
    claim(kubernetes)
    kubernetes.create()
    await until(
        lambda: kubernetes.condition("Progressing").get("message", "").startswith(
            "no StorageClass is the default one: claim data-threefs-storage-0 cannot be bound; "
            "mark one as default, or "
        )
    )  # fmt: skip
    storage_class(kubernetes, "standard", DEFAULT)
    await until(lambda: kubernetes.condition("Progressing")["reason"] == "Creating")


async def test_a_claim_is_pending_for_the_reason_of_its_newest_event(kubernetes, until):
    storage_class(kubernetes, "fast")
    kubernetes.slow = set(SLOW)
    pending = claim(kubernetes, storage_class="fast")
    event(kubernetes, pending, "Provisioning", "normal progress", "a", "Normal")
    event(kubernetes, pending, "ProvisioningFailed", "no space\n on\tany node " + "x" * 1000, "b")
    kubernetes.create()
    words = "claim data-threefs-storage-0 is not bound: ProvisioningFailed: no space on any node xx"
    await until(lambda: words in kubernetes.condition("Degraded").get("message", ""))
    await until(lambda: words in kubernetes.condition("Progressing").get("message", ""))
    progressing = kubernetes.condition("Progressing")
    assert (progressing["status"], progressing["reason"]) == ("True", "Creating")
    assert "normal progress" not in progressing["message"]
    assert len(progressing["message"]) < 600


async def test_a_claim_without_a_class_is_pending_for_its_reason(kubernetes, until):
    kubernetes.slow = set(SLOW)
    pending = claim(kubernetes, storage_class="")
    event(kubernetes, pending, "FailedBinding", "no volumes available", "a", "Normal")
    kubernetes.create()
    words = "claim data-threefs-storage-0 is not bound: FailedBinding: no volumes available"
    await until(lambda: words in kubernetes.condition("Degraded").get("message", ""))
    assert kubernetes.condition("Progressing")["reason"] == "Creating"


async def test_claims_of_others_block_nothing(kubernetes, until):
    """Any user of the namespace can create claims with the labels of the cluster."""
    kubernetes.create()
    await until(lambda: kubernetes.status().get("phase") == "Ready")
    for name in ("storage-9", "storage-0-x", "meta-0", "x-storage-0"):
        claim(kubernetes, f"threefs-{name}", "none")
    bound = claim(kubernetes, "threefs-storage-0", "none", phase="Bound")
    event(kubernetes, bound, "ProvisioningFailed", "earlier")
    await looked(kubernetes, until)
    assert kubernetes.status()["phase"] == "Ready"
    assert kubernetes.condition("Degraded")["status"] == "False"


async def test_a_server_that_refuses_reads_of_classes_and_events_stops_no_step(
    kubernetes, until, api_server
):
    for resource in ("storageclasses", "events"):
        api_server.faults.add(
            Fault("refuse", verb="list", resource=resource, code=403, reason="Forbidden",
                  times=1_000_000)
        )  # fmt: skip
    kubernetes.slow = set(SLOW)
    claim(kubernetes, storage_class="none")
    kubernetes.create()
    await until(lambda: kubernetes.condition("Progressing").get("reason") == "Creating")
    await looked(kubernetes, until)
    assert kubernetes.condition("Progressing")["message"] == "waiting for all pods to be ready"


def test_the_claims_of_a_cluster_that_has_served_are_not_to_be_deleted():
    claims = [PendingClaim("data-threefs-storage-4", "u", "fast", class_missing=True)]
    assert "delete" in missing_classes(claims, created=False)
    assert missing_classes(claims, created=True) == (
        "StorageClass fast does not exist: claim data-threefs-storage-4 cannot be bound; create it"
    )
