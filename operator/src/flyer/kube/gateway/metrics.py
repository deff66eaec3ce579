"""Metrics of the gateway. Refusal reasons are a closed set, each initialized to 0."""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

__all__ = ["REFUSAL_REASONS", "GatewayMetrics"]

REFUSAL_REASONS: Final = (
    "bad_field",  # a message with an invalid field
    "bad_handshake",  # no TLS, or no hello first
    "bad_line",  # oversized, or no JSON object
    "bad_operation",  # a message of an unknown kind
    "bad_rank",  # reports about a rank of another pod
    "bad_token",  # the API server does not accept the token
    "bad_version",
    "flood",  # more messages per second than a sidecar sends
    "forgotten",  # its attempt is over
    "replaced",  # a newer stream of the same pod
    "review_unavailable",  # the API server cannot be reached
    "silent",  # no complete message in time
    "slow",  # does not read the sent data
    "too_many",  # too many connections, in total or from one address
    "unasked",  # acknowledged a suspension that was not sent; does not close the stream
    "unknown_pod",  # a valid token of a pod without a gang
)


MESSAGE_KINDS: Final = ("hello", "report", "beat")


class GatewayMetrics:
    """The gateway's series. Created once per process, for all leader terms."""

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
            "flyer_gateway_sockets", "Open connections, authenticated or not", registry=registry
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
            "From the engine's signal until the first rank's sidecar has notified its ranks",
            buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 1, 2.5, 5, 10, 30),
            registry=registry,
        )
        self.start_seconds = Histogram(
            "flyer_gateway_start_seconds",
            "From the creation of a gang's pods until all of its launchers run",
            buckets=(0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600),
            registry=registry,
        )
