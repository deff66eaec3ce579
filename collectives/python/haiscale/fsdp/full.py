"""Full (unsharded) parameters and optimizer states of a sharded model, for a while.

Scripts save the model on one rank, inside `summon_full_params`, and the optimizer with it. An
optimizer is found when it makes its first step; states that it loaded before are sharded then.
"""

from __future__ import annotations

import hashlib
import weakref
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from haiscale.fsdp.shard import overlap
from haiscale.fsdp.steps import as_shard
from haiscale.internals import fsdp
from haiscale.internals.checkpoint import part_of
from haiscale.overlap.guards import plain
from haiscale.overlap.steps import observe_steps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, MutableMapping

    from torch import Tensor
    from torch.nn import Parameter
    from torch.optim import Optimizer

__all__ = ["FullParameters", "FullParametersError", "mark"]

Result = TypeVar("Result")

_REPLACED: Final[MutableMapping[Tensor, str]] = WeakTensorKeyDictionary()
"""Why the model does not have a parameter. No attributes: scripts may save the parameters."""


class FullParametersError(RuntimeError):
    """A call inside or around `summon_full_params` that would lose values."""


class _Described(NamedTuple):
    """An optimizer of a rank, to be compared with that of other ranks."""

    rank: int
    kind: str
    states: int
    digest: str
    """Of the names and shapes of all states."""


class FullParameters:
    """The full values of one sharded model; `model` was passed to `fully_shard` last."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._sharded = [each for each in model.modules() if isinstance(each, FSDPModule)]
        self._is_summoned = False
        self._is_part = False
        self._optimizers: list[weakref.ref[Optimizer]] = []
        """In the order of their first steps, which is that of the other ranks."""
        self._states: dict[Optimizer, dict[Parameter, dict[str, Any]]] = {}
        """Full states, on the first rank, while parameters are full."""
        # Of all optimizers, also later ones: the script does not pass them.
        self._search = observe_steps(_weakly(self, FullParameters._on_step))
        weakref.finalize(self, self._search.remove)

    def give_up(self) -> None:
        """The model is part of another one, which has the full values of both."""
        self._is_part = True
        self._search.remove()

    def before_forward(self) -> None:
        """Refuses forward passes with full parameters."""
        if self._is_summoned:
            raise FullParametersError(
                "a forward pass inside summon_full_params would use the shards: leave the context "
                "first"
            )

    @contextmanager
    def summoned(self) -> Iterator[None]:
        """Full parameters inside."""
        if self._is_part:
            raise FullParametersError(
                f"summon_full_params of {type(self._model).__name__}, a part of a sharded model: "
                "call it of the outermost FullyShardedDataParallel"
            )
        if self._is_summoned:
            raise FullParametersError("summon_full_params is active: leave the context first")
        if fsdp.is_in_backward():
            raise FullParametersError("summon_full_params inside backward: call it afterwards")
        overlap(self._model).synchronize()
        for each in self._sharded:
            each.reshard()
        places = list(_places(self._model))
        own = dict.fromkeys(parameter for *_, parameter in places)
        full = {p: _full(p) for p in own}
        states = self._gather_states()
        try:
            with ExitStack() as stack:
                self._is_summoned, self._states = True, states
                for module, name, parameter in places:
                    module._parameters[name] = full[parameter]
                for each in self._sharded:
                    known: Any = each
                    stack.enter_context(fsdp.keeping_shards(known))
                    # Before torch's, which would put the shards back into the modules.
                    refusal = known.register_forward_pre_hook(
                        lambda *_: self.before_forward(), prepend=True
                    )
                    stack.callback(refusal.remove)
                yield
        finally:
            self._is_summoned, self._states = False, {}
            _write(_put_back(places, full))

    def _gather_states(self) -> dict[Optimizer, dict[Parameter, dict[str, Any]]]:
        """One tensor after the other; only the first rank keeps them, in the host's memory."""
        states: dict[Optimizer, dict[Parameter, dict[str, Any]]] = {}
        for optimizer in self._on_all_ranks():
            for parameter in _parameters(optimizer):
                if not isinstance(parameter, DTensor):
                    continue
                known: dict[str, Any] = optimizer.state.get(parameter, {})
                full = {}
                for name in sorted(known):  # in the same order on every rank
                    value = known[name]
                    full[name] = value.full_tensor() if isinstance(value, DTensor) else value
                if _is_first(parameter):
                    own = states.setdefault(optimizer, {})
                    own[parameter] = {name: _on_host(value) for name, value in full.items()}
        return states

    def _on_all_ranks(self) -> list[Optimizer]:
        """Optimizers that exist on all ranks: garbage is not collected everywhere at once.

        Raises on every rank if their states differ, since each is a collective operation.
        """
        sharded = next((p for p in self._own() if isinstance(p, DTensor)), None)
        if sharded is None:
            return []
        known = [each() for each in self._optimizers]
        rows = [[None if each is None else _describe(each) for each in known]]
        for axis in range(sharded.device_mesh.ndim):
            group = sharded.device_mesh.get_group(axis)
            gathered: list[Any] = [None] * group.size()
            dist.all_gather_object(gathered, rows, group)
            rows = [row for others in gathered for row in others]
        if len({len(row) for row in rows}) > 1:
            raise FullParametersError(
                "summon_full_params: the ranks have made steps with different numbers of "
                f"optimizers, {min(map(len, rows))} to {max(map(len, rows))}: make each step on "
                "every rank"
            )
        result = []
        for each, column in zip(known, zip(*rows, strict=True), strict=True):
            found = [described for described in column if described is not None]
            if each is not None and len(found) == len(rows):
                _check_equal(found)
                result.append(each)
        return result

    def _own(self) -> Iterator[Parameter]:
        """The shards, also while modules have full or gathered parameters."""
        module: Any
        for module in self._sharded:
            for group in fsdp.parameter_groups(module):
                yield from fsdp.parameters(group)

    # Optimizers

    def _on_step(self, optimizer: Optimizer) -> None:
        parameters = _parameters(optimizer)
        for each in parameters:
            if (why := _REPLACED.get(each)) is not None:
                raise FullParametersError(
                    f"{type(optimizer).__name__} was made {why}, with parameters that the model "
                    "does not have: make it from model.parameters() of the wrapped model"
                )
        is_known = any(each() is optimizer for each in self._optimizers)
        if is_known and not self._is_summoned:
            return
        if set(self._own()).isdisjoint(parameters):
            return
        if self._is_summoned:
            raise FullParametersError(
                f"a step of {type(optimizer).__name__} inside summon_full_params would be "
                "overwritten by the full parameters: leave the context first"
            )
        self._optimizers.append(weakref.ref(optimizer))
        _shard(optimizer)
        optimizer.register_load_state_dict_pre_hook(_weakly(self, FullParameters._before_load))
        optimizer.register_load_state_dict_post_hook(_weakly(self, FullParameters._after_load))
        optimizer.register_load_state_dict_post_hook(_shard)
        optimizer.register_state_dict_post_hook(_weakly(self, FullParameters._replaced))

    def _before_load(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        loaded = [value for each in state["state"].values() for value in each.values()]
        if optimizer in self._states and any(isinstance(value, DTensor) for value in loaded):
            raise FullParametersError(
                f"{type(optimizer).__name__}.load_state_dict: a state with shards inside "
                "summon_full_params: load it outside the context, or load full values"
            )

    def _after_load(self, optimizer: Optimizer) -> None:
        """Keeps what was loaded in place of what was gathered, before it is sharded."""
        if optimizer in self._states:
            state: dict[Any, dict[str, Any]] = optimizer.state
            self._states[optimizer] = {
                parameter: {name: _on_host(value) for name, value in values.items()}
                for parameter, values in state.items()
            }

    def _replaced(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """A state dict of an optimizer with full values, where they are known."""
        full = self._states.get(optimizer)
        if full is None:
            return state
        numbered = dict(enumerate(_parameters(optimizer)))
        values = {
            number: full.get(numbered[number], value) for number, value in state["state"].items()
        }
        return {**state, "state": values}


def _weakly(
    full: FullParameters, method: Callable[..., Result | None]
) -> Callable[..., Result | None]:
    """A hook that does not keep the model in memory."""
    reference = weakref.ref(full)

    def hook(*args: Any) -> Result | None:
        own = reference()
        return None if own is None else method(own, *args)

    return hook


def _places(model: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    """Where the sharded parameters are; shared ones are in several places."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            value: Any = parameter
            if isinstance(value, DTensor):
                yield module, name, value


def mark(parameters: Iterable[Tensor], why: str) -> None:
    """Refuses later steps of optimizers that have these parameters."""
    for each in parameters:
        _REPLACED[each] = why


def _full(parameter: Any) -> Parameter:
    """The full parameter in place of a shard, for a while."""
    full: Any = nn.Parameter(parameter.full_tensor().detach(), parameter.requires_grad)
    mark([full], "inside summon_full_params")
    if full.requires_grad:
        full.register_post_accumulate_grad_hook(_refuse_gradient)
    result: Parameter = full
    return result


def _refuse_gradient(_parameter: Tensor) -> None:
    raise FullParametersError(
        "a backward pass inside summon_full_params would lose its gradients: leave the context "
        "first"
    )


def _put_back(
    places: list[tuple[nn.Module, str, Any]], full: dict[Any, Parameter]
) -> dict[Any, Tensor]:
    """Puts the shards into their modules again; returns the full values that were there."""
    values: dict[Any, Tensor] = dict(full)
    for module, name, parameter in places:
        value = module._parameters.get(name)
        # `load_state_dict(assign=True)` replaces the parameter, of shared ones in some places.
        if value is not None and value is not full[parameter]:
            values[parameter] = value
        module._parameters[name] = parameter
    return values


@torch.no_grad()
def _write(values: dict[Any, Tensor]) -> None:
    """Keeps this rank's part of full values; raises for those of other shapes, after the others."""
    unfit = None
    for parameter, value in values.items():
        if value.shape == parameter.shape:
            parameter.to_local().copy_(_own_part(value, parameter))
        else:
            unfit = (
                f"a parameter of shape {tuple(parameter.shape)} was replaced by one of shape "
                f"{tuple(value.shape)} inside summon_full_params: its values from before are "
                "kept; change shapes before the model is wrapped"
            )
    if unfit is not None:
        raise FullParametersError(unfit)


def _describe(optimizer: Optimizer) -> _Described:
    entries = [
        sorted(
            (name, isinstance(value, DTensor), tuple(getattr(value, "shape", ())))
            for name, value in optimizer.state.get(parameter, {}).items()
        )
        for parameter in _parameters(optimizer)
    ]
    digest = hashlib.sha256(repr(entries).encode()).hexdigest()
    return _Described(dist.get_rank(), type(optimizer).__name__, sum(map(bool, entries)), digest)


def _check_equal(optimizers: list[_Described]) -> None:
    first = optimizers[0]
    for other in optimizers:
        if other[1:] != first[1:]:
            raise FullParametersError(
                f"summon_full_params: {other.kind} has states of {other.states} parameters on rank "
                f"{other.rank}, {first.kind} of {first.states} on rank {first.rank}, or of other "
                "shapes: load the same state on every rank"
            )


def _is_first(parameter: DTensor) -> bool:
    mesh = parameter.device_mesh
    return bool(mesh.get_rank() == mesh.mesh.flatten()[0])


def _shard(optimizer: Optimizer) -> None:
    """Keeps this rank's part of full states that were loaded."""
    for parameter, values in optimizer.state.items():
        if not isinstance(parameter, DTensor):
            continue
        for name, value in values.items():
            is_full = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
            if is_full and value.dim() and value.shape == parameter.shape:
                part = _own_part(value, parameter).clone()
                values[name] = as_shard(part, parameter)


def _parameters(optimizer: Optimizer) -> list[Parameter]:
    # Without waiting: the steps of other models stay split.
    return [p for group in optimizer.param_groups for p in plain(group["params"])]


def _own_part(full: Tensor, parameter: DTensor) -> Tensor:
    offsets, sizes = part_of(parameter)
    return full[tuple(slice(at, at + n) for at, n in zip(offsets, sizes, strict=True))]


def _on_host(value: Any) -> Any:
    return value.cpu() if isinstance(value, torch.Tensor) else value
