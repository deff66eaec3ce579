"""A model's layers divided into stages, with the names that they have in the whole model."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from haiscale.internals.recomputation import recomputed
from haiscale.pipeline.errors import PartitionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch.nn import Parameter

__all__ = [
    "StageModule",
    "Tie",
    "describe",
    "kinds",
    "named_layers",
    "parameters",
    "partition",
    "ties",
    "tree",
]

Tie = tuple[str, ...]
"""Names of one parameter, in the order of the layers."""


def named_layers(layers: nn.Sequential | nn.ModuleDict | Mapping[str, nn.Module]) -> dict[str, Any]:
    """The layers in their order, by name; names may have dots, as in a state dict."""
    named = dict(layers._modules if isinstance(layers, nn.Module) else layers)
    if not named:
        raise PartitionError("the model has no layers: pass at least one for each stage")
    for name, layer in named.items():
        if not isinstance(layer, nn.Module):
            raise PartitionError(f"layer {name!r} is of type {type(layer).__name__}: pass modules")
        if not all(name.split(".")):
            raise PartitionError(f"invalid name {name!r} of a layer: it has an empty part")
    for name, other in pairwise(sorted(named)):
        if other.startswith(f"{name}."):
            raise PartitionError(f"layer {other!r} has the name of a part of layer {name!r}")
    return named


def partition(
    names: Sequence[str], stages: int, split: Sequence[int] | None = None
) -> list[tuple[str, ...]]:
    """The names of each stage's layers.

    Args:
        names: Of all layers, in order.
        stages: Number of stages.
        split: Number of layers of each stage. Default: equal numbers, where they do not divide one
            layer more in the first stages.

    Raises:
        PartitionError: There are fewer layers than stages, or `split` does not fit.
    """
    count = len(names)
    if count < stages:
        raise PartitionError(
            f"{count} layers cannot be divided into {stages} stages: use fewer stages or divide "
            "the layers"
        )
    sizes = split if split is not None else [len(range(k, count, stages)) for k in range(stages)]
    if len(sizes) != stages or sum(sizes) != count or min(sizes) < 1:
        raise PartitionError(
            f"split {list(sizes)} does not divide {count} layers into {stages} stages: give "
            f"{stages} numbers above 0 whose sum is {count}"
        )
    ends = [sum(sizes[: k + 1]) for k in range(stages)]
    return [tuple(names[end - size : end]) for end, size in zip(ends, sizes, strict=True)]


class StageModule(nn.Module):
    """Layers that are called one after the other, at their places in the whole model."""

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.order = tuple(layers)
        self.recomputes: Callable[[], bool] = lambda: False
        """Whether the current pass drops its activations, and backward recomputes them."""
        for name, layer in layers.items():
            _attach(self, name, layer)

    def forward(self, *values: Any) -> Any:
        """Calls each layer with the outputs of the layer before."""
        if torch.is_grad_enabled() and self.recomputes():
            return recomputed(self._pass, self, *values)
        return self._pass(*values)

    def _pass(self, *values: Any) -> Any:
        result: Any = values
        for name in self.order:
            layer = self.get_submodule(name)
            result = layer(*result) if isinstance(result, tuple) else layer(result)
        return result


def tree(layers: Mapping[str, nn.Module]) -> nn.Module:
    """A module that contains layers under their names; it is not called."""
    root = nn.Module()
    for name, layer in layers.items():
        _attach(root, name, layer)
    return root


def _attach(root: nn.Module, name: str, layer: nn.Module) -> None:
    folder, last = _folder(root, name)
    folder.add_module(last, layer)


def _folder(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    *folders, last = name.split(".")
    for folder in folders:
        if folder not in root._modules:
            root.add_module(folder, nn.Module())
        root = root.get_submodule(folder)
    return root, last


def describe(layer: nn.Module, copies: dict[Parameter, Parameter]) -> nn.Module:
    """A module with a layer's parameters on the meta device, under their names; it is not called.

    `copies` has the description of each parameter; new ones are added.
    """
    root = nn.Module()
    for name, parameter in layer.named_parameters(remove_duplicate=False):
        if parameter not in copies:
            empty = torch.empty_like(parameter, device="meta")
            copies[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        folder, last = _folder(root, name)
        folder.register_parameter(last, copies[parameter])
    return root


def parameters(layers: Mapping[str, nn.Module]) -> Iterable[tuple[str, Parameter]]:
    """All names of all parameters, of shared ones too."""
    for name, layer in layers.items():
        for inner, parameter in layer.named_parameters(remove_duplicate=False):
            yield f"{name}.{inner}", parameter


def kinds(layers: Mapping[str, nn.Module]) -> Iterable[tuple[str, str]]:
    """All names of parameters, and what ranks must agree on about each."""
    for name, parameter in parameters(layers):
        trained = " trained" * parameter.requires_grad
        yield name, f"{tuple(parameter.shape)} {parameter.dtype}{trained}"


def ties(layers: Mapping[str, nn.Module]) -> list[Tie]:
    """Parameters with several names, in the order of the layers."""
    names: dict[Parameter, list[str]] = {}
    for name, parameter in parameters(layers):
        names.setdefault(parameter, []).append(name)
    return [tuple(each) for each in names.values() if len(each) > 1]
