"""Bounded TCP and HTTP servers for ports that any pod of the cluster network can reach.

`connection_limits` is the pure admission policy; `accept` applies it before any byte is read;
`web` serves HTTP behind it; `status` is the separate process that serves probes and metrics.
"""

from flyer.kube.servers.accept import BoundedListener
from flyer.kube.servers.connection_limits import (
    Admission,
    ConnectionLimits,
    ConnectionLimitSettings,
    ConnectionSlot,
)

__all__ = [
    "Admission",
    "BoundedListener",
    "ConnectionLimitSettings",
    "ConnectionLimits",
    "ConnectionSlot",
]
