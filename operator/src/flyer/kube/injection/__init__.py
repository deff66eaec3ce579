"""Injection webhook: adds collectives to training pods outside FlyerJobs; it fails open.

A pod with the label `fireflyer.dev/inject: "true"` gets the tools, HFReduce and its environment;
with the value `daemon` also hfreduced in a native sidecar.
`respond` is pure; `Webhook` serves it.
"""

from flyer.kube.injection.inject import inject
from flyer.kube.injection.review import respond
from flyer.kube.injection.webhook import INJECTION_PATH, INJECTION_PORT, InjectionMetrics, Webhook

__all__ = [
    "INJECTION_PATH",
    "INJECTION_PORT",
    "InjectionMetrics",
    "Webhook",
    "inject",
    "respond",
]
