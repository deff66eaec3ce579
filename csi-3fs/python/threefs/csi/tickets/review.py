"""Authorization of ticket requests from the state of the API server. Pure.

For a volume that is about to be mounted, two tokens are reviewed. The caller's token proves that it
is a node plugin, and its node. The pod's token, which the kubelet passes only to the driver
(`tokenRequests` of the CSIDriver), identifies the pod. That pod must be on the caller's node and
reference a claim that is bound to a PersistentVolume with this driver and this volume's handle. For
a renewal, the caller presents its ticket instead of the pod's token, and names pods, of which one
must still exist.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "AUDIENCE",
    "PODS_MAX",
    "Claim",
    "ClaimName",
    "Denied",
    "Grant",
    "Kubernetes",
    "PersistentVolume",
    "Pod",
    "PodName",
    "Policy",
    "TokenIdentity",
    "review",
    "review_renewal",
]

AUDIENCE = "3fs"
"""Audience of both tokens; tokens for other audiences are rejected."""
ENDED = ("Succeeded", "Failed")
CLAIMS_MAX = 64
"""Claims checked per pod; each costs two requests to the API server."""
PODS_MAX = 16
"""Pods per renewal request."""


class Denied(Exception):  # noqa: N818 -- it is a reply
    """Why no ticket is issued; contains only data that the caller sent or may read."""


@dataclass(frozen=True, slots=True)
class TokenIdentity:
    """Identity of an accepted token: a service account, and the pod that it is bound to."""

    namespace: str
    account: str
    pod: str
    pod_uid: str


@dataclass(frozen=True, slots=True)
class PodName:
    """Name of a pod in a request."""

    namespace: str
    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class ClaimName:
    """A claim that a pod references; a generic ephemeral one must be owned by the pod."""

    name: str
    ephemeral: bool = False


@dataclass(frozen=True, slots=True)
class Pod:
    """The relevant fields of a pod."""

    uid: str
    node: str
    phase: str
    claims: tuple[ClaimName, ...]


@dataclass(frozen=True, slots=True)
class Claim:
    """Relevant fields of a PersistentVolumeClaim."""

    uid: str
    volume: str
    owner_uid: str


@dataclass(frozen=True, slots=True)
class PersistentVolume:
    """Relevant fields of a PersistentVolume."""

    driver: str
    handle: str
    claim_uid: str
    read_only: bool


@dataclass(frozen=True, slots=True)
class Grant:
    """A ticket may be issued for this node."""

    node: str
    read_only: bool


class Kubernetes(Protocol):
    """The requests to the API server; None if the object does not exist."""

    def token(self, token: str) -> TokenIdentity | None:
        """Return the identity of a token, if it is valid for `AUDIENCE`."""

    def pod(self, namespace: str, name: str) -> Pod | None:
        """Return a pod."""

    def claim(self, namespace: str, name: str) -> Claim | None:
        """Return a claim."""

    def volume(self, name: str) -> PersistentVolume | None:
        """Return a PersistentVolume."""


@dataclass(frozen=True, slots=True)
class Policy:
    """Settings of one installation of the driver."""

    namespace: str
    """Namespace of the driver."""
    node_account: str
    """The service account of the node plugins."""
    driver: str


def review(
    kubernetes: Kubernetes, policy: Policy, volume: str, node_token: str, pod_token: str
) -> Grant:
    """Allow a ticket for a volume that a pod mounts, or raise `Denied`."""
    node = _node_of(kubernetes, policy, node_token)
    reviewed, pod = _pod_of(kubernetes, pod_token, "the pod's token")
    pod_name = PodName(reviewed.namespace, reviewed.pod, reviewed.pod_uid)
    return _mounted(kubernetes, policy, volume, node, pod_name, pod)


def review_renewal(
    kubernetes: Kubernetes,
    policy: Policy,
    volume: str,
    node_token: str,
    ticket_node: str,
    pods: Sequence[PodName],
) -> Grant:
    """Allow a new ticket in place of a genuine one for the same volume, or raise `Denied`."""
    node = _node_of(kubernetes, policy, node_token)
    if ticket_node != node:
        raise Denied("the ticket was issued for another node")
    reason = "the request names no pod"
    for pod_name in pods[:PODS_MAX]:
        pod = kubernetes.pod(pod_name.namespace, pod_name.name)
        if pod is None or pod.uid != pod_name.uid:
            reason = f"pod `{pod_name.name}` no longer exists"
            continue
        try:
            return _mounted(kubernetes, policy, volume, node, pod_name, pod)
        except Denied as denied:
            reason = str(denied)
    raise Denied(reason)


def _mounted(
    kubernetes: Kubernetes, policy: Policy, volume: str, node: str, pod_name: PodName, pod: Pod
) -> Grant:
    """Whether a pod of this node mounts a claim that is bound to the volume."""
    if pod.node != node:
        raise Denied("the pod is not on the node of this node plugin")
    if pod.phase in ENDED:
        raise Denied(f"the pod has ended ({pod.phase})")
    for reference in pod.claims[:CLAIMS_MAX]:
        claim = kubernetes.claim(pod_name.namespace, reference.name)
        if claim is None or not claim.volume:
            continue
        if reference.ephemeral and claim.owner_uid != pod_name.uid:
            continue
        bound_volume = kubernetes.volume(claim.volume)
        # Both must agree: a volume that references another claim is not bound to this one.
        if bound_volume is None or bound_volume.claim_uid != claim.uid:
            continue
        if (bound_volume.driver, bound_volume.handle) == (policy.driver, volume):
            return Grant(node, bound_volume.read_only)
    raise Denied(f"pod `{pod_name.name}` mounts no claim that is bound to volume `{volume}`")


def _node_of(kubernetes: Kubernetes, policy: Policy, token: str) -> str:
    reviewed, pod = _pod_of(kubernetes, token, "the node plugin's token")
    if (reviewed.namespace, reviewed.account) != (policy.namespace, policy.node_account):
        raise Denied(
            f"service account {reviewed.namespace}/{reviewed.account} is not the node plugin's "
            f"({policy.namespace}/{policy.node_account})"
        )
    return pod.node


def _pod_of(kubernetes: Kubernetes, token: str, token_name: str) -> tuple[TokenIdentity, Pod]:
    reviewed = kubernetes.token(token)
    if reviewed is None:
        raise Denied(f"{token_name} is not valid for audience `{AUDIENCE}`")
    if not reviewed.pod or not reviewed.pod_uid:
        raise Denied(f"{token_name} is not bound to a pod")
    pod = kubernetes.pod(reviewed.namespace, reviewed.pod)
    if pod is None or pod.uid != reviewed.pod_uid:
        raise Denied(f"the pod of {token_name} does not exist")
    if not pod.node:
        raise Denied(f"the pod of {token_name} is not assigned to a node")
    return reviewed, pod
