"""Pods of FlyerJobs as manifests: `build_pods` is pure, and golden files say what it gives.

What is added to a training pod lives in `additions`, which injection into foreign pods uses too.
Nothing here talks to a cluster.
"""

from flyer.kube.pods.build import build_pods
from flyer.kube.pods.names import pod_name
from flyer.kube.pods.refusals import PodsRefusedError, refusals
from flyer.kube.pods.settings import GATEWAY_PORT, TOKEN_AUDIENCE, PlacedNode, PodSettings

__all__ = [
    "GATEWAY_PORT",
    "TOKEN_AUDIENCE",
    "PlacedNode",
    "PodSettings",
    "PodsRefusedError",
    "build_pods",
    "pod_name",
    "refusals",
]
