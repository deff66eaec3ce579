"""The scheduler on Kubernetes: observe, decide, execute, report.

`ClusterCache` observes. `Leader` runs one `LeaderTerm` after another, which decides and acts.
"""

from flyer.kube.cache.cluster_cache import ClusterCache
from flyer.kube.services.dependencies import Dependencies, Gateway
from flyer.kube.services.leader.leader import Leader, LeaderMark
from flyer.kube.services.leader.term import LeaderTerm

__all__ = ["ClusterCache", "Dependencies", "Gateway", "Leader", "LeaderMark", "LeaderTerm"]
