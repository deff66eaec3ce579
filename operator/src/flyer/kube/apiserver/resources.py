"""The resources that the operator reads or writes, and their URL paths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from urllib.parse import quote

from flyer.api import GROUP, VERSION
from flyer.kube.apiserver.errors import NotFoundError

__all__ = [
    "BUDGETS",
    "CLAIMS",
    "CONFIGMAPS",
    "EVENTS",
    "FLYERJOBS",
    "FLYERQUOTAS",
    "FLYERTOPOLOGIES",
    "JOBS",
    "JOB_EVENTS",
    "LEASES",
    "NAMESPACES",
    "NODEHEALTHS",
    "NODES",
    "PODS",
    "SECRETS",
    "SERVICEACCOUNTS",
    "SERVICES",
    "STATEFULSETS",
    "STORAGECLASSES",
    "THREEFSCLUSTERS",
    "TOKENREVIEWS",
    "WEBHOOKS",
    "Resource",
]

_NAME_CHARS_MAX: Final = 100  # in an error


@dataclass(frozen=True, slots=True)
class Resource:
    """One resource of the API."""

    group: str
    version: str
    plural: str
    namespaced: bool = True

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """The URL's path of a collection, an object or a subresource; "": all namespaces.

        Names may be user input, such as a volume's claimName. A name that would change the path
        raises `NotFoundError`.
        """
        for part in (namespace, name):
            if part in (".", "..") or "/" in part or "%" in part:
                raise NotFoundError(
                    f"{self.plural} {part[:_NAME_CHARS_MAX]!r}",
                    "invalid name: must not be . or .., nor contain / or %",
                )
        parts = ["/apis", self.group, self.version] if self.group else ["/api", self.version]
        if namespace and self.namespaced:
            parts += ["namespaces", quote(namespace)]
        parts += [part for part in (self.plural, quote(name, safe=":"), subresource) if part]
        return "/".join(parts)


PODS: Final = Resource("", "v1", "pods")
NODES: Final = Resource("", "v1", "nodes", namespaced=False)
NAMESPACES: Final = Resource("", "v1", "namespaces", namespaced=False)
SECRETS: Final = Resource("", "v1", "secrets")
EVENTS: Final = Resource("", "v1", "events")
JOB_EVENTS: Final = Resource("events.k8s.io", "v1", "events")
"""The same objects as EVENTS, in the form with series and reporting controller."""
CLAIMS: Final = Resource("", "v1", "persistentvolumeclaims")
STORAGECLASSES: Final = Resource("storage.k8s.io", "v1", "storageclasses", namespaced=False)
LEASES: Final = Resource("coordination.k8s.io", "v1", "leases")
TOKENREVIEWS: Final = Resource("authentication.k8s.io", "v1", "tokenreviews", namespaced=False)
WEBHOOKS: Final = Resource(
    "admissionregistration.k8s.io", "v1", "mutatingwebhookconfigurations", namespaced=False
)
FLYERJOBS: Final = Resource(GROUP, VERSION, "flyerjobs")
FLYERQUOTAS: Final = Resource(GROUP, VERSION, "flyerquotas", namespaced=False)
FLYERTOPOLOGIES: Final = Resource(GROUP, VERSION, "flyertopologies", namespaced=False)
THREEFSCLUSTERS: Final = Resource(GROUP, VERSION, "threefsclusters")
STATEFULSETS: Final = Resource("apps", "v1", "statefulsets")
JOBS: Final = Resource("batch", "v1", "jobs")
SERVICES: Final = Resource("", "v1", "services")
CONFIGMAPS: Final = Resource("", "v1", "configmaps")
SERVICEACCOUNTS: Final = Resource("", "v1", "serviceaccounts")
BUDGETS: Final = Resource("policy", "v1", "poddisruptionbudgets")
NODEHEALTHS: Final = Resource(GROUP, VERSION, "nodehealths", namespaced=False)
