"""Limits of the gateway, with the reason for each value."""

from __future__ import annotations

from dataclasses import dataclass, field

from flyer.kube.pods.settings import GATEWAY_PORT
from flyer.kube.servers.connection_limits import ConnectionLimitSettings

__all__ = ["GatewaySettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """Times in seconds. Tests shorten times; an installation may raise the numbers."""

    host: str = "0.0.0.0"  # noqa: S104  pods of all nodes connect
    port: int = GATEWAY_PORT
    """0: any free port, which is `Gateway.port` then."""

    hello_seconds: float = 10.0
    """Timeout of the TLS handshake, and of the first line."""
    review_seconds: float = 10.0
    """Timeout of a token review, after which the sidecar has to retry."""
    reviews_max: int = 32
    """Concurrent token reviews, which a leader change of a large cluster needs."""
    beat_seconds: float = 5.0
    """Maximum time between messages of the gateway."""
    sidecars_beat_seconds: float = 2.0
    """Maximum time between messages of a sidecar; a dead one is detected by its silence."""
    silence_seconds: float = 15.0
    """Time without a complete line after which either side closes a stream: three heartbeats."""
    write_seconds: float = 5.0
    """Timeout of a write; a slower sidecar is disconnected and reconnects."""

    connections_max: int = 20_000
    """Maximum number of open connections: twice the nodes of the largest supported cluster."""
    limits: ConnectionLimitSettings = field(default_factory=ConnectionLimitSettings)
    """Limits of the unauthenticated ones, in total and per source."""
    unexpected_reviews_max: int = 4
    """Concurrent token reviews for connections from unexpected addresses, in addition to the
    `reviews_max` for the addresses of expected pods."""
    refusals_max: int = 4096
    """Number of cached refused tokens, which are refused again without a review."""
    refusal_seconds: float = 5.0
    """Lifetime in this cache: the API server may not have a new pod yet. Connections from the
    addresses of expected pods do not use the cache."""
    lines_per_second: float = 20.0
    """Maximum average rate of reports of one stream; a sidecar sends at most ten per second."""
    lines_burst: int = 100

    progress_seconds: float = 0.2
    """Minimum time between progress events of one job; only the newest step is reported."""
    output_seconds: float = 30.0
    """Time between reports of rank output, at most a quarter of the progress deadline."""
    first_failure_seconds: float = 1.0
    """Hold time of the first failure; then the root cause is reported first."""
    peer_lost_seconds: float = 3.0
    """Time for which a pod that lost its peers is held for the peer's report."""
    status_seconds: float = 3.0
    """Wait for the status of a pod whose rank got a SIGKILL: only the kubelet knows whether the
    kernel sent it because a memory limit was exceeded."""
    account_seconds: float = 2.0
    """Time for which a terminated pod's sidecar report is awaited."""
