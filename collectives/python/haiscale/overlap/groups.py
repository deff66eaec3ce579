"""Process groups: what HFReduce's can do beyond torch's interface, and where they cannot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import hfreduce.torch
import torch
import torch.distributed as dist

from haiscale.internals.groups import local_group

if TYPE_CHECKING:
    from hfreduce._native import Communicator

__all__ = ["abort", "average_op", "communicator", "members", "sibling", "spans_nodes"]


def communicator(group: dist.ProcessGroup) -> Communicator | None:
    """HFReduce's communicator under a group, or None with another backend."""
    try:
        return hfreduce.torch.communicator(group)
    except TypeError:
        return None


def spans_nodes(group: dist.ProcessGroup) -> bool:
    """Whether a group of HFReduce has ranks on several nodes."""
    known = communicator(group)
    if known is None:
        return False
    nodes: Any = known.plan()["nodes"]
    return len(nodes) > 1


def members(group: dist.ProcessGroup) -> str:
    """The ranks of a group, for messages: errors of its backend number them from 0."""
    ranks = dist.get_process_group_ranks(group)
    if ranks == list(range(len(ranks))):
        return f"{len(ranks)} ranks"
    listed, numbered = (", ".join(map(str, each)) for each in (ranks, range(len(ranks))))
    return f"ranks {listed}, numbered {numbered}"


def sibling(
    group: dist.ProcessGroup, priority: Literal["low", "normal", "high"] | int
) -> dist.ProcessGroup:
    """A second group of the same ranks and deadline; all of them call it.

    Priorities are those of HFReduce; groups of other backends have none.
    """
    devices = group._device_types
    cpu = torch.device("cpu")
    backend: Any = group._get_backend(cpu if cpu in devices else devices[0])
    is_ours = communicator(group) is not None
    return local_group(
        dist.get_process_group_ranks(group),
        timeout=backend.options._timeout,
        backend=hfreduce.torch.NAME if is_ours else dist.get_backend(group),
        pg_options=hfreduce.torch.Options(priority=priority) if is_ours else None,
    )


def average_op(group: dist.ProcessGroup, tensor: torch.Tensor) -> Any:
    """The reduction that averages a tensor, which is scaled here where the backend has none."""
    if dist.get_backend(group) == dist.Backend.GLOO:
        # Gloo has no average; torch's DistributedDataParallel multiplies first, too.
        tensor.mul_(1.0 / group.size())
        return dist.ReduceOp.SUM
    return dist.ReduceOp.AVG


def abort(groups: set[dist.ProcessGroup], reason: str) -> None:
    """Ends the waits of the other ranks now instead of at their deadline, if the backend can."""
    for group in groups:
        known = communicator(group)
        if known is not None:
            known.abort(reason)
