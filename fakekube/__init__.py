"""A Kubernetes for tests: an API server in memory over HTTP, and nodes that run scripted pods.

`async with ApiServer() as api:` serves at `api.url`; `api.store` is what it stores, `api.faults`
counts calls and commits faults. `Kubelets(api.store)` are the nodes.
"""

from fakekube.exits import Exit
from fakekube.faults import Call, Death, Fault, Faults
from fakekube.kinds import KINDS, Kind
from fakekube.kubelets import Kubelets, node_object
from fakekube.server import ApiServer
from fakekube.store import Store

__all__ = [
    "KINDS", "ApiServer", "Call", "Death", "Exit", "Fault", "Faults", "Kind", "Kubelets", "Store",
    "node_object",
]  # fmt: skip
