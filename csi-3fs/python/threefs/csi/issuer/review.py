"""Who may have a ticket for a volume: decided from what the API server says. Pure.

For a volume that is about to be mounted two tokens are reviewed. The caller's shows that it is a
node plugin, and its pod's node. The pod's, which the kubelet gives to the driver alone
(`tokenRequests` of the CSIDriver), shows which pod the volume is for. That pod must be on the
caller's node and name a claim that is bound to a PersistentVolume with this driver and this
volume's handle. To renew, the caller shows the ticket that it has in place of the pod's token, and
names pods, of which one must still be there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "AUDIENCE",
    "PODS_MAX",
    "Allowed",
    "Claim",
    "ClaimName",
    "Denied",
    "Kubernetes",
    "PersistentVolume",
    "Pod",
    "PodName",
    "Policy",
    "Reviewed",
    "review",
    "review_renewal",
]

AUDIENCE = "3fs"
"""Of both tokens: no token that was made for something else is accepted here."""
ENDED = ("Succeeded", "Failed")
CLAIMS_MAX = 64
"""Of one pod; each costs two requests to the API server."""
PODS_MAX = 16
"""That one renewal may name."""


class Denied(Exception):  # noqa: N818 -- it is an answer
    """Why no ticket is issued; without anything that the caller did not say or may not know."""


@dataclass(frozen=True, slots=True)
class Reviewed:
    """Whom an accepted token stands for: a service account, and the pod that it is bound to."""

    namespace: str
    account: str
    pod: str
    pod_uid: str


@dataclass(frozen=True, slots=True)
class PodName:
    """A pod that a caller names."""

    namespace: str
    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class ClaimName:
    """A claim that a pod names; one that was made for the pod must belong to it."""

    name: str
    made_for_pod: bool = False


@dataclass(frozen=True, slots=True)
class Pod:
    """What matters of a pod."""

    uid: str
    node: str
    phase: str
    claims: tuple[ClaimName, ...]


@dataclass(frozen=True, slots=True)
class Claim:
    """What matters of a PersistentVolumeClaim."""

    uid: str
    volume: str
    owner_uid: str


@dataclass(frozen=True, slots=True)
class PersistentVolume:
    """What matters of a PersistentVolume."""

    driver: str
    handle: str
    claim_uid: str
    read_only: bool


@dataclass(frozen=True, slots=True)
class Allowed:
    """A ticket may be issued for this node."""

    node: str
    read_only: bool


class Kubernetes(Protocol):
    """What is asked of the API server. None: there is none of that name."""

    def token(self, token: str) -> Reviewed | None:
        """Whom a token stands for, if it is valid for `AUDIENCE`."""

    def pod(self, namespace: str, name: str) -> Pod | None:
        """A pod."""

    def claim(self, namespace: str, name: str) -> Claim | None:
        """A claim."""

    def volume(self, name: str) -> PersistentVolume | None:
        """A PersistentVolume."""


@dataclass(frozen=True, slots=True)
class Policy:
    """Of one installation of the driver."""

    namespace: str
    """Where the driver is installed."""
    node_account: str
    """The service account of the node plugins."""
    driver: str


def review(
    kubernetes: Kubernetes, policy: Policy, volume: str, node_token: str, pod_token: str
) -> Allowed:
    """Allow a ticket for a volume that a pod mounts, or raise `Denied`."""
    node = _node_of(kubernetes, policy, node_token)
    reviewed, pod = _pod_of(kubernetes, pod_token, "the pod's token")
    named = PodName(reviewed.namespace, reviewed.pod, reviewed.pod_uid)
    return _mounted(kubernetes, policy, volume, node, named, pod)


def review_renewal(
    kubernetes: Kubernetes,
    policy: Policy,
    volume: str,
    node_token: str,
    ticket_node: str,
    pods: Sequence[PodName],
) -> Allowed:
    """Allow a new ticket in place of a genuine one for the same volume, or raise `Denied`."""
    node = _node_of(kubernetes, policy, node_token)
    if ticket_node != node:
        raise Denied("the ticket was issued for another node")
    reason = "the request names no pod"
    for named in pods[:PODS_MAX]:
        pod = kubernetes.pod(named.namespace, named.name)
        if pod is None or pod.uid != named.uid:
            reason = f"pod `{named.name}` does not exist any more"
            continue
        try:
            return _mounted(kubernetes, policy, volume, node, named, pod)
        except Denied as denied:
            reason = str(denied)
    raise Denied(reason)


def _mounted(
    kubernetes: Kubernetes, policy: Policy, volume: str, node: str, named: PodName, pod: Pod
) -> Allowed:
    """Whether a pod of this node mounts a claim that is bound to the volume."""
    if pod.node != node:
        raise Denied("the pod is not on the node of this node plugin")
    if pod.phase in ENDED:
        raise Denied(f"the pod has ended ({pod.phase})")
    for wanted in pod.claims[:CLAIMS_MAX]:
        claim = kubernetes.claim(named.namespace, wanted.name)
        if claim is None or not claim.volume:
            continue
        if wanted.made_for_pod and claim.owner_uid != named.uid:
            continue
        bound = kubernetes.volume(claim.volume)
        # Both say it: a volume that names another claim is not bound to this one.
        if bound is None or bound.claim_uid != claim.uid:
            continue
        if (bound.driver, bound.handle) == (policy.driver, volume):
            return Allowed(node, bound.read_only)
    raise Denied(f"pod `{named.name}` mounts no claim that is bound to volume `{volume}`")


def _node_of(kubernetes: Kubernetes, policy: Policy, token: str) -> str:
    reviewed, pod = _pod_of(kubernetes, token, "the node plugin's token")
    if (reviewed.namespace, reviewed.account) != (policy.namespace, policy.node_account):
        raise Denied(
            f"service account {reviewed.namespace}/{reviewed.account} is not the node plugin's "
            f"({policy.namespace}/{policy.node_account})"
        )
    return pod.node


def _pod_of(kubernetes: Kubernetes, token: str, what: str) -> tuple[Reviewed, Pod]:
    reviewed = kubernetes.token(token)
    if reviewed is None:
        raise Denied(f"{what} is not valid for audience `{AUDIENCE}`")
    if not reviewed.pod or not reviewed.pod_uid:
        raise Denied(f"{what} is not bound to a pod")
    pod = kubernetes.pod(reviewed.namespace, reviewed.pod)
    if pod is None or pod.uid != reviewed.pod_uid:
        raise Denied(f"the pod of {what} does not exist")
    if not pod.node:
        raise Denied(f"the pod of {what} is on no node")
    return reviewed, pod
