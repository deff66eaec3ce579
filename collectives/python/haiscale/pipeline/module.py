"""`Pipeline`: a model in stages on several ranks, trained by a schedule.

    pipeline = Pipeline(layers, build("1F1B", ranks=4, microbatches=16), loss_fn, group=pp)
    optimizer = torch.optim.AdamW(pipeline.parameters())
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = pipeline.step(inputs, targets)
        pipeline.clip_grad_norm_(1.0)
        optimizer.step()

Gradients have the bits of one process that accumulates the same micro-batches one after the other.
The loss of each micro-batch is scaled; gradients are never scaled.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from haiscale.clip import clip_grad_norm
from haiscale.ddp import groups
from haiscale.ddp.agreement import check_same_model
from haiscale.internals.pipelining import Runtime, Stage
from haiscale.pipeline.check import check
from haiscale.pipeline.errors import PipelineError
from haiscale.pipeline.evaluation import Evaluation
from haiscale.pipeline.layers import (
    StageModule,
    kinds,
    named_layers,
    parameters,
    partition,
    ties,
    tree,
)
from haiscale.pipeline.microbatches import MicrobatchError, Tensors, divide, split
from haiscale.pipeline.replicas import Replicas
from haiscale.pipeline.tied import Tied
from haiscale.pipeline.transfers import Messages

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from datetime import timedelta

    from torch import Tensor, nn
    from torch.nn import Parameter

    from haiscale.ddp.module import DistributedDataParallel
    from haiscale.pipeline.actions import Schedule
    from haiscale.pipeline.layers import Tie
    from haiscale.pipeline.microbatches import Batch

__all__ = ["Pipeline"]


class Pipeline:
    """The stages of this rank. Every rank of the group passes the same layers and schedule.

    Args:
        layers: All layers of the model in their order, on every rank. Layers of other ranks' stages
            are only described, and may be on the meta device.
        schedule: What each rank executes, from `schedules.build` or `actions.from_csv`.
        loss_fn: Mean loss of a micro-batch from the last layer's output and a target.
        group: The ranks of the pipeline, in the order of the schedule's; default: all ranks.
        data_group: Replicas of this rank's stages, whose gradients are averaged. None with experts
            on several ranks: call `haiscale.moe.average_gradients` after `step`.
        wrapped: Instead of `data_group`, a wrapper for each of this rank's stages, in their order.
        split: Number of layers of each stage; default: equal numbers.
        recompute: Micro-batches whose activations are recomputed in backward instead of kept.
        timeout: Deadline of each wait for a message; default: that of the group.

    Raises:
        ScheduleError: The schedule is invalid, or is for another number of ranks.
        PartitionError: The layers do not fit the stages.
        ValueError: `data_group` would average different experts.
        ModelMismatchError: A rank passes other layers or another schedule; raised on every rank.
    """

    def __init__(
        self,
        layers: nn.Sequential | nn.ModuleDict | Mapping[str, nn.Module],
        schedule: Schedule,
        loss_fn: Callable[[Any, Any], Tensor],
        *,
        group: dist.ProcessGroup | None = None,
        data_group: dist.ProcessGroup | None = None,
        wrapped: Sequence[DistributedDataParallel] = (),
        split: Sequence[int] | None = None,
        recompute: Collection[int] = (),
        timeout: timedelta | None = None,
    ) -> None:
        chosen = group if group is not None else dist.group.WORLD
        if chosen is None:
            raise ValueError("torch.distributed is not initialized: call init_process_group first")
        self.group = chosen
        self.schedule = schedule
        self.failure: PipelineError | None = None
        """Why a step failed; no further step is accepted."""
        check(schedule, ranks=chosen.size())
        named = named_layers(layers)
        places = partition(list(named), schedule.stages, split)
        own = schedule.stages_of(chosen.rank())
        shared = ties(named)
        device = next((p.device for p in _first(named, places[own[0]])), torch.device("cpu"))
        check_same_model(_describe(named, schedule, places, shared), chosen, device)
        self.module: nn.Module = tree({name: named[name] for k in own for name in places[k]})
        """The layers of this rank, with their names in the whole model."""
        self.ties = tuple(shared)
        """Names of each parameter that several layers of the whole model share."""
        modules = {k: StageModule({name: named[name] for name in places[k]}) for k in own}
        self._tied = _tied(chosen, schedule, places, named, shared)
        self._replicas = Replicas(self.module, modules, data_group, wrapped)
        self._messages = Messages(chosen, schedule, timeout)
        for stage in modules.values():
            stage.recomputes = lambda: self._messages.microbatch in recompute
        stages = {
            k: Stage(modules[k], k, schedule.stages, device, chosen, self._messages) for k in own
        }
        self._messages.allocate = lambda key: stages[key[0]].buffers(key[1], key[2])
        self._loss_fn = loss_fn
        self._scale = 1.0
        self._first = stages.get(0)
        self._last = stages.get(schedule.stages - 1)
        self._device = device
        self._evaluation = Evaluation(
            modules, schedule.rank_of(), chosen, device, self._messages, timeout
        )
        self._runtime = Runtime(
            [stages[k] for k in own],
            schedule.ranks,
            schedule.microbatches,
            lambda output, target: self._loss_fn(output, target) * self._scale,
            self._replicas.average,
        )

    def step(
        self, inputs: Batch = None, targets: Batch = None, *, scale: float | None = None
    ) -> float:
        """Computes the gradients of a batch; returns its loss, equal on all ranks of the pipeline.

        Args:
            inputs: Inputs of the first layer: a tensor, which is divided along its first dimension,
                or a list with a tensor, or a tuple of tensors, for each micro-batch. Ranks without
                the first stage ignore it. `Tensors` are several, each divided along its first
                dimension.
            targets: Targets of the loss, likewise. Ranks without the last stage ignore it.
            scale: Factor of each micro-batch's loss. Default: 1 / micro-batches, which is the mean
                over equal micro-batches. With 1 / tokens of the batch and a loss that adds, the
                result is the mean over tokens.

        Raises:
            PipelineError: A rank failed or a deadline passed. No rank returns from this step.
        """
        self._scale = 1 / self.schedule.microbatches if scale is None else scale
        with self.failing():
            return self._step(inputs, targets)

    @torch.no_grad()
    def evaluate(self, parts: Tensors | Sequence[tuple[Any, ...]] = ()) -> list[Any] | None:
        """The last layer's outputs for parts of a batch, without gradients.

        Args:
            parts: Arguments of the first layer, for each part. Shapes and number of parts are free.
                `Tensors` are divided into as many parts as micro-batches, or fewer. Ranks without
                the first stage ignore them.

        Returns:
            An output for each part on the rank with the last stage; None on other ranks.

        Raises:
            PipelineError: A rank failed or a deadline passed.
        """
        with self.failing():
            if self._first is None:
                return self._evaluation.run(())
            if isinstance(parts, Tensors):
                with self._dividing(0):
                    parts = split(parts, self.schedule.microbatches)
            if not parts:
                raise PipelineError(
                    "inputs are missing: pass them on this rank", rank=self._messages.rank, stage=0
                )
            return self._evaluation.run(parts)

    def parameters(self) -> Iterator[Parameter]:
        """Parameters of this rank, for an optimizer."""
        return self.module.parameters()

    def state_dict(self) -> dict[str, Any]:
        """Parameters and buffers of this rank's layers, with their names in the whole model."""
        return dict(self.module.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads this rank's layers from a state of the whole model, or of these layers."""
        own = self.module.state_dict().keys()
        self.module.load_state_dict({name: state[name] for name in state if name in own})

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scales gradients to a norm over all stages, shards and experts; returns that norm.

        Every rank calls it. Its bits do not depend on the layout of stages.
        """
        return clip_grad_norm(
            self.module,
            max_norm,
            pipeline=self.group,
            copies=self._tied.copies,
        )

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Ends the waits of all ranks if an exception leaves the context, as a PipelineError."""
        if self.failure is not None:
            raise PipelineError(
                f"a step failed before: {self.failure}: restart the job from a checkpoint",
                rank=self._messages.rank,
            ) from self.failure
        try:
            yield
        except BaseException as error:
            failure = self._fail(error)
            if failure is error or not isinstance(error, Exception):
                raise
            raise failure from error

    def _step(self, inputs: Batch, targets: Batch) -> float:
        arguments = self._divide("inputs", inputs) if self._first is not None else None
        labels = self._divide("targets", targets) if self._last is not None else None
        self._replicas.start()
        self._tied.start()
        self._messages.start()
        losses: list[Tensor] = []
        self._runtime.step(
            arg_mbs=arguments,
            target_mbs=[label[0] if len(label) == 1 else label for label in labels or ()] or None,
            losses=losses,
            return_outputs=False,
        )
        self._messages.finish()
        self._replicas.finish()
        self._tied.add()
        # Also the commit: it ends on no rank before every rank of the pipeline has all gradients.
        loss = torch.zeros(1, dtype=torch.float64, device=self._device)
        for each in losses:
            loss += each.detach()
        dist.all_reduce(loss, group=self.group)
        return float(loss.item())

    def _divide(self, name: str, batch: Batch) -> list[tuple[Any, ...]]:
        with self._dividing(0 if name == "inputs" else self.schedule.stages - 1):
            return divide(batch, self.schedule.microbatches, name)

    @contextmanager
    def _dividing(self, stage: int) -> Iterator[None]:
        """Names the rank and the stage of a batch that does not divide."""
        try:
            yield
        except MicrobatchError as error:
            raise PipelineError(
                str(error),
                rank=self._messages.rank,
                stage=stage,
                microbatch=error.microbatch,
            ) from None

    def _fail(self, error: BaseException) -> PipelineError:
        """Ends the waits of all ranks; returns the error to raise."""
        failure = error if isinstance(error, PipelineError) else None
        if failure is None:
            detail = f"{type(error).__name__}: {error}"
            failure = PipelineError(detail, rank=self._messages.rank)
        self.failure = failure
        self._messages.is_failed = True
        groups.abort({self.group, *self._tied.groups}, f"haiscale.pipeline: {failure}")
        self._replicas.fail(f"pipeline: {failure}")
        return failure


def _first(named: Mapping[str, nn.Module], names: Sequence[str]) -> Iterator[Parameter]:
    for name in names:
        yield from named[name].parameters()


def _describe(
    named: Mapping[str, nn.Module],
    schedule: Schedule,
    places: Sequence[Sequence[str]],
    shared: Sequence[Tie],
) -> list[tuple[str, str]]:
    """Everything that ranks must agree on, in lines that an error can quote."""
    terms = f"{schedule.name}, {schedule.microbatches} micro-batches, digest {schedule.digest()}"
    entries = [("schedule", terms)]
    entries += [(f"stage {k}", " ".join(names)) for k, names in enumerate(places)]
    entries.append(("shared", "; ".join(" ".join(names) for names in shared) or "nothing"))
    entries += kinds(named)
    return entries


def _tied(
    group: dist.ProcessGroup,
    schedule: Schedule,
    places: Sequence[Sequence[str]],
    named: Mapping[str, nn.Module],
    shared: Sequence[Tie],
) -> Tied:
    rank_of = schedule.rank_of()
    every = dict(parameters(named))
    stage_of = {
        name: k
        for k, names in enumerate(places)
        for name, _ in parameters({each: named[each] for each in names})
    }
    return Tied(group, shared, {name: rank_of[k] for name, k in stage_of.items()}, every)
