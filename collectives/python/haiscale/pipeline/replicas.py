"""Averages of gradients over the replicas of a rank's stages, by the reducer of haiscale.ddp.

The averages of a stage start after its last backward pass, while other stages and other ranks still
compute. Stages of a rank that share a parameter are averaged together. Wrappers that a script made
copy the buffers of the first replica to the others once before each step, unless they have
`broadcast_buffers=False`; torch's class does it before each forward pass.
"""

from __future__ import annotations

from contextlib import contextmanager
from itertools import combinations
from typing import TYPE_CHECKING

import torch.distributed as dist

from haiscale.ddp import agreement, groups
from haiscale.ddp.module import DistributedDataParallel
from haiscale.moe.layer import MoE
from haiscale.pipeline.errors import PipelineError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import nn

__all__ = ["Replicas"]


class Replicas:
    """The averages of one rank.

    Args:
        module: All layers of the rank.
        stages: The stages of the rank.
        group: Replicas of the rank; None: there are none.
        wrapped: Wrappers that the script made, one for each stage, instead of a group.

    Raises:
        ValueError: The replicas have different experts.
    """

    def __init__(
        self,
        module: nn.Module,
        stages: Mapping[int, nn.Module],
        group: dist.ProcessGroup | None,
        wrapped: Sequence[DistributedDataParallel] = (),
    ) -> None:
        if group is not None:
            _check_experts(module)
        parts: dict[tuple[int, ...], nn.Module] = {(k,): stage for k, stage in stages.items()}
        if _share(stages):
            parts = {tuple(stages): module}
        self._parts = {
            part: DistributedDataParallel(layers, process_group=group, broadcast_buffers=False)
            for part, layers in parts.items()
            if group is not None and any(p.requires_grad for p in layers.parameters())
        }
        if wrapped:
            self._parts = {(k,): data for k, data in zip(stages, wrapped, strict=True)}
        self._missing: dict[tuple[int, ...], set[int]] = {}

    def start(self) -> None:
        """Before a step.

        Raises:
            PipelineError: A wrapper is in `no_sync`, or the replicas' buffers were not copied.
        """
        for part, data in self._parts.items():
            if not data.require_backward_grad_sync:
                raise PipelineError(
                    "the DistributedDataParallel is in no_sync(), but a pipeline averages in each "
                    "step: leave no_sync() out, averaged gradients accumulate to the same values",
                    rank=dist.get_rank(),
                    stage=part[0],
                )
            data.reducer.prepare(reduces=False)
            self._missing[part] = set(part)
            if data.broadcast_buffers:
                with _failing("broadcast of buffers to the replicas", part[0]):
                    agreement.broadcast(data.module.buffers(), data.process_group)

    def average(self, stage: int) -> None:
        """After the last gradient of a stage."""
        for part, data in self._parts.items():
            if stage in part:
                self._missing[part].remove(stage)
                if not self._missing[part]:
                    data.reducer.start()

    def finish(self) -> None:
        """Waits for all averages."""
        for part, data in self._parts.items():
            with _failing("average over the replicas", part[0]):
                data.synchronize()

    def fail(self, detail: str) -> None:
        """Ends the waits of other replicas."""
        for data in self._parts.values():
            if data.reducer.failure is None:
                data.reducer.fail(detail)
            if data.broadcast_buffers:  # the group of a bucket may be another one, with a priority
                groups.abort({data.process_group}, f"haiscale.{detail}")


@contextmanager
def _failing(operation: str, stage: int) -> Iterator[None]:
    """Names an operation between the replicas of a stage that fails."""
    try:
        yield
    except Exception as error:
        raise PipelineError(f"{operation}: {error}", rank=dist.get_rank(), stage=stage) from error


def _check_experts(module: nn.Module) -> None:
    """Replicas have equal parameters, but each rank of a layer's links has its own experts."""
    for layer in module.modules():
        if isinstance(layer, MoE) and layer.links.size > 1:
            raise ValueError(
                f"the experts of layer {layer.name!r} are on {layer.links.size} ranks, so "
                "data_group cannot average them: pass no data_group, and call "
                "haiscale.moe.average_gradients after step()"
            )


def _share(stages: Mapping[int, nn.Module]) -> bool:
    parameters = [set(stage.parameters()) for stage in stages.values()]
    return any(one & other for one, other in combinations(parameters, 2))
