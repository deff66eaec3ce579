"""Pod manifests of FlyerJobs: `build_pods` is pure and tested against golden files.

`additions` contains everything that is added to a training pod; the injection webhook uses it too.
This package does not access a cluster.
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
