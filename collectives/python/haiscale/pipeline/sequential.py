"""The part of a model that a rank of a pipeline has: `SequentialModel` and `partition`.

A part has the model's own layers, not copies. It describes the other ranks' layers by parameters on
the meta device, so that the ranks can compare their models and find shared parameters: the memory
of these layers is released once the script releases the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from haiscale.pipeline import layers
from haiscale.pipeline.errors import PartitionError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["ModelPart", "SequentialModel", "partition"]


class SequentialModel(nn.Sequential):
    """Layers that are called one after the other; a tuple becomes the next layer's arguments."""

    def forward(self, *values: Any) -> Any:
        """Calls each layer with the outputs of the layer before."""
        result: Any = values
        for layer in self:
            result = layer(*result) if isinstance(result, tuple) else layer(result)
        return result


class ModelPart(SequentialModel):
    """One stage of a model; its layers have their names in the whole model.

    Args:
        named: The layers of this stage.
        whole: All layers of the model, those of other ranks on the meta device.
        rank: Rank of the pipeline that has the stage.
        ranks: Number of ranks of the pipeline.
        split: Number of layers of each stage of the pipeline.
    """

    def __init__(
        self,
        named: Mapping[str, nn.Module],
        whole: Mapping[str, nn.Module],
        rank: int,
        ranks: int,
        split: Sequence[int],
    ) -> None:
        super().__init__()
        for name, layer in named.items():
            self.add_module(name, layer)
        self.rank, self.ranks, self.split = rank, ranks, tuple(split)
        self.whole = dict(whole)


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
    own = [places[stage] for stage in range(rank, len(places), size)]
    whole = _described(named, {name for names in own for name in names})
    split = [len(names) for names in places]
    parts = [ModelPart({n: named[n] for n in names}, whole, rank, size, split) for names in own]
    return parts[0] if num_model_chunks == 1 else parts


def _described(named: Mapping[str, nn.Module], own: set[str]) -> dict[str, nn.Module]:
    """The layers of a rank, and others without memory; shared parameters are shared."""
    copies = {p: p for name in own for p in named[name].parameters()}
    return {
        name: layer if name in own else layers.describe(layer, copies)
        for name, layer in named.items()
    }
