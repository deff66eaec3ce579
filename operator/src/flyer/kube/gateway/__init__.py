"""The end of every sidecar's stream inside the operator.

`Gateway` is what the operator uses; `identities` is what it needs from the client layer,
`certificates` what it serves with. The words on the wire are `flyer.sidecar.wire`.
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
