"""Pipelines of the training benchmark: timed layers under haiscale's schedules and torch's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from bench.training.pipeline_figures import TORCH, chunks_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from haiscale.pipeline.module import Pipeline
    from torch import Tensor, nn

__all__ = ["PipelineModel", "PipelineTrainer"]


@dataclass(frozen=True, slots=True)
class PipelineModel:
    """Equal timed layers, two for each rank of a pipeline."""

    ranks: int
    """Of one pipeline. Rank r of the job is in stage r // replicas, as on nodes with one stage."""
    replicas: int
    """Pipelines; the replicas of a stage are neighbors, and share a node on the wire."""
    microbatches: int
    rows: int
    width: int
    """An activation has rows x width elements of 4 bytes."""

    @property
    def layers(self) -> int:
        """Layers of the model."""
        return 2 * self.ranks

    def build(self) -> nn.Sequential:
        """The model, the same on every rank."""
        from haiscale.testing import timed_model

        return timed_model(self.layers, self.width, 4 * self.width, 0.0)

    def inputs(self) -> list[Tensor]:
        """Micro-batches. Their gradients are computed, so that all stages take equal time."""
        generator = torch.Generator().manual_seed(7)
        size = (self.microbatches, self.rows, self.width)
        return [each.requires_grad_() for each in torch.rand(*size, generator=generator)]

    def targets(self) -> list[Tensor]:
        """Targets of the loss, which ignores them."""
        return [torch.zeros(1) for _ in range(self.microbatches)]


def loss_fn(output: Tensor, _target: Tensor) -> Tensor:
    """The mean of the squares."""
    result: Tensor = output.square().mean()
    return result


class PipelineTrainer:
    """Steps of one variant: a schedule of haiscale over HFReduce, or torch's 1F1B over Gloo."""

    def __init__(
        self, spec: PipelineModel, variant: str, groups: dict[str, dist.ProcessGroup], rank: int
    ) -> None:
        self.module = spec.build()
        self._inputs, self._targets = spec.inputs(), spec.targets()
        self._pipeline: Pipeline | None = None
        group = _pipeline_group(spec, groups["gloo" if variant == TORCH else "hfreduce"], rank)
        self.step: Callable[[], Any]
        if variant == TORCH:
            self.step = self._torch(spec, group)
        else:
            self.step = self._haiscale(spec, variant, group)

    def set_seconds(self, seconds: float) -> None:
        """The time of the forward pass and of each part of the backward pass of one layer."""
        from haiscale.testing import TimedLayer

        for layer in self.module:
            assert isinstance(layer, TimedLayer)
            layer.forward_seconds = seconds
            layer.input_backward_seconds = seconds
            layer.weight_backward_seconds = seconds

    def steps(self, count: int) -> None:
        """Whole steps, without an optimizer."""
        for _ in range(count):
            self.module.zero_grad()
            for each in self._inputs:
                each.grad = None
            self.step()

    def digest(self) -> Tensor:
        """The sums of the gradients of each layer; 0 for those of other ranks."""
        sums = [
            sum(p.grad.double().sum().item() for p in layer.parameters() if p.grad is not None)
            for layer in self.module
        ]
        return torch.tensor(sums, dtype=torch.float64)

    def _haiscale(
        self, spec: PipelineModel, variant: str, group: dist.ProcessGroup
    ) -> Callable[[], Any]:
        from haiscale.pipeline.module import Pipeline
        from haiscale.pipeline.schedules import build

        schedule = build(
            variant,
            ranks=spec.ranks,
            microbatches=spec.microbatches,
            stages_per_rank=chunks_of(variant),
        )
        pipeline = Pipeline(self.module, schedule, loss_fn, group=group)
        return lambda: pipeline.step(self._inputs, self._targets)

    def _torch(self, spec: PipelineModel, group: dist.ProcessGroup) -> Callable[[], Any]:
        index = group.rank()
        own = self.module[2 * index : 2 * index + 2]
        stage = PipelineStage(own, index, spec.ranks, torch.device("cpu"), group=group)
        schedule = Schedule1F1B(
            stage,
            spec.microbatches,
            loss_fn=lambda output, target: loss_fn(output, target) / spec.microbatches,
            scale_grads=False,
        )

        def step() -> None:
            arguments = [(each,) for each in self._inputs] if stage.is_first else None
            targets = self._targets if stage.is_last else None
            schedule.step(arg_mbs=arguments, target_mbs=targets, return_outputs=False)

        return step


def _pipeline_group(spec: PipelineModel, parent: dist.ProcessGroup, rank: int) -> dist.ProcessGroup:
    """The ranks of this rank's pipeline, in the order of the stages."""
    if spec.replicas == 1:
        return parent
    replica = rank % spec.replicas
    group = dist.new_group(
        [stage * spec.replicas + replica for stage in range(spec.ranks)],
        backend=dist.get_backend(parent),
        use_local_synchronization=True,
    )
    assert isinstance(group, dist.ProcessGroup)
    return group
