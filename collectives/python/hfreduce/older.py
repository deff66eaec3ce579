"""The same group for a torch that takes no backend from Python: a process group of its own.

torch then has other names for some of the methods, and keeps a group's name with its backends, of
which there are none.
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
    """What scripts get from `init_process_group`; torch calls the methods."""

    _name = ""
    _desc = ""

    _allgather_base = HFReduceBackend.all_gather_single
    _reduce_scatter_base = HFReduceBackend.reduce_scatter_single
    reduce_scatter_tensor_coalesced = HFReduceBackend.reduce_scatter_single_coalesced
    alltoall_base = HFReduceBackend.all_to_all_single

    def allgather_into_tensor_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> CollectiveWork:
        """Several at once; torch's manager of coalescing gives no options."""
        return self.all_gather_single_coalesced(outputs, inputs, opts or AllgatherOptions())

    def setGroupName(self, name: str) -> None:  # noqa: N802  (torch's name)
        """The name of the group, as torch gives it."""
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802  (torch's name)
        """The same, for torch's functional collectives."""
        return self._name

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802  (torch's name)
        """What the script calls the group."""
        self._desc = desc

    def getGroupDesc(self) -> str:  # noqa: N802  (torch's name)
        """The same."""
        return self._desc
