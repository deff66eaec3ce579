"""`fully_shard` and `overlap`: torch's FSDP2 with collectives that overlap on the CPU.

Changes to a script with torch's: the import, and `overlap(model, optimizer)` after the optimizer is
made. Without the second, backward returns with averaged gradients, as torch's does.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

from haiscale.ddp import agreement
from haiscale.fsdp.reducer import Reducer
from haiscale.fsdp.steps import ShardSteps
from haiscale.overlap.guards import guard_module, guard_optimizer
from haiscale.overlap.steps import WholeStep

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle

__all__ = ["fully_shard", "overlap"]

_WAITING: weakref.WeakKeyDictionary[nn.Module, RemovableHandle] = weakref.WeakKeyDictionary()
"""Modules whose root has not been called yet, with the hook that recognizes the root."""
_REDUCER: Final = "_haiscale_reducer"
"""Attribute of a root."""


def fully_shard(
    module: nn.Module | list[nn.Module], *, mesh: DeviceMesh | None = None, **options: Any
) -> Any:
    """Shards a module as `torch.distributed.fsdp.fully_shard` does, with the same arguments.

    Before anything is changed, the ranks of the mesh check that they have the same module, and
    parameters and buffers of the first rank are copied to the others, unless they are on the meta
    device or distributed. On the CPU collectives then run in the background. On other devices they
    are torch's.

    Args:
        module: A module, or several that are gathered together; inner ones before outer ones.
        mesh: One axis: shards. Two: replicas and shards (HSDP); `haiscale.mesh.build` places them
            so that shards are in one zone. Default: all ranks are shards.
        options: Further arguments of torch's function.

    Raises:
        ModelMismatchError: The module of a rank differs; on every rank of the mesh.
    """
    mesh = mesh if mesh is not None else _default_mesh()
    modules = module if isinstance(module, list) else [module]
    _agree(modules, mesh, options)
    sharded = torch_fully_shard(module, mesh=mesh, **options)
    for each in modules:
        _WAITING[each] = each.register_forward_pre_hook(_find_root, prepend=True)
    return sharded


# Scripts that replace the import alone call `fully_shard.state(module)`, too.
vars(fully_shard)["state"] = vars(torch_fully_shard)["state"]


def overlap(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] = (),
    *,
    independent: bool = False,
) -> Reducer:
    """Lets the optimizer's step of each sharded module follow its reduce-scatter.

    `step()` then requests the step. A module is stepped when its gradients have landed, at the
    latest before its parameters are gathered again. Between `backward()` and `step()` `.grad` is
    not readable without `synchronize()`, `parameters()` or `state_dict()`.

    Args:
        model: The outermost module that was passed to `fully_shard`.
        optimizer: Optimizers of its parameters, made after `fully_shard`.
        independent: The optimizers are the script's, not torch's, and update each element from that
            element's gradient and state alone.

    Returns:
        The model's reducer: `synchronize()`, `whole_step`, `reset()`, `communication_blocks`.

    Raises:
        ValueError: The model was not passed to `haiscale.fsdp.fully_shard`, or an optimizer was
            made before that.
    """
    reducer = _reducer(model)
    sharded = {p for bucket in reducer.buckets for p in bucket.parameters}
    for each in [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer:
        own = {p for group in each.param_groups for p in group["params"]}
        if sharded and not own & sharded:
            raise ValueError(
                f"{type(each).__name__} has no parameter of the sharded model: make the optimizer "
                "after fully_shard, from model.parameters()"
            )
        never = None if reducer.buckets else WholeStep.TORCH_COLLECTIVES
        logs = torch.distributed.get_rank() == 0
        reducer.steps.append(
            ShardSteps(each, reducer, never=never, independent=independent, log=logs)
        )
        guard_optimizer(each, reducer)
    reducer.defers = reducer.may_defer = bool(reducer.steps) and all(
        steps.never is None for steps in reducer.steps
    )
    owned = {p for steps in reducer.steps for p in steps.parameters()}
    for bucket in reducer.buckets:
        bucket.owners = owned.intersection(bucket.parameters)
    return reducer


def _default_mesh() -> DeviceMesh:
    # torch built for CUDA names it on hosts without a GPU, too.
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    kind = "cpu" if accelerator is None else accelerator.type
    return init_device_mesh(kind, (torch.distributed.get_world_size(),))


def _agree(modules: Sequence[nn.Module], mesh: DeviceMesh, options: dict[str, Any]) -> None:
    """Checks that all ranks of the mesh have equal modules, and copies the first one's values."""
    # On a mesh of two axes along the shards, then along the replicas.
    groups = [mesh.get_group(axis) for axis in reversed(range(mesh.ndim))]
    device = torch.device(mesh.device_type)
    entries = []
    tensors: dict[torch.Tensor, None] = {}
    settings = ", ".join(f"{name}={_plain(value)}" for name, value in sorted(options.items()))
    for module in modules:
        title = f"{type(module).__name__} on a mesh of {tuple(mesh.shape)}: {settings}"
        entries += agreement.describe(module, title)
        tensors |= dict.fromkeys([*module.parameters(), *module.buffers()])
    agreement.check_same_model(entries, groups[0], device, *groups[1:2])
    local = [t for t in tensors if not isinstance(t, DTensor) and not t.is_meta]
    for group in groups:
        agreement.broadcast(local, group, device)


def _plain(value: object) -> str:
    """Equal text for equal options on all ranks; functions and sets are not compared."""
    if isinstance(value, MixedPrecisionPolicy):
        return f"{value.param_dtype} {value.reduce_dtype} {value.output_dtype}"
    return str(value) if isinstance(value, bool | int | None) else type(value).__name__


def _find_root(module: nn.Module, _args: object) -> None:
    """The first module that is called contains all others; a child's hook is gone by then."""
    if module in _WAITING:
        _reducer(module)


def _reducer(model: nn.Module) -> Reducer:
    known: Reducer | None = model.__dict__.get(_REDUCER)
    if known is not None:
        return known
    if not isinstance(model, FSDPModule) or model not in _WAITING:
        raise ValueError(
            f"{type(model).__name__} is not a root of haiscale.fsdp: pass the outermost module "
            "that haiscale.fsdp.fully_shard was called with"
        )
    root: Any = model
    modules = {name: m for name, m in model.named_modules() if isinstance(m, FSDPModule)}
    for each in model.modules():
        if (handle := _WAITING.pop(each, None)) is not None:
            handle.remove()
    reducer = Reducer(model, modules)
    model.__dict__[_REDUCER] = reducer
    reducer.on_change = lambda busy: guard_module(root, reducer, busy=busy)
    root.register_forward_pre_hook(lambda *_: reducer.before_forward(), prepend=True)
    root.register_forward_hook(lambda *_: reducer.after_forward())
    own: Any
    for own in modules.values():
        own.register_state_dict_pre_hook(lambda *_: reducer.synchronize())
        own.register_load_state_dict_pre_hook(lambda *_: reducer.synchronize())
    return reducer
