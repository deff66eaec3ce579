"""The only user of the Kubernetes API: calls, caches, leader election, errors as types."""

from flyer.kube.client.access import Access, AccessError, find_access
from flyer.kube.client.api import Api
from flyer.kube.client.cache import Cache, Key, WatchSettings
from flyer.kube.client.election import Election, LeadershipLostError, LeaseSettings
from flyer.kube.client.lanes import Lane
from flyer.kube.client.limits import Limits

__all__ = [
    "Access",
    "AccessError",
    "Api",
    "Cache",
    "Election",
    "Key",
    "Lane",
    "LeadershipLostError",
    "LeaseSettings",
    "Limits",
    "WatchSettings",
    "find_access",
]
