"""A Kubernetes for tests: an API server in memory over HTTP, and nodes that run scripted pods.

`async with ApiServer() as api:` serves at `api.url`; `api.store` is what it stores, `api.faults`
counts calls and commits faults. `Kubelets(api.store)` are the nodes.
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
