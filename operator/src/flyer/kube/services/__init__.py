"""The scheduler on Kubernetes: observe, decide, execute, report.

`World` sees, a `Term` of the leader decides and acts, `Leader` runs terms one after the other.
"""

from flyer.kube.services.leader import Leader, LeaderMark
from flyer.kube.services.seams import Gateway, Seams
from flyer.kube.services.term import Term
from flyer.kube.services.world import World

__all__ = ["Gateway", "Leader", "LeaderMark", "Seams", "Term", "World"]
