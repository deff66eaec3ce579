"""States and hyperparameters of an optimizer by the full names of its parameters.

Optimizers number their parameters, and the numbers depend on the layout. Here a state is named
after its parameter and has that parameter's box; hyperparameters are kept for each parameter.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.distributed.tensor import DTensor

from haiscale.fsdp.steps import as_shard
from haiscale.state.boxes import Box
from haiscale.state.errors import StateMismatchError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.nn import Parameter
    from torch.optim import Optimizer

    from haiscale.state.boxes import Named

__all__ = ["Hyperparameters", "NamedOptimizer"]

Hyperparameters = dict[str, dict[str, Any]]
"""By the name of a parameter: the class of its optimizer, and the values of its group."""

IMPLEMENTATION: Final = frozenset(
    {"params", "param_names", "foreach", "fused", "capturable", "differentiable"}
)
"""Fields of a group that name its parameters or choose how a step is computed: the script's."""


class NamedOptimizer:
    """An optimizer of some parameters of a model; steps in flight are made first.

    Raises:
        ValueError: The optimizer has a parameter that is not in the model.
    """

    def __init__(self, optimizer: Optimizer, named: Named) -> None:
        self._optimizer, self._kind = optimizer, type(optimizer).__name__
        self._boxes = named.boxes
        self._packed = optimizer.state_dict()
        self._parameters: list[Parameter] = [
            parameter for group in optimizer.param_groups for parameter in group["params"]
        ]
        self._names = [self._name(parameter, named) for parameter in self._parameters]

    def _name(self, parameter: Parameter, named: Named) -> str:
        name = named.names.get(id(parameter))
        if name is None:
            raise ValueError(
                f"a parameter of {self._kind} of shape {tuple(parameter.shape)} is not in the "
                "model: make the optimizer from the model's parameters after the model was sharded "
                "or divided"
            )
        return name

    def states(self) -> dict[str, Box]:
        """The states as `PARAMETER.KEY`, for example `layers.0.attention.wq.weight.exp_avg`."""
        result = {}
        for index, name in enumerate(self._names):
            for key, value in self._packed["state"].get(index, {}).items():
                if "." in key:
                    raise TypeError(
                        f"the state {key!r} of {self._kind}: names with a dot cannot be saved"
                    )
                if value is not None:
                    result[f"{name}.{key}"] = _box(f"{name}.{key}", value, self._boxes[name])
        return result

    def hyperparameters(self) -> Hyperparameters:
        """The values of each parameter's group."""
        result = {}
        for group in self._packed["param_groups"]:
            values = {name: _plain(v) for name, v in group.items() if name not in IMPLEMENTATION}
            for index in group["params"]:
                result[self._names[index]] = {"class": self._kind, **values}
        return result

    def targets(self, saved: Mapping[str, tuple[torch.Size, torch.dtype]]) -> dict[str, Box]:
        """Empty boxes for the states that a checkpoint has of these parameters.

        Args:
            saved: Shapes and types of all states of the checkpoint, named as those of `states`.
        """
        keys: dict[str, list[str]] = {}
        for name in saved:
            parameter, _, key = name.rpartition(".")
            keys.setdefault(parameter, []).append(key)
        boxes = {}
        for name in self._names:
            of = self._boxes[name]
            for full in (f"{name}.{key}" for key in keys.get(name, ())):
                shape, dtype = saved[full]
                if shape == of.shape:
                    empty = torch.empty(of.tensor.shape, dtype=dtype, device=of.tensor.device)
                    boxes[full] = Box(empty, shape, of.offsets)
                else:
                    boxes[full] = _box(full, torch.empty(shape, dtype=dtype), of)
        return boxes

    def setting(
        self, loaded: Mapping[str, Box], saved: Hyperparameters, checkpoint: str
    ) -> Callable[[], None]:
        """The call that sets loaded states and hyperparameters.

        Raises:
            StateMismatchError: The checkpoint has these parameters in another optimizer, or in
                other groups.
        """
        indices = {name: index for index, name in enumerate(self._names)}
        state: dict[int, dict[str, Any]] = {}
        for full, box in loaded.items():
            name, _, key = full.rpartition(".")
            index = indices[name]
            state.setdefault(index, {})[key] = _like(box, self._parameters[index])
        groups = [
            {**group, **self._values(group, saved, checkpoint)}
            for group in self._packed["param_groups"]
        ]
        return lambda: self._set(state, groups)

    def _set(self, state: dict[int, dict[str, Any]], groups: list[dict[str, Any]]) -> None:
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})
        # torch converts states to the type of their parameter.
        for index, values in state.items():
            loaded = self._optimizer.state[self._parameters[index]]
            loaded |= {k: v for k, v in values.items() if loaded[k].dtype != v.dtype}

    def _values(
        self, group: Mapping[str, Any], saved: Hyperparameters, checkpoint: str
    ) -> dict[str, Any]:
        """The saved values of a group: those of each of its parameters on this rank."""
        result: dict[str, Any] = {}
        for name in (self._names[index] for index in group["params"]):
            values = dict(saved.get(name, {"class": "no optimizer"}))
            kind = values.pop("class")
            if kind != self._kind:
                raise StateMismatchError(checkpoint, f"the optimizer of {name!r}", kind, self._kind)
            if result and values != result:
                raise StateMismatchError(
                    checkpoint,
                    f"the parameter group of {name!r}",
                    f"other hyperparameters than those of {self._names[group['params'][0]]!r}",
                    "one group with both",
                )
            result = values
        return {name: _as(value, group.get(name)) for name, value in result.items()}


def _box(name: str, value: Any, of: Box) -> Box:
    """The box of a state of a parameter with this box."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(
            f"the state {name!r} is a {type(value).__name__}: only optimizers whose states are "
            "tensors can be saved by name"
        )
    local = (value.to_local() if isinstance(value, DTensor) else value).detach()
    if local.shape == of.tensor.shape:
        return Box(local, of.shape, of.offsets)
    if of.is_whole or not local.dim():
        return Box(local, local.shape, torch.Size([0] * local.dim()))
    raise TypeError(
        f"the state {name!r} has the shape {tuple(local.shape)}, and the rank has "
        f"{tuple(of.tensor.shape)} of {tuple(of.shape)} of the parameter: states of divided "
        "parameters must have the parameter's shape or be scalars"
    )


def _like(box: Box, parameter: Parameter) -> torch.Tensor:
    local = box.tensor
    if isinstance(parameter, DTensor) and local.shape == parameter.to_local().shape:
        return as_shard(local, parameter)
    return local


def _plain(value: Any) -> Any:
    """A hyperparameter as JSON has it; a tensor, as torch allows for `lr`, as its number."""
    return json.loads(json.dumps(value.item() if isinstance(value, torch.Tensor) else value))


def _as(value: Any, before: Any) -> Any:
    if isinstance(before, torch.Tensor):
        return torch.full_like(before, value)
    return tuple(value) if isinstance(value, list) else value
