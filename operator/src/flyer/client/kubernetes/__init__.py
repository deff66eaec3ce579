"""Clients of a Kubernetes cluster: the verbs as calls of its API, with the caller's own rights.

Nothing of ours stands between: suspend, resume, stop, requeue and priority are patches of the
FlyerJob; what is asked is answered from the objects that the caller may read.
"""

from flyer.client.kubernetes.asynchronous import AsyncKubeClient
from flyer.client.kubernetes.connection import KubeClient, connect_kube

__all__ = ["AsyncKubeClient", "KubeClient", "connect_kube"]
