"""HFReduce: collectives on the CPU over a zone-aware double binary tree.

Training scripts need one line: ``torch.distributed.init_process_group("hfreduce")``. torch 2.15
and later find the backend; older versions need ``import hfreduce.torch``. See
`hfreduce.torch` for the options of a group, `allreduce` for arrays of other libraries,
and `hfreduce._native` for the engine without torch.

Names of this module are loaded on first use: the import takes one to two milliseconds.
"""

from importlib import import_module

from hfreduce.errors import CollectiveError, RendezvousError, SettingError, TopologyError

TYPE_CHECKING = False  # not imported: typing takes longer to load than this whole module
if TYPE_CHECKING:
    from hfreduce._native import Place, Topology, load_topology
    from hfreduce.api import Pending, allreduce, allreduce_many, start_allreduce
    from hfreduce.memory import empty

__all__ = [
    "CollectiveError",
    "Pending",
    "Place",
    "RendezvousError",
    "SettingError",
    "Topology",
    "TopologyError",
    "allreduce",
    "allreduce_many",
    "empty",
    "load_topology",
    "start_allreduce",
]

_MODULES = {
    "Pending": "hfreduce.api",
    "allreduce": "hfreduce.api",
    "allreduce_many": "hfreduce.api",
    "empty": "hfreduce.memory",
    "Place": "hfreduce._native",
    "Topology": "hfreduce._native",
    "load_topology": "hfreduce._native",
    "start_allreduce": "hfreduce.api",
}


def __getattr__(name: str) -> object:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module 'hfreduce' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(module), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
