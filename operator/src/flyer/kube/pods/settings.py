"""Inputs of pod manifests besides the job: images, the gateway's address, and node properties.

`PodSettings.of` reads the operator's settings. The operator creates a `PlacedNode` for each
assigned node from its cache.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flyer.kube.settings import Settings

__all__ = ["GATEWAY_PORT", "TOKEN_AUDIENCE", "PlacedNode", "PodSettings"]

GATEWAY_PORT: Final = 7443
TOKEN_AUDIENCE: Final = "fireflyer-gateway"  # noqa: S105  a name


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedNode:
    """An assigned node, with the properties that its pod depends on."""

    name: str
    dedicated: bool = True
    """With the label fireflyer.dev/dedicated the operator binds the pod, else kube-scheduler."""
    allocatable: Mapping[str, str] = field(default_factory=dict)
    """`status.allocatable` of the Node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSettings:
    """Settings for all pods of an installation."""

    controller_image: str
    """Runs `flyer-sidecar`."""
    collectives_image: str
    """Runs `flyer-install` and `hfreduced`."""
    gateway_ca: str
    """PEM certificates with which the sidecar authenticates the gateway."""
    gateway_endpoint: str = f"flyer-gateway.fireflyer-system.svc:{GATEWAY_PORT}"
    """`host:port` of the gateway for pods."""
    gateway_name: str = ""
    """Name in the gateway's certificate, if it differs from the endpoint's host."""
    image_pull_policy: str = "IfNotPresent"
    image_pull_secrets: tuple[str, ...] = ()
    priority_class: str = ""
    """PriorityClass of pods whose template names none."""
    token_seconds: int = 600
    """Lifetime of the projected token; 600 is Kubernetes' minimum."""
    start_seconds: float = 900.0
    """A launcher waits this long for the start order: longer than the engine's start deadline."""
    sidecar_requests: Mapping[str, str] = field(
        default_factory=lambda: {"cpu": "20m", "memory": "64Mi"}
    )
    sidecar_limits: Mapping[str, str] = field(default_factory=lambda: {"memory": "256Mi"})
    daemon_requests: Mapping[str, str] = field(
        default_factory=lambda: {"cpu": "500m", "memory": "128Mi"}
    )
    """Requests of hfreduced. It has no limits, because its memory holds the ranks' tensors."""

    @classmethod
    def of(cls, settings: Settings, gateway_ca: str) -> PodSettings:
        """The settings of an operator whose gateway has a certificate of this authority."""
        return cls(
            controller_image=settings.sidecar_image,
            collectives_image=settings.collectives_image,
            gateway_ca=gateway_ca,
            gateway_endpoint=settings.endpoint,
            image_pull_policy=settings.image_pull_policy,
            image_pull_secrets=tuple(
                name for name in settings.image_pull_secrets.split(",") if name
            ),
            priority_class=settings.job_priority_class,
            start_seconds=settings.start_deadline_seconds * 1.5,
        )
