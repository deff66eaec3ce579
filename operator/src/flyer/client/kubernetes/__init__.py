"""Clients of a Kubernetes cluster: the verbs as calls of its API, with the caller's own rights.

No other service is involved: suspend, resume, stop, requeue and priority patch the FlyerJob, and
reads use the objects that the caller may read.
"""

from flyer.client.kubernetes.asynchronous import AsyncKubeClient
from flyer.client.kubernetes.connection import KubeClient, connect_kube

__all__ = ["AsyncKubeClient", "KubeClient", "connect_kube"]
