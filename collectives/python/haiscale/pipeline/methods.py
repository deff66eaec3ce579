"""`PipeDream`, `GPipe` and `Interleaved1F1B`: pipelines with the interface of HaiScale's scripts.

    dp_group, pp_group = make_subgroups(pp_size=8)
    part = partition(model, pp_group.rank(), pp_group.size(), balance=[4, 4, 4, 3, 3, 3, 3, 2])
    part = DistributedDataParallel(part, process_group=dp_group)
    pipeline = PipeDream(part, chunks=32, process_group=pp_group)
    losses, outputs = pipeline.forward_backward(tokens, criterion=criterion, labels=(tokens,))

Each is a schedule of `haiscale.pipeline.module.Pipeline`, with its checks, bits and errors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from haiscale.ddp.module import DistributedDataParallel
from haiscale.pipeline.errors import PartitionError
from haiscale.pipeline.microbatches import Tensors
from haiscale.pipeline.module import Pipeline
from haiscale.pipeline.schedules import build
from haiscale.pipeline.sequential import ModelPart, all_layers, change, layers_of
from haiscale.unsupported import UnsupportedArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from torch import Tensor

    from haiscale.pipeline.sequential import Place

__all__ = ["GPipe", "Interleaved1F1B", "PipeDream"]


@dataclass
class _Step:
    """A call of forward_backward. Not a module: a criterion's parameters are not the pipeline's."""

    criterion: Callable[..., Tensor]
    keeps: bool
    losses: list[Tensor] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)

    def loss(self, output: Any, labels: Any) -> Tensor:
        loss = self.criterion(output, *(labels if isinstance(labels, tuple) else (labels,)))
        self.losses.append(loss.detach())
        if self.keeps:
            self.outputs.append(_detached(output))
            self._check_outputs()
        return loss

    def _check_outputs(self) -> None:
        found, expected = (
            [tuple(each.shape) for each in _tensors(self.outputs[at])] for at in (-1, 0)
        )
        # The numbers of rows may differ.
        if [(len(s), s[1:]) for s in found] != [(len(s), s[1:]) for s in expected]:
            raise ValueError(
                f"the outputs have the shapes {found} after {expected}: make all dimensions but "
                "the first equal, or pass return_outputs=False"
            )


class _Method(nn.Module):
    """A pipeline as a module; `pipeline` is the `Pipeline` that runs it."""

    schedule: ClassVar[str]

    def __init__(
        self,
        module: nn.Module,
        wrapped: Sequence[nn.Module],
        chunks: int,
        process_group: dist.ProcessGroup | None,
        recompute: Collection[int] = (),
    ) -> None:
        super().__init__()
        group = process_group if process_group is not None else dist.group.WORLD
        if group is None:
            raise ValueError("torch.distributed is not initialized: call init_process_group first")
        name = type(self).__name__
        parts = _parts_of(name, wrapped, group)
        self.module = module
        self.chunks = chunks
        self._step: _Step | None = None
        self._layers = [(part, layers_of(part)) for part in parts]
        self.pipeline = Pipeline(
            all_layers(parts),
            build(
                self.schedule,
                ranks=group.size(),
                microbatches=chunks,
                stages_per_rank=len(parts),
            ),
            self._loss,
            group=group,
            wrapped=[each for each in wrapped if isinstance(each, DistributedDataParallel)],
            split=parts[0].place_in_model.split,
            recompute=recompute,
        )

    def forward_backward(
        self,
        *inputs: Tensor,
        criterion: Callable[..., Tensor],
        labels: Sequence[Tensor] = (),
        return_outputs: bool = True,
    ) -> tuple[Tensor | None, Any]:
        """Adds the gradients of a batch; the criterion's losses are not scaled.

        Args:
            inputs: Arguments of the first layer, each divided along its first dimension. Ranks
                without the first stage ignore them.
            criterion: Loss of a micro-batch from the last layer's output and the labels.
            labels: Further arguments of the criterion, divided likewise. Ranks without the last
                stage ignore them.
            return_outputs: False releases the outputs of each micro-batch with its backward pass.

        Returns:
            The loss of each micro-batch, and the outputs of all of them, on the rank with the last
            stage; None and None on other ranks. An output without dimensions, such as an auxiliary
            loss, becomes a vector with a number for each micro-batch.

        Raises:
            PipelineError: A rank failed, for example because a tensor does not divide into the
                micro-batches, or a deadline passed. Raised on every rank.
        """
        self._check_layers()
        step = self._step = _Step(criterion, keeps=return_outputs)
        arguments = Tensors("inputs", inputs) if inputs else None
        self.pipeline.step(arguments, Tensors("labels", labels), scale=1.0)
        # The first step computes one loss more: stages find out the shapes that they receive.
        losses, outputs = step.losses[-self.chunks :], step.outputs[-self.chunks :]
        self._step = None
        if not losses:
            return None, None
        return torch.stack(losses), _joined(outputs) if return_outputs else None

    def forward(self, *inputs: Tensor) -> Any:
        """The last layer's output without gradients, or None on ranks without the last stage."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{type(self).__name__} was called with gradients enabled: call forward_backward "
                "to train, or use torch.no_grad() to evaluate"
            )
        self._check_layers()
        outputs = self.pipeline.evaluate(Tensors("inputs", inputs) if inputs else ())
        return None if outputs is None else _joined(outputs)

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scales gradients to a norm over all stages; returns that norm. Every rank calls it.

        `torch.nn.utils.clip_grad_norm_` uses the norm of this rank's stages alone.
        """
        return self.pipeline.clip_grad_norm_(max_norm)

    def _check_layers(self) -> None:
        """Fails on all ranks if a stage has other layers than those that the pipeline uses."""
        name = type(self).__name__
        with self.pipeline.failing():
            for part, layers in self._layers:
                now = layers_of(part)
                stage = part.place_in_model.stage
                for layer in {**layers, **now}:
                    if layers.get(layer) is not now.get(layer):
                        raise PartitionError(
                            f"layer {layer!r} of stage {stage} was replaced after {name} was "
                            f"constructed, which uses the former one: replace layers before {name}"
                        )

    def _loss(self, output: Any, labels: Any) -> Tensor:
        assert self._step is not None, "forward_backward sets it"
        return self._step.loss(output, labels)


class PipeDream(_Method):
    """One stage on each rank, one forward and one backward pass in turn (1F1B).

    Args:
        module: What `partition` returns on this rank, or a DistributedDataParallel of it.
        chunks: Number of micro-batches of a step.
        process_group: The ranks of the pipeline; default: all ranks.

    Raises:
        PartitionError: The module is not a stage of this rank; on every rank of the group.
        ScheduleError: There are fewer micro-batches than the schedule needs.
        ModelMismatchError: A rank has a stage of another model.
    """

    schedule = "1F1B"

    def __init__(
        self, module: nn.Module, chunks: int, process_group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__(module, [module], chunks, process_group)


class GPipe(_Method):
    """One stage on each rank, all forward passes before all backward passes.

    Args:
        module: As of `PipeDream`.
        chunks: Number of micro-batches of a step.
        process_group: The ranks of the pipeline; default: all ranks.
        checkpoint: Micro-batches whose activations are recomputed in backward instead of kept:
            "always", "except_last" or "never".
    """

    schedule = "GPipe"

    def __init__(
        self,
        module: nn.Module,
        chunks: int,
        process_group: dist.ProcessGroup | None = None,
        checkpoint: str = "never",
    ) -> None:
        counts = {"always": chunks, "except_last": chunks - 1, "never": 0}
        if checkpoint not in counts:
            raise UnsupportedArgumentError(
                "GPipe", "checkpoint", checkpoint, f"pass one of {', '.join(counts)}"
            )
        super().__init__(module, [module], chunks, process_group, range(counts[checkpoint]))


class Interleaved1F1B(_Method):
    """1F1B over several stages of each rank.

    Args:
        modules: The list that `partition` returns with `num_model_chunks`, or a
            DistributedDataParallel of each.
        chunks: Number of micro-batches of a step, a multiple of the number of ranks.
        process_group: The ranks of the pipeline; default: all ranks.
    """

    schedule = "Interleaved1F1B"

    def __init__(
        self,
        modules: Sequence[nn.Module],
        chunks: int,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        if isinstance(modules, nn.Module):
            raise UnsupportedArgumentError(
                "Interleaved1F1B",
                "modules",
                type(modules).__name__,
                "pass the list that partition returns with num_model_chunks=2 or more",
            )
        super().__init__(nn.ModuleList(modules), list(modules), chunks, process_group)


def _parts_of(name: str, wrapped: Sequence[nn.Module], group: dist.ProcessGroup) -> list[ModelPart]:
    """The stages of this rank; raises on every rank of the group if one of them passes others."""
    parts = [each.module if isinstance(each, DistributedDataParallel) else each for each in wrapped]
    own = _problem(parts, wrapped, group)
    problems: list[str | None] = [None] * group.size()
    dist.all_gather_object(problems, own, group)
    for rank, problem in enumerate(problems):
        if problem is not None:
            raise PartitionError(f"{name}: {problem} (rank {dist.get_global_rank(group, rank)})")
    return [part for part in parts if isinstance(part, ModelPart)]


def _problem(
    parts: Sequence[nn.Module], wrapped: Sequence[nn.Module], group: dist.ProcessGroup
) -> str | None:
    if not parts:
        return "the list has no stages: pass the list that partition returns"
    stages: list[ModelPart] = []
    for number, part in enumerate(parts):
        if not isinstance(part, ModelPart):
            return (
                f"the module is of type {type(part).__name__}: pass what partition returns, or a "
                "DistributedDataParallel of it"
            )
        stages.append(part)
        problem = _misplaced(part.place_in_model, number, len(parts), group)
        problem = problem or _other_layers(part, stages[0])
        if problem is not None:
            return problem
    if group.size() > 1 and (changed := change(stages)) is not None:
        # Other ranks describe the model as it was.
        return f"the model was changed after partition: {changed}: change it before partition"
    return _not_averaged(stages, wrapped)


def _misplaced(place: Place, number: int, count: int, group: dist.ProcessGroup) -> str | None:
    if (place.rank, place.ranks) != (group.rank(), group.size()):
        return (
            f"the stage is that of rank {place.rank} of {place.ranks}, but this is rank "
            f"{group.rank()} of {group.size()} of process_group: pass "
            "process_group.rank() and process_group.size() to partition"
        )
    if len(place.split) != count * group.size():
        return (
            f"the model has {len(place.split)} stages, but {group.size()} ranks pass "
            f"{count} each: pass all stages that partition returns"
        )
    if place.stage != (expected := group.rank() + number * group.size()):
        return (
            f"module {number} of the list is stage {place.stage}, but expected is stage "
            f"{expected}: pass the list in the order in which partition returns it"
        )
    return None


def _other_layers(part: ModelPart, first: ModelPart) -> str | None:
    place, other = part.place_in_model, first.place_in_model
    if (place.split, list(place.others)) != (other.split, list(other.others)):
        return "the list has stages of different models: pass the list that partition returns"
    if (found := list(layers_of(part))) != place.names:
        return (
            f"stage {place.stage} has the layers {found}, but had {place.names}: add and remove "
            "layers of the model before partition"
        )
    return None


def _not_averaged(stages: Sequence[ModelPart], wrapped: Sequence[nn.Module]) -> str | None:
    if 0 < sum(isinstance(each, DistributedDataParallel) for each in wrapped) < len(wrapped):
        return "some stages have a DistributedDataParallel and others do not: wrap each of them"
    for stage, data in zip(stages, wrapped, strict=True):
        if isinstance(data, DistributedDataParallel) and not _averages_all(data):
            return (
                f"stage {stage.place_in_model.stage} has parameters whose gradients its "
                "DistributedDataParallel does not average: replace layers before it is wrapped"
            )
    return None


def _averages_all(data: DistributedDataParallel) -> bool:
    averaged = {p for bucket in data.reducer.buckets for p in bucket.parameters}
    return averaged.issuperset(p for p in data.module.parameters() if p.requires_grad)


def _tensors(output: Any) -> tuple[Tensor, ...]:
    return output if isinstance(output, tuple) else (output,)


def _detached(output: Any) -> Any:
    return tuple(each.detach() for each in output) if isinstance(output, tuple) else output.detach()


def _joined(outputs: Sequence[Any]) -> Any:
    """The outputs of all micro-batches as those of one batch; numbers become a vector."""
    if isinstance(outputs[0], tuple):
        return tuple(_joined(column) for column in zip(*outputs, strict=True))
    return torch.cat(list(outputs)) if outputs[0].dim() else torch.stack(list(outputs))
