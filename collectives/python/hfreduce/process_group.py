"""HFReduce as a `ProcessGroup`, for PyTorch releases that accept no backend from Python.

These releases use other names for some methods and store a group's name in its backends, of which
this group has none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch._C._distributed_c10d import AllgatherOptions

from hfreduce.backend import HFReduceBackend

if TYPE_CHECKING:
    import torch

    from hfreduce.work import CollectiveWork

__all__ = ["HFReduceProcessGroup"]


class HFReduceProcessGroup(HFReduceBackend):
    """The group that `init_process_group` returns; torch calls its methods."""

    _name = ""
    _desc = ""

    _allgather_base = HFReduceBackend.all_gather_single
    _reduce_scatter_base = HFReduceBackend.reduce_scatter_single
    reduce_scatter_tensor_coalesced = HFReduceBackend.reduce_scatter_single_coalesced
    alltoall_base = HFReduceBackend.all_to_all_single

    def allgather_into_tensor_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> CollectiveWork:
        """Gather several tensors; torch's coalescing manager passes no options."""
        return self.all_gather_single_coalesced(outputs, inputs, opts or AllgatherOptions())

    def setGroupName(self, name: str) -> None:  # noqa: N802  (torch's name)
        """Store the group name that torch assigns."""
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802  (torch's name)
        """Return the group name to torch's functional collectives."""
        return self._name

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802  (torch's name)
        """Store the description that the script passes."""
        self._desc = desc

    def getGroupDesc(self) -> str:  # noqa: N802  (torch's name)
        """Return the description."""
        return self._desc
