"""A Kubernetes for tests: an API server in memory over HTTP, and nodes that run scripted pods.

`async with ApiServer() as api:` serves at `api.url`; `api.store` is what it stores, `api.faults`
counts calls and commits faults. `Kubelets(api.store)` are the nodes.
"""

from flyer.kube.testing.faults import Call, Death, Fault, Faults
from flyer.kube.testing.kinds import KINDS, Kind
from flyer.kube.testing.kubelets import Exit, Kubelets, node_object
from flyer.kube.testing.server import ApiServer
from flyer.kube.testing.store import Store

__all__ = [
    "KINDS", "ApiServer", "Call", "Death", "Exit", "Fault", "Faults", "Kind", "Kubelets", "Store",
    "node_object",
]  # fmt: skip
