"""Whole parameters and whole states of optimizers of a sharded model, for a while.

Scripts save the model on one rank, inside `summon_full_params`, and the optimizer with it. An
optimizer is found when it makes its first step; states that it loaded before are divided then.
"""

from __future__ import annotations

import weakref
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from haiscale.fsdp.shard import overlap
from haiscale.fsdp.steps import as_shard
from haiscale.internals import fsdp
from haiscale.internals.checkpoint import part_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor
    from torch.nn import Parameter
    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle

__all__ = ["FullParameters"]


class FullParameters:
    """The whole values of one sharded model; `model` was passed to `fully_shard` last."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._is_summoned = False
        self._optimizers: list[Optimizer] = []
        self._states: dict[Optimizer, dict[Parameter, dict[str, Any]]] = {}
        """Whole states, on the first rank, while parameters are whole."""
        self._parameters = set(model.parameters())
        found = weakref.WeakMethod(self._on_step)

        def on_step(optimizer: Optimizer, *_: object) -> None:
            if (own := found()) is not None:
                own(optimizer)

        # Of all optimizers: none is known here, and the script does not pass one.
        self._search: RemovableHandle | None = register_optimizer_step_pre_hook(on_step)
        weakref.finalize(self, self._search.remove)

    def before_forward(self) -> None:
        """Refuses forward passes with whole parameters."""
        if self._is_summoned:
            raise RuntimeError(
                "a forward pass inside summon_full_params would use the shards: leave the context "
                "first"
            )
        if self._search is not None and self._has_all():
            self._search.remove()
            self._search = None

    @contextmanager
    def summoned(self) -> Iterator[None]:
        """Whole parameters inside."""
        if self._is_summoned:
            raise RuntimeError("summon_full_params is active: leave the context first")
        overlap(self._model).synchronize()
        sharded = [each for each in self._model.modules() if isinstance(each, FSDPModule)]
        for each in sharded:
            each.reshard()
        places = list(_places(self._model))
        own = dict.fromkeys(parameter for *_, parameter in places)
        whole = {p: nn.Parameter(p.full_tensor().detach(), p.requires_grad) for p in own}
        self._gather_states()
        self._is_summoned = True
        for module, name, parameter in places:
            module._parameters[name] = whole[parameter]
        try:
            with ExitStack() as stack:
                for each in sharded:
                    stack.enter_context(fsdp.keeping_shards(each))
                yield
        finally:
            self._is_summoned = False
            self._states = {}
            for module, name, parameter in places:
                module._parameters[name] = parameter
            with torch.no_grad():
                for parameter, value in whole.items():
                    parameter.to_local().copy_(_own_part(value, parameter))

    def _gather_states(self) -> None:
        """One tensor after the other; only the first rank keeps them, in the host's memory."""
        for optimizer in self._optimizers:
            for parameter in _parameters(optimizer):
                if not isinstance(parameter, DTensor):
                    continue
                known: dict[str, Any] = optimizer.state.get(parameter, {})
                whole = {
                    name: value.full_tensor() if isinstance(value, DTensor) else value
                    for name, value in known.items()
                }
                if parameter.device_mesh.get_rank() == parameter.device_mesh.mesh.flatten()[0]:
                    own = self._states.setdefault(optimizer, {})
                    own[parameter] = {name: _on_host(value) for name, value in whole.items()}

    # Optimizers

    def _on_step(self, optimizer: Optimizer) -> None:
        own = self._parameters.intersection(_parameters(optimizer))
        if not own or optimizer in self._optimizers:
            return
        self._optimizers.append(optimizer)
        _divide(optimizer)
        optimizer.register_load_state_dict_post_hook(_divide)
        optimizer.register_state_dict_post_hook(partial(_replace, weakref.ref(self)))

    def _has_all(self) -> bool:
        known = {p for optimizer in self._optimizers for p in _parameters(optimizer)}
        return all(p in known for p in self._parameters if p.requires_grad)

    def replaced(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """A state dict of an optimizer with whole values, where they are known."""
        whole = self._states.get(optimizer)
        if whole is None:
            return state
        numbered = dict(enumerate(_parameters(optimizer)))
        values = {
            number: whole.get(numbered[number], value) for number, value in state["state"].items()
        }
        return {**state, "state": values}


def _replace(
    full: weakref.ref[FullParameters], optimizer: Optimizer, state: dict[str, Any]
) -> dict[str, Any]:
    found = full()
    return state if found is None else found.replaced(optimizer, state)


def _places(model: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    """Where the sharded parameters are; shared ones are in several places."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            value: Any = parameter
            if isinstance(value, DTensor):
                yield module, name, value


def _divide(optimizer: Optimizer) -> None:
    """Keeps this rank's part of whole states that were loaded."""
    for parameter, values in optimizer.state.items():
        if not isinstance(parameter, DTensor):
            continue
        for name, value in values.items():
            is_whole = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
            if is_whole and value.dim() and value.shape == parameter.shape:
                part = _own_part(value, parameter).clone()
                values[name] = as_shard(part, parameter)  # type: ignore[arg-type]


def _parameters(optimizer: Optimizer) -> list[Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _own_part(whole: Tensor, parameter: DTensor) -> Tensor:
    offsets, sizes = part_of(parameter)
    return whole[tuple(slice(at, at + n) for at, n in zip(offsets, sizes, strict=True))]


def _on_host(value: Any) -> Any:
    return value.cpu() if isinstance(value, torch.Tensor) else value
