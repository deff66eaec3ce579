"""GPU allocation: an exact search over all subsets. Pure."""

from flyer_node.allocate.choose import Cost, choose, cost
from flyer_node.allocate.topology import GpuTopology, gpu_topology

__all__ = ["Cost", "GpuTopology", "choose", "cost", "gpu_topology"]
