"""In-memory Kubernetes for tests: an API server over HTTP, and nodes that run scripted pods.

`async with ApiServer() as api:` serves at `api.url`. `api.store` holds the objects, and
`api.faults` records calls and injects faults. `Kubelets(api.store)` are the nodes.
"""

from fakekube.apiserver.faults import Call, Death, Fault, Faults
from fakekube.apiserver.kinds import KINDS, Kind
from fakekube.apiserver.server import ApiServer
from fakekube.apiserver.store import Store
from fakekube.nodes.exits import Exit
from fakekube.nodes.kubelets import Kubelets, node_object

__all__ = [
    "KINDS", "ApiServer", "Call", "Death", "Exit", "Fault", "Faults", "Kind", "Kubelets", "Store",
    "node_object",
]  # fmt: skip
