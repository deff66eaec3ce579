"""HFReduce: collectives on the CPU over a zone-aware double binary tree.

Training scripts need one line: ``torch.distributed.init_process_group("hfreduce")``. torch finds
the backend by itself; nothing has to be imported. See `hfreduce.torch` for what a script may ask
of a group, `allreduce` for arrays of other libraries, and `hfreduce._native` for the engine without
torch.
"""

from hfreduce.arrays import allreduce
from hfreduce.errors import CollectiveError, RendezvousError, SettingError, TopologyError
from hfreduce.topology import Place, Topology, load_topology

__all__ = [
    "CollectiveError",
    "Place",
    "RendezvousError",
    "SettingError",
    "Topology",
    "TopologyError",
    "allreduce",
    "load_topology",
]
