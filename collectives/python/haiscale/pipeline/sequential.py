"""The part of a model that a rank of a pipeline has: `SequentialModel` and `partition`.

A part has the model's own layers, not copies. It describes the other ranks' layers by parameters on
the meta device, so that the ranks can compare their models and find shared parameters: the memory
of these layers is released once the script releases the model.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from torch import nn

from haiscale.pipeline import layers
from haiscale.pipeline.errors import PartitionError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = [
    "ModelPart",
    "Place",
    "SequentialModel",
    "all_layers",
    "change",
    "layers_of",
    "partition",
    "signature_of",
]


class SequentialModel(nn.Sequential):
    """Layers that are called one after the other; a tuple becomes the next layer's arguments."""

    def forward(self, *values: Any) -> Any:
        """Calls each layer with the outputs of the layer before."""
        result: Any = values
        for layer in self:
            result = layer(*result) if isinstance(result, tuple) else layer(result)
        return result


@dataclass(frozen=True)
class Place:
    """Where a stage is in its model."""

    rank: int
    """Rank of the pipeline that has the stage."""
    ranks: int
    """Number of ranks of the pipeline."""
    stage: int
    split: tuple[int, ...]
    """Number of layers of each stage of the pipeline."""
    others: dict[str, nn.Module | None]
    """All layers of the model in their order: descriptions, and None for those of the rank."""
    signature: dict[str, str]
    """What the ranks compare, from `signature_of`."""

    @property
    def names(self) -> list[str]:
        """The names of the stage's layers."""
        end = sum(self.split[: self.stage + 1])
        return list(self.others)[end - self.split[self.stage] : end]


class ModelPart(SequentialModel):
    """One stage of a model; its layers have their names in the whole model.

    A slice is a SequentialModel of the same layers, which is not a stage.
    """

    def __init__(self, named: Mapping[str, nn.Module], place: Place) -> None:
        super().__init__()
        for name, layer in named.items():
            self.add_module(name, layer)
        self.place_in_model = place  # a long name, since layers have any other one

    def __getitem__(self, index: slice | int) -> Any:
        """A layer of this stage by its place, or a SequentialModel of several."""
        if isinstance(index, slice):
            return SequentialModel(OrderedDict(list(layers_of(self).items())[index]))
        return super().__getitem__(index)

    def append(self, module: nn.Module) -> NoReturn:
        """Refused: torch numbers layers by their place in the stage, not in the model."""
        raise self._refused(module)

    def insert(self, index: int, module: nn.Module) -> NoReturn:  # noqa: ARG002  (torch's)
        """Refused, as `append`."""
        raise self._refused(module)

    def extend(self, sequential: Iterable[nn.Module]) -> NoReturn:
        """Refused, as `append`."""
        raise self._refused(sequential)

    def __iadd__(self, other: Iterable[nn.Module]) -> NoReturn:  # type: ignore[misc]
        """Refused, as `append`."""
        raise self._refused(other)

    def _refused(self, added: object) -> PartitionError:
        return PartitionError(
            f"{type(added).__name__} cannot be added to stage {self.place_in_model.stage}: add "
            "layers to the model before partition"
        )


def partition(
    model: nn.Sequential,
    rank: int,
    size: int,
    balance: Sequence[int] | None = None,
    num_model_chunks: int = 1,
) -> Any:
    """The stage of a rank, or with several chunks the list of its stages.

    The stages have the model's layers, not copies: an optimizer that has their parameters keeps
    them. Layers of other ranks are released with the model, once the script has no name for it.

    Args:
        model: All layers of the model, with the same names and shapes on every rank.
        rank: Rank in the pipeline.
        size: Number of ranks of the pipeline.
        balance: Number of layers of each stage; default: equal numbers.
        num_model_chunks: Stages of each rank; rank r has the stages r, r + size, and so on.

    Raises:
        PartitionError: The layers do not fit the stages, or the arguments are invalid.
    """
    if not isinstance(model, nn.Sequential):
        raise PartitionError(
            f"model is of type {type(model).__name__}: pass an nn.Sequential or a SequentialModel"
        )
    if not 0 <= rank < size:
        raise PartitionError(f"rank {rank} of size {size}: expected a rank from 0 to {size - 1}")
    if num_model_chunks < 1:
        raise PartitionError(f"num_model_chunks={num_model_chunks}: expected at least 1")
    named = layers.named_layers(model)
    places = layers.partition(list(named), size * num_model_chunks, balance)
    stages = range(rank, len(places), size)
    others = _described(named, {name for stage in stages for name in places[stage]})
    split, signature = tuple(len(names) for names in places), signature_of(named)
    parts = [
        ModelPart(
            {name: named[name] for name in places[stage]},
            Place(rank, size, stage, split, others, signature),
        )
        for stage in stages
    ]
    return parts[0] if num_model_chunks == 1 else parts


def layers_of(part: ModelPart) -> dict[str, Any]:
    """The layers that a stage has now, by name; one layer may have several names."""
    return dict(part._modules)


def all_layers(parts: Sequence[ModelPart]) -> dict[str, nn.Module]:
    """The layers of the model: those in the stages of a rank, and descriptions of the others."""
    own = {name: layer for part in parts for name, layer in layers_of(part).items()}
    described = parts[0].place_in_model.others.items()
    return {name: own[name] if layer is None else layer for name, layer in described}


def signature_of(named: Mapping[str, nn.Module]) -> dict[str, str]:
    """All parameters and which of them are shared, by name."""
    shared = "; ".join(" ".join(names) for names in layers.ties(named)) or "nothing"
    return {**dict(layers.kinds(named)), "shared": shared}


def change(parts: Sequence[ModelPart]) -> str | None:
    """The first parameter of a model that is not as it was in `partition`; None if all are."""
    before, now = parts[0].place_in_model.signature, signature_of(all_layers(parts))
    for name in {**before, **now}:
        if before.get(name) != now.get(name):
            return f"{name!r} was {before.get(name, 'missing')}, now {now.get(name, 'missing')}"
    return None


def _described(named: Mapping[str, nn.Module], own: set[str]) -> dict[str, nn.Module | None]:
    """Layers without memory, whose shared parameters are shared; None for those of a rank."""
    copies = {p: p for name in own for p in named[name].parameters()}
    return {
        name: None if name in own else layers.describe(layer, copies)
        for name, layer in named.items()
    }
