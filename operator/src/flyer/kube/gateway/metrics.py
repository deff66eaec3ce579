"""Metrics of the gateway. Refusal reasons are a closed set, each initialized to 0."""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

__all__ = ["REFUSAL_REASONS", "GatewayMetrics"]

REFUSAL_REASONS: Final = (
    "bad_field",  # a message with a wrong field
    "bad_handshake",  # no TLS, or no hello first
    "bad_line",  # oversized, or no JSON object
    "bad_operation",  # a message of an unknown kind
    "bad_rank",  # speaks for a rank of another pod
    "bad_token",  # the API server does not accept the token
    "bad_version",
    "flood",  # more messages a second than a sidecar has
    "forgotten",  # its attempt is over
    "replaced",  # a newer stream of the same pod
    "review_unavailable",  # the API server could not be asked
    "silent",  # no whole line in time
    "slow",  # does not read what it is sent
    "too_many",  # connections, in all or of one address
    "unasked",  # acknowledged a suspension that it was not told of; not a reason to hang up
    "unknown_pod",  # a good token of a pod that is in no gang
)


MESSAGE_KINDS: Final = ("hello", "report", "beat")


class GatewayMetrics:
    """One set of series, made once a process: leaders' terms come and go."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.refusals = Counter(
            "flyer_gateway_refusals",
            "Streams and messages refused, by reason",
            ["reason"],
            registry=registry,
        )
        for reason in REFUSAL_REASONS:
            self.refusals.labels(reason)
        self.sockets = Gauge(
            "flyer_gateway_sockets", "Open connections, proved or not", registry=registry
        )
        self.connections = Gauge(
            "flyer_gateway_connections", "Sidecars with an open stream", registry=registry
        )
        self.messages = Counter(
            "flyer_gateway_messages", "Messages from sidecars", ["kind"], registry=registry
        )
        for kind in MESSAGE_KINDS:
            self.messages.labels(kind)
        self.signal_seconds = Histogram(
            "flyer_gateway_signal_seconds",
            "From the engine's signal until the first rank's sidecar has told its ranks",
            buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 1, 2.5, 5, 10, 30),
            registry=registry,
        )
        self.start_seconds = Histogram(
            "flyer_gateway_start_seconds",
            "From the creation of a gang's pods until all of its launchers run",
            buckets=(0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600),
            registry=registry,
        )
