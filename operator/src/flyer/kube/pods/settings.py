"""What pods are made of besides their job: images, the gateway's address, and what a node offers.

Values only. The operator fills `PodSettings` once from its own settings, and a `PlacedNode` for
each assigned node from its cache.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["GATEWAY_PORT", "TOKEN_AUDIENCE", "PlacedNode", "PodSettings"]

GATEWAY_PORT: Final = 7443
TOKEN_AUDIENCE: Final = "fireflyer-gateway"  # noqa: S105  a name


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedNode:
    """A node that a gang was assigned to, as far as its pod depends on it."""

    name: str
    dedicated: bool = True
    """Ours alone (label fireflyer.dev/dedicated): we bind. Otherwise kube-scheduler does."""
    allocatable: Mapping[str, str] = field(default_factory=dict)
    """`status.allocatable` of the Node: which of our resources there are, and how many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSettings:
    """The same for all pods of an installation."""

    controller_image: str
    """Runs `flyer-sidecar`."""
    collectives_image: str
    """Runs `flyer-install` and `hfreduced`."""
    gateway_ca: str
    """PEM: the certificates by which the sidecar knows the gateway."""
    gateway_endpoint: str = f"flyer-gateway.fireflyer-system.svc:{GATEWAY_PORT}"
    """`host:port` at which pods reach the gateway."""
    gateway_name: str = ""
    """The name in the gateway's certificate, where it is not the endpoint's host."""
    image_pull_policy: str = "IfNotPresent"
    image_pull_secrets: tuple[str, ...] = ()
    token_seconds: int = 600
    """Life of the projected token; 600 is the least that Kubernetes gives."""
    start_seconds: float = 900.0
    """A launcher waits so long for the start order. Longer than the engine waits for a gang."""
    sidecar_requests: Mapping[str, str] = field(
        default_factory=lambda: {"cpu": "20m", "memory": "64Mi"}
    )
    sidecar_limits: Mapping[str, str] = field(default_factory=lambda: {"memory": "256Mi"})
    daemon_requests: Mapping[str, str] = field(
        default_factory=lambda: {"cpu": "500m", "memory": "128Mi"}
    )
    """Of hfreduced, where a job has one. No limits: its memory is the ranks' tensors."""
