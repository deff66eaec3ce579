"""The optimizer's step of a parameter group, on this rank's shards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from haiscale.overlap.steps import ELEMENTWISE, Steps, WholeStep

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.nn import Parameter

__all__ = ["ShardSteps", "as_shard"]


class ShardSteps(Steps):
    """Steps on the shards as plain tensors; state, parameters and bits are those of DTensors.

    Dispatching a DTensor takes longer than most operations of a step. For a step the shards stand
    in for their parameters; a new state is wrapped as a DTensor afterwards.
    """

    independent = ELEMENTWISE
    at_once = frozenset({WholeStep.GRADIENTS_READ})

    def _run(
        self,
        terms: Sequence[dict[str, Any]],
        rows: Sequence[tuple[int, Parameter, Tensor | None]],
    ) -> None:
        state: Any = self.optimizer.state
        # It may run inside a forward pass in inference mode: new states would be of that mode.
        with torch.inference_mode(mode=False), torch.no_grad():
            shards: list[Any] = [_local(parameter).detach() for _, parameter, _ in rows]
            for shard, (_, parameter, _) in zip(shards, rows, strict=True):
                if parameter in state:
                    state[shard] = {name: _local(value) for name, value in state[parameter].items()}
            try:
                super()._run(
                    terms,
                    [
                        (group, shard, None if gradient is None else _local(gradient))
                        for shard, (group, _, gradient) in zip(shards, rows, strict=True)
                    ],
                )
            finally:
                for shard, (_, parameter, _) in zip(shards, rows, strict=True):
                    if shard in state:
                        _keep(state, parameter, state.pop(shard), shard.shape)


def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def _keep(state: Any, parameter: Parameter, values: dict[str, Any], shape: torch.Size) -> None:
    """Stores the state of a shard as that of its parameter."""
    known = state[parameter]
    for name, value in values.items():
        before = known.get(name)
        if isinstance(before, DTensor) and before.to_local() is value:
            continue
        is_shard = isinstance(value, torch.Tensor) and value.shape == shape
        known[name] = as_shard(value, parameter) if is_shard else value


def as_shard(local: Tensor, parameter: Tensor) -> Tensor:
    """A tensor of this rank's shard as a DTensor that is distributed as a parameter."""
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
