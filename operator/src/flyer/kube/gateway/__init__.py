"""Gateway: the operator's endpoint for the streams of sidecars.

`Gateway` is the interface for the operator, `identities` its dependency on the API client, and
`certificates` its TLS material. `flyer.sidecar.wire` defines the wire protocol.
"""

from flyer.kube.gateway.certificates import SECRET_NAME, Certificates, certificates_of, renewed
from flyer.kube.gateway.gateway import Gateway, Heartbeat
from flyer.kube.gateway.identities import (
    Identities,
    IdentityUnknownError,
    PodIdentity,
    TokenRefusedError,
)
from flyer.kube.gateway.metrics import GatewayMetrics
from flyer.kube.gateway.outcome import outcome_of
from flyer.kube.gateway.settings import GatewaySettings

__all__ = [
    "SECRET_NAME",
    "Certificates",
    "Gateway",
    "GatewayMetrics",
    "GatewaySettings",
    "Heartbeat",
    "Identities",
    "IdentityUnknownError",
    "PodIdentity",
    "TokenRefusedError",
    "certificates_of",
    "outcome_of",
    "renewed",
]
