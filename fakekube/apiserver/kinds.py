"""The resources that the in-memory API server serves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from flyer.api import GROUP, VERSION


@dataclass(frozen=True, slots=True)
class Kind:
    """One resource: its place in URLs, and its behaviour."""

    plural: str
    kind: str
    group: str = ""
    version: str = "v1"
    namespaced: bool = True
    status: bool = False  # has the status subresource
    generation: bool = False  # metadata.generation counts changes of all but the status

    @property
    def api_version(self) -> str:
        """The `apiVersion` of its objects."""
        return f"{self.group}/{self.version}" if self.group else self.version


def custom(plural: str, kind: str, *, namespaced: bool = False) -> Kind:
    """A resource of Fire-Flyer."""
    return Kind(plural, kind, GROUP, VERSION, namespaced, status=True, generation=True)


KINDS: Final = (
    Kind("namespaces", "Namespace", namespaced=False, status=True),
    Kind("nodes", "Node", namespaced=False, status=True),
    Kind("persistentvolumes", "PersistentVolume", namespaced=False, status=True),
    Kind("pods", "Pod", status=True),
    Kind("services", "Service", status=True),
    Kind("events", "Event"),
    Kind("secrets", "Secret"),
    Kind("configmaps", "ConfigMap"),
    Kind("serviceaccounts", "ServiceAccount"),
    Kind("persistentvolumeclaims", "PersistentVolumeClaim", status=True),
    Kind("events", "Event", "events.k8s.io"),
    Kind("leases", "Lease", "coordination.k8s.io"),
    Kind("priorityclasses", "PriorityClass", "scheduling.k8s.io", namespaced=False),
    Kind("storageclasses", "StorageClass", "storage.k8s.io", namespaced=False),
    Kind("jobs", "Job", "batch", status=True, generation=True),
    Kind("deployments", "Deployment", "apps", status=True, generation=True),
    Kind("statefulsets", "StatefulSet", "apps", status=True, generation=True),
    Kind("daemonsets", "DaemonSet", "apps", status=True, generation=True),
    Kind(
        "customresourcedefinitions", "CustomResourceDefinition", "apiextensions.k8s.io",
        namespaced=False, status=True, generation=True,
    ),
    Kind(
        "mutatingwebhookconfigurations", "MutatingWebhookConfiguration",
        "admissionregistration.k8s.io", namespaced=False, generation=True,
    ),
    custom("flyerjobs", "FlyerJob", namespaced=True),
    custom("flyerquotas", "FlyerQuota"),
    custom("flyertopologies", "FlyerTopology"),
    custom("nodehealths", "NodeHealth"),
    custom("threefsclusters", "ThreeFSCluster", namespaced=True),
    Kind("poddisruptionbudgets", "PodDisruptionBudget", "policy", status=True, generation=True),
)  # fmt: skip

__all__ = ["KINDS", "Kind", "custom"]
