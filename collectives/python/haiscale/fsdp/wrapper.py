"""`FullyShardedDataParallel`: `fully_shard` with the interface of HaiScale's training scripts.

    model = FullyShardedDataParallel(model, auto_wrap_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters())

A policy is one of torch's: a function of a module, of whether its children are going to be asked,
and of the number of its parameters that are not wrapped yet.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import BackwardPrefetch, FSDPModule, ShardingStrategy
from torch.distributed.tensor import DTensor

from haiscale.fsdp.full import FullParameters, mark
from haiscale.fsdp.shard import fully_shard
from haiscale.unsupported import UnsupportedArgumentError, refuse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from torch import Tensor

__all__ = ["FullyShardedDataParallel"]

NAME: Final = "FullyShardedDataParallel"
BY_FULLY_SHARD: Final = "call haiscale.fsdp.fully_shard instead, with "
REMEDIES: Final = {
    "sharding_strategy": BY_FULLY_SHARD + "reshard_after_forward and a mesh of one or two axes",
    "cpu_offload": BY_FULLY_SHARD + "offload_policy",
    "mixed_precision": BY_FULLY_SHARD + "mp_policy",
    "ignored_modules": BY_FULLY_SHARD + "ignored_params",
    "ignored_states": BY_FULLY_SHARD + "ignored_params",
    "device_mesh": BY_FULLY_SHARD + "mesh",
    "param_init_fn": "build the model with its first values; rank 0's are used",
    "device_id": "move the module to its device first",
    "sync_module_states": "leave it out: rank 0's values are always used",
    "use_orig_params": "leave it out: parameters always have their names",
    "forward_prefetch": "leave it out: gathers always overlap with computation",
    "limit_all_gathers": "leave it out: gathers are at most one module ahead",
}
SATISFIED: Final[dict[str, tuple[object, ...]]] = {
    "sharding_strategy": (None, ShardingStrategy.FULL_SHARD),
    "cpu_offload": (None,),
    "mixed_precision": (None,),
    "ignored_modules": (None,),
    "ignored_states": (None,),
    "device_mesh": (None,),
    "param_init_fn": (None,),
    "device_id": (None,),
    "sync_module_states": (True,),
    "use_orig_params": (True,),
    "forward_prefetch": (True,),
}
"""Values of these arguments that ask for what happens in any case."""

SUMMON: Final = "summon_full_params"
SUMMON_REMEDIES: Final = {
    "recurse": "leave it out: the parameters of all modules are full",
    "writeback": "leave it out: what is written inside is kept; write to copies",
    "rank0_only": "leave it out, and save on one rank",
    "offload_to_cpu": "leave it out, and copy each parameter with cpu()",
    "with_grads": "leave it out, and read full_tensor() of each gradient outside",
}
SUMMON_SATISFIED: Final[dict[str, tuple[object, ...]]] = {
    "recurse": (True,),
    "writeback": (True,),
    "rank0_only": (False,),
    "offload_to_cpu": (False,),
    "with_grads": (False,),
}


class FullyShardedDataParallel(nn.Module):
    """A model whose parameters are sharded over the ranks of a group; `module` is the model.

    Args:
        module: The model, on its device.
        process_group: Ranks that hold the shards; default: all ranks.
        auto_wrap_policy: Which modules are gathered separately. Default: none, the whole model is
            gathered at once.
        backward_prefetch: When backward gathers the next module's parameters: before it computes
            the gradients of the current one (BACKWARD_PRE), or after (BACKWARD_POST), with less
            memory. None is the same as BACKWARD_POST.
        others: Other arguments of torch's class are refused, except for values that ask for what
            happens in any case, such as `sharding_strategy=ShardingStrategy.FULL_SHARD`,
            `sync_module_states=True`, `use_orig_params=True` or `mixed_precision=None`.

    Raises:
        UnsupportedArgumentError: An argument is not supported; no parameter has been changed.
        ModelMismatchError: The module of a rank differs; on every rank.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup | None = None,
        *,
        auto_wrap_policy: Callable[..., bool] | None = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        **others: object,
    ) -> None:
        refuse(NAME, _unsatisfied(others, SATISFIED), REMEDIES)
        if not isinstance(process_group, dist.ProcessGroup | None):
            raise UnsupportedArgumentError(
                NAME, "process_group", process_group, BY_FULLY_SHARD + "a mesh of one or two axes"
            )
        if auto_wrap_policy is not None and not callable(auto_wrap_policy):
            raise UnsupportedArgumentError(
                NAME, "auto_wrap_policy", auto_wrap_policy, "pass a function of torch's wrap module"
            )
        if not isinstance(backward_prefetch, BackwardPrefetch | None):
            raise UnsupportedArgumentError(
                NAME, "backward_prefetch", backward_prefetch, "pass a BackwardPrefetch or None"
            )
        super().__init__()
        mesh = None
        if process_group is not None:
            device = next((p.device for p in module.parameters()), torch.device("cpu"))
            mesh = DeviceMesh.from_group(process_group, device.type)
        before = list(module.parameters())
        inner = _wrapped(module, auto_wrap_policy)[0] if auto_wrap_policy is not None else []
        for each in [*(child for child in inner if child is not module), module]:
            fully_shard(each, mesh=mesh)
        kept = set(module.parameters())
        mark((p for p in before if p not in kept), f"before {NAME}")
        for part in module.modules():
            if isinstance(part, FullyShardedDataParallel):
                part._full.give_up()
        self.module = module
        self._full: FullParameters = FullParameters(module)
        self._prefetches = backward_prefetch is BackwardPrefetch.BACKWARD_PRE

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module."""
        self._full.before_forward()
        output = self.module(*args, **kwargs)
        if not torch.is_grad_enabled() and isinstance(self.module, FSDPModule):
            self.module.reshard()  # torch keeps the root's parameters full, for a backward pass
        if not self._prefetches:
            # After the first call: by then the forward pass has its prefetches.
            self._prefetches = True
            for each in _sharded(self.module):
                # In place of the next module; its own parameters are there already.
                each.set_modules_to_backward_prefetch([each])
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside accumulate gradients of full parameters, without collectives.

        They are added to those of the first backward pass outside, before which neither step nor
        clipping has them. They take the memory of all full gradients.
        """
        self._sync(enabled=False)
        try:
            yield
        finally:
            self._sync(enabled=True)

    def _sync(self, *, enabled: bool) -> None:
        for each in _sharded(self.module):
            each.set_requires_gradient_sync(enabled, recurse=False)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scales all gradients so that their norm is at most `max_norm`; returns the norm before.

        The norm is that of the whole model; every rank of the group calls it.
        """
        norm: Any = torch.nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type)
        result: Tensor = norm.full_tensor() if isinstance(norm, DTensor) else norm
        return result

    def summon_full_params(self, **others: object) -> AbstractContextManager[None]:
        """Modules have full parameters inside; on exit each rank keeps its shard of them.

        Every rank of the group enters it. `state_dict()` of the module and of its optimizers then
        have full values: the module's on every rank, the optimizers' on the group's first rank.
        An optimizer also loads such a state, inside or outside. A rank may leave it by an
        exception, as if it left it without one.

        Args:
            others: Arguments of torch's function are refused, except for its default values.

        Raises:
            FullParametersError: The optimizers of the ranks have different states, on every rank;
                a forward pass, a backward pass or a step inside, and a parameter of another shape
                on exit.
        """
        refuse(SUMMON, _unsatisfied(others, SUMMON_SATISFIED), SUMMON_REMEDIES)
        return self._full.summoned()


def _unsatisfied(
    arguments: dict[str, object], satisfied: dict[str, tuple[object, ...]]
) -> dict[str, object]:
    # By identity: values are of any type, and tensors are not compared.
    return {
        name: value
        for name, value in arguments.items()
        if not any(value is each for each in satisfied.get(name, ()))
    }


def _sharded(model: nn.Module) -> Iterator[FSDPModule]:
    return (each for each in model.modules() if isinstance(each, FSDPModule))


def _wrapped(module: nn.Module, policy: Callable[..., bool]) -> tuple[list[nn.Module], int]:
    """The modules that a policy selects, inner ones first, and the number of their parameters."""
    count = sum(p.numel() for p in module.parameters())
    if not policy(module=module, recurse=True, nonwrapped_numel=count):
        return [], 0
    selected: list[nn.Module] = []
    inside = 0
    for child in module.children():
        inner, size = _wrapped(child, policy)
        selected += inner
        inside += size
    if policy(module=module, recurse=False, nonwrapped_numel=count - inside):
        return [*selected, module], count
    return selected, inside
