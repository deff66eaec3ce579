"""The gateway's limits, each with the reason for its size."""

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
    """0: any free one, which `Gateway.port` tells."""

    hello_seconds: float = 10.0
    """TLS handshake, and then the first line: each at most so long."""
    review_seconds: float = 10.0
    """What a token review may take before the sidecar is told to come again."""
    reviews_max: int = 32
    """Concurrent token reviews, which a leader change of a large cluster needs."""
    beat_seconds: float = 5.0
    """We say something at least so often."""
    sidecars_beat_seconds: float = 2.0
    """Sidecars say something at least so often: who is dead is noticed by what he leaves unsaid."""
    silence_seconds: float = 15.0
    """Without one whole line for so long either side drops a stream: three of our beats."""
    write_seconds: float = 5.0
    """A sidecar that takes longer to read what it was sent is dropped; it comes again."""

    connections_max: int = 20_000
    """Open connections in all: twice the nodes of the largest cluster in mind."""
    limits: ConnectionLimitSettings = field(default_factory=ConnectionLimitSettings)
    """Of them, those that have not authenticated yet, and how they are shared among sources."""
    unexpected_reviews_max: int = 4
    """Token reviews under way at once for connections from unexpected addresses; a further
    `reviews_max` are for the addresses of expected pods alone."""
    refusals_max: int = 4096
    """Refused tokens that are remembered, so that saying one again costs no review."""
    refusal_seconds: float = 5.0
    """And for how long: the API server may not know a new pod yet. It does not apply to connections
    from the addresses of expected pods."""
    lines_per_second: float = 20.0
    """Reports of one stream, in the long run; a sidecar sends at most ten."""
    lines_burst: int = 100

    progress_seconds: float = 0.2
    """Progress of one job is told to the engine at most so often; the newest step wins."""
    output_seconds: float = 30.0
    """Launchers tell that ranks wrote something so often, or four times within a watchdog."""
    first_failure_seconds: float = 1.0
    """The first failure waits so long for others; then the guilty one is told first."""
    peer_lost_seconds: float = 3.0
    """A pod that lost its peers waits so long for the peer's own account."""
    status_seconds: float = 3.0
    """A pod whose rank got a SIGKILL waits so long for its status: only the kubelet knows whether
    the kernel sent it, because a memory limit was exceeded."""
    account_seconds: float = 2.0
    """After a pod's end its sidecar may still be talking: its account is waited for so long."""
