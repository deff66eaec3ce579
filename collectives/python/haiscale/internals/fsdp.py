"""torch's FSDP2 (`torch.distributed.fsdp.fully_shard`, torch 2.15) behind its public methods.

A *parameter group* is what one call of `fully_shard` gathers and scatters together. Its methods are
wrapped on the object: they are the only places through which every gather and every scatter passes,
whether a hook, a prefetch or the script asked for it.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NewType

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo, is_bw

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch.distributed as dist
    from torch import nn
    from torch.nn import Parameter

__all__ = [
    "ParameterGroup",
    "around_reduce",
    "before_gather",
    "before_reset",
    "device",
    "drop_pending_gather",
    "has_prefetch",
    "is_in_backward",
    "keeping_shards",
    "may_land_later",
    "parameter_groups",
    "parameters",
    "reduces_replicas_itself",
    "replicas",
    "reshards_by_default",
    "scale",
    "shards",
]

ParameterGroup = NewType("ParameterGroup", object)


def parameter_groups(module: nn.Module) -> list[ParameterGroup]:
    """Of one call of `fully_shard`: one, or more with parameters on several meshes."""
    state: Any = _state(module)
    return list(state._fsdp_param_groups)


def parameters(group: ParameterGroup) -> list[Parameter]:
    """The sharded parameters, in the order in which they are gathered."""
    known: Any = group
    return [parameter.sharded_param for parameter in known.fsdp_params]


def device(group: ParameterGroup) -> torch.device:
    """Where the group computes."""
    known: Any = group
    result: torch.device = known.device
    return result


def shards(group: ParameterGroup) -> dist.ProcessGroup | None:
    """Ranks that hold the shards of one replica; None if parameters are only replicated."""
    known: Any = group
    if not isinstance(known.mesh_info, FSDPMeshInfo):
        return None
    return known.mesh_info.shard_process_group


def replicas(group: ParameterGroup) -> dist.ProcessGroup | None:
    """Ranks that hold the same shard of different replicas (HSDP)."""
    known: Any = group
    if not isinstance(known.mesh_info, HSDPMeshInfo):
        return None
    return known.mesh_info.replicate_process_group


def before_gather(group: ParameterGroup, call: Callable[[], object]) -> None:
    """Calls before parameters are read for a gather, in forward and backward."""
    known: Any = group
    unshard = known.unshard

    def with_call(async_op: bool = False) -> None:  # noqa: FBT001, FBT002  (torch's)
        call()
        unshard(async_op)

    known.unshard = with_call


def around_reduce(group: ParameterGroup) -> None:
    """Leaves the allreduce of replicas to the custom reduce-scatter, wherever that is possible.

    torch calls it synchronously. It does not if the mesh of the group, not of its parameters, has
    no replicas while gradients are reduced.
    """
    known: Any = group
    post_backward, full = known.post_backward, known.mesh_info
    flat = FSDPMeshInfo(full.mesh, shard_mesh_dim=full.shard_mesh_dim)

    def without_replicas(*unused: Any) -> None:
        if not _gives_up_replicas(known):
            post_backward(*unused)
            return
        flat.reduce_scatter_process_group = full.reduce_scatter_process_group
        known.mesh_info = flat
        try:
            post_backward(*unused)
        finally:
            known.mesh_info = full

    known.post_backward = without_replicas


def _gives_up_replicas(known: Any) -> bool:
    mesh = known.mesh_info
    return (
        isinstance(mesh, HSDPMeshInfo)
        and mesh.shard_mesh_size > 1
        and known.reduce_grads
        and known.all_reduce_grads
        and known._partial_reduce_output is None
        and known._all_reduce_hook is None
        and not known.force_sum_reduction_for_comms
    )


def reduces_replicas_itself(group: ParameterGroup) -> bool:
    """Whether torch calls the allreduce of replicas after the current reduce-scatter."""
    known: Any = group
    return isinstance(known.mesh_info, HSDPMeshInfo)


def scale(group: ParameterGroup) -> float | None:
    """The divisor of `set_gradient_divide_factor`; None: the number of ranks."""
    known: Any = group
    factor: float | None = known.gradient_divide_factor
    return factor


def may_land_later(group: ParameterGroup, dtype: torch.dtype) -> bool:
    """Whether torch leaves the output of the current reduce-scatter alone until backward ends.

    torch ignores the work that a custom reduce-scatter returns. Without streams the output is
    final only after that work, so nothing may read or write it before: no allreduce of replicas,
    no division (float16, float64, sums by request), no conversion, no addition to gradients that
    are there, and no hooks.
    """
    known: Any = group
    if isinstance(known.mesh_info, HSDPMeshInfo) or known._all_reduce_hook is not None:
        return False
    if known.force_sum_reduction_for_comms or dtype not in {torch.float32, torch.bfloat16}:
        return False
    return all(
        each.sharded_param.grad is None
        and each.sharded_grad_dtype in {None, dtype}
        and not each.offload_to_cpu
        and not each.sharded_param._post_accumulate_grad_hooks
        for each in known.fsdp_params
        if each.sharded_param.requires_grad
    )


def is_in_backward() -> bool:
    """Whether the autograd engine runs a backward pass on this thread."""
    return bool(is_bw())


def before_reset(group: ParameterGroup, call: Callable[[], object]) -> None:
    """Calls before `reset_iter_state` drops the group's gradients."""
    known: Any = group
    reset = known._reset_iter_state

    def with_call() -> None:
        call()
        reset()

    known._reset_iter_state = with_call


def drop_pending_gather(group: ParameterGroup) -> None:
    """Drops a gather that no module has used: later ones would use its old parameters.

    torch drops it at the end of backward, but not after a forward pass alone.
    """
    known: Any = group
    result = known._all_gather_result
    if result is not None and result.all_gather_work is not None:
        result.all_gather_work.wait()
        known._all_gather_result = None


@contextmanager
def keeping_shards(module: nn.Module) -> Iterator[None]:
    """Leaves the shards alone after `load_state_dict`, where a module has other parameters."""
    known: Any = parameter_groups(module)
    parameters = [parameter for group in known for parameter in group.fsdp_params]
    for parameter in parameters:
        parameter.reset_sharded_param = lambda: None
    try:
        yield
    finally:
        for parameter in parameters:
            del parameter.reset_sharded_param


def has_prefetch(module: nn.Module) -> bool:
    """Whether the script has set prefetch lists for a module."""
    state: Any = _state(module)
    return bool(state._states_to_forward_prefetch or state._states_to_backward_prefetch)


def reshards_by_default(module: nn.Module) -> bool:
    """Whether the script left it to torch what happens to parameters after forward."""
    state: Any = _state(module)
    return bool(state._auto_reshard_after_forward)


def _state(module: nn.Module) -> object:
    assert isinstance(module, FSDPModule)
    return module._get_fsdp_state()
