"""Kubernetes API client: calls, caches, leader election and typed errors."""

from flyer.kube.apiserver.access import Access, AccessError, find_access
from flyer.kube.apiserver.api import Api
from flyer.kube.apiserver.cache import Cache, Key, WatchSettings
from flyer.kube.apiserver.election import Election, LeadershipLostError, LeaseSettings
from flyer.kube.apiserver.limiter import Limiter
from flyer.kube.apiserver.limits import Limits

__all__ = [
    "Access",
    "AccessError",
    "Api",
    "Cache",
    "Election",
    "Key",
    "LeadershipLostError",
    "LeaseSettings",
    "Limiter",
    "Limits",
    "WatchSettings",
    "find_access",
]
