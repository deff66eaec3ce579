"""Scatters gradients while backward runs, and steps groups of parameters before their next gather.

A bucket is a parameter group of FSDP2: what one call of `fully_shard` gathers and scatters. torch
starts the scatters in backward order. `haiscale.overlap.flight` describes what happens to their
results. A step that is due is made before the group's parameters are gathered again.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import Variable
from torch.distributed.tensor import DTensor

from haiscale.fsdp.buffers import Buffers
from haiscale.fsdp.collectives import Averaging, Gather, Scatter, Scatters
from haiscale.fsdp.steps import as_shard
from haiscale.internals import fsdp
from haiscale.overlap.flight import Flight, GradientBucket
from haiscale.overlap.groups import sibling, spans_nodes

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import Tensor
    from torch.distributed.fsdp import FSDPModule
    from torch.nn import Parameter

    from haiscale.fsdp.steps import ShardSteps
    from haiscale.overlap.steps import WholeStep

__all__ = ["Reducer", "ShardBucket"]


class ShardBucket(GradientBucket):
    """The gradients of one parameter group on this rank."""

    def __init__(
        self,
        index: int,
        module: FSDPModule,
        group: fsdp.ParameterGroup,
        names: dict[Parameter, str],
        reducer: Reducer,
    ) -> None:
        parameters = fsdp.parameters(group)
        super().__init__(index, [names.get(p, "?") for p in parameters], parameters)
        self.module, self.group = module, group
        self.owners: set[Parameter] = set()
        """Parameters that optimizers with split steps have."""
        self._reducer = reducer
        self._averages: list[Tensor | None] = [None] * len(parameters)
        self._is_sealed = False
        self._nan = torch.full((), math.nan)
        self._hide()

    # The scatter's calls

    def before_scatter(self) -> None:
        """Uses earlier averages: torch adds the new ones to them, in place."""
        self._reducer.check()
        self._reducer.scatters.advance()
        self._reducer.settle(self)

    def started(self, averaging: Averaging, dtype: torch.dtype) -> None:
        """Leaves the averages in flight if torch does not touch them before backward ends."""
        # With manual finalization torch reduces outside backward, whose end nothing reports.
        is_late = fsdp.is_in_backward() and fsdp.may_land_later(self.group, dtype)
        self.work, self._is_sealed = averaging, False
        self._reducer.scattering(self)
        if not is_late:
            self._reducer.settle(self)

    def failed(self, error: Exception) -> Exception:
        """Marks everything as failed."""
        return self._reducer.fail(f"gradients of {self._reducer.names[self.index]}: {error}")

    # Gradients

    def groups(self) -> set[dist.ProcessGroup]:
        """Those of its scatter, its replicas and its gathers."""
        return self._reducer.groups

    def seal(self) -> None:
        """Puts the gradients out of reach until they have landed."""
        if self.work is None or self._is_sealed:
            return
        self._is_sealed = True
        parameters = fsdp.parameters(self.group)
        if any(a is not b for a, b in zip(parameters, self.parameters, strict=True)):
            # Since `load_state_dict(assign=True)`.
            self.parameters = parameters
            self._hide()
        self._nan.fill_(math.nan)
        self._averages = [p.grad for p in parameters]
        have = [p for p in parameters if p.grad is not None]
        self.unread = len(self.owners.intersection(have)) or len(have)
        for parameter, hidden in zip(parameters, self.in_flight, strict=True):
            if parameter.grad is not None:
                parameter.grad = hidden

    @torch.no_grad()
    def _hide(self) -> None:
        """Makes what stands in for gradients in flight."""
        self.in_flight = []
        for parameter in self.parameters:
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            nan = self._nan.to(local.dtype).expand(local.shape)
            self.in_flight.append(as_shard(nan, parameter))

    def averages(self) -> list[Tensor | None]:
        """Averaged gradients, which the bucket no longer refers to."""
        averages, self._averages = self._averages, [None] * len(self.parameters)
        return averages

    def drop(self) -> None:
        """Forgets what is in flight."""
        super().drop()
        self.averages()


class Reducer(Flight[ShardBucket]):
    """All parameter groups of a model, their memory, and what is under way.

    `haiscale.fsdp.overlap` returns it.
    """

    layer = "haiscale.fsdp"

    def __init__(self, root: FSDPModule, modules: dict[str, FSDPModule]) -> None:
        self.root = root
        self.groups: set[dist.ProcessGroup] = set()
        self.scatters = Scatters()
        self.steps: list[ShardSteps] = []
        self._buffers: dict[dist.ProcessGroup, Buffers] = {}
        self._priority: dict[dist.ProcessGroup, dist.ProcessGroup] = {}
        self._averaging: dict[dist.ProcessGroup, dist.ProcessGroup] = {}
        self._scatter: list[Scatter] = []
        self._order: list[FSDPModule] | None = []
        """Modules in the order of their first gathers; None once prefetches are set."""
        self._last: FSDPModule | None = None
        self._is_in_backward = False
        model: Any = root
        names = {p: name for name, p in torch.nn.Module.named_parameters(model)}
        buckets: list[ShardBucket] = []
        titles: list[str] = []
        for name, module in modules.items():
            for group in self._groups_of(module):
                if any(bucket.group is group for bucket in buckets):
                    continue  # of a call with several modules
                buckets.append(ShardBucket(len(buckets), module, group, names, self))
                titles.append(name or type(model).__mro__[2].__name__)
        super().__init__(buckets, titles)
        for bucket in buckets:
            self._connect(bucket)
        if any(fsdp.has_prefetch(module) for module in modules.values()):  # type: ignore[arg-type]
            self._order = None

    @staticmethod
    def _groups_of(module: FSDPModule) -> list[fsdp.ParameterGroup]:
        """Groups whose collectives are ours: torch accepts other ones for one group of a module."""
        found = fsdp.parameter_groups(module)  # type: ignore[arg-type]
        if len(found) != 1 or fsdp.device(found[0]).type != "cpu":
            return []
        shards = fsdp.shards(found[0])
        return found if shards is not None and shards.size() > 1 else []

    def _connect(self, bucket: ShardBucket) -> None:
        """Gives a group our collectives, and learns of its gathers and resets."""
        shards = fsdp.shards(bucket.group)
        assert shards is not None
        replicas = self._replicas_of(bucket)
        if shards not in self._buffers:
            self._buffers[shards] = Buffers(shards)
            # Scatters would delay the gather of the next module.
            urgent = sibling(shards, "high") if spans_nodes(shards) else shards
            self._priority[shards] = urgent
        buffers, urgent = self._buffers[shards], self._priority[shards]
        groups = (shards, urgent, replicas, fsdp.replicas(bucket.group))
        self.groups |= {each for each in groups if each is not None}
        title = self.names[bucket.index]
        gather: Any = Gather(
            urgent, buffers, lambda error: self.fail(f"parameters of {title}: {error}")
        )
        scatter: Any = Scatter(bucket, replicas, buffers, self.scatters)
        self._scatter.append(scatter)
        bucket.module.set_custom_all_gather(gather)
        bucket.module.set_custom_reduce_scatter(scatter)
        fsdp.before_gather(bucket.group, lambda: self._before_gather(bucket))
        fsdp.before_reset(bucket.group, self.before_reset)
        if replicas is not None:
            fsdp.around_reduce(bucket.group)

    def _replicas_of(self, bucket: ShardBucket) -> dist.ProcessGroup | None:
        """A group for the allreduces alone.

        They start when their scatters have ended, which a rank may see earlier than another: an
        operation of the script, or of a module whose shards are on these ranks, would be started
        before an allreduce on one rank and after it on another.
        """
        replicas = fsdp.replicas(bucket.group)
        if replicas is None or replicas.size() == 1:
            return replicas
        if replicas not in self._averaging:
            self._averaging[replicas] = sibling(replicas, "normal")
        return self._averaging[replicas]

    @property
    def communication_blocks(self) -> int:
        """Blocks of communication memory taken so far; constant after the second step."""
        return sum(buffers.blocks for buffers in self._buffers.values())

    @property
    def communication_bytes(self) -> int:
        """Bytes of these blocks."""
        return sum(buffers.bytes for buffers in self._buffers.values())

    @property
    def whole_step(self) -> WholeStep | None:
        """Why the last optimizer step was not split by group; None if it was."""
        return next((steps.whole for steps in self.steps if steps.whole is not None), None)

    def request_step(self) -> None:
        """Counts a step; parameters that are still gathered, as after an evaluation, are old."""
        super().request_step()
        for bucket in self.buckets:
            bucket.module.reshard()

    # Forward

    def before_forward(self) -> None:
        """Before a forward pass of the whole model."""
        self.check()
        if fsdp.is_in_backward():
            return  # a checkpoint computes it again
        if self._is_in_backward:
            raise RuntimeError(
                "the last backward pass did not complete: it raised an error: call "
                "reset_iter_state() of the model on every rank"
            )
        self._set_prefetch()
        self.reveal()

    def after_forward(self) -> None:
        """After a forward pass of the whole model."""
        self.scatters.advance()
        if not torch.is_grad_enabled():
            for bucket in self.buckets:
                fsdp.drop_pending_gather(bucket.group)
            if self._last is not None:
                self._last.reshard()

    def _before_gather(self, bucket: ShardBucket) -> None:
        self.check()
        self.scatters.advance()
        if self._order is not None and bucket.module not in self._order:
            self._order.append(bucket.module)
        if bucket.steps:
            self.settle_for_use(bucket)

    def _set_prefetch(self) -> None:
        """Each module gathers the next one's parameters, in the order of the first forward pass.

        For backward torch does so by itself, in the order of the last forward pass. The last
        module keeps its parameters: backward would gather them at once.
        """
        if self._order:
            for module, following in pairwise(self._order):
                module.set_modules_to_forward_prefetch([following])
            last = self._order[-1]
            if fsdp.reshards_by_default(last):  # type: ignore[arg-type]
                last.set_reshard_after_forward(False, recurse=False)
                self._last = last
            self._order = None

    # Backward

    def scattering(self, bucket: ShardBucket) -> None:
        """After the start of a scatter, inside backward."""
        self.started(bucket)
        if not self._is_in_backward and fsdp.is_in_backward():
            self._is_in_backward = True
            engine: Any = Variable._execution_engine
            engine.queue_callback(self._on_end)

    def _on_end(self) -> None:
        self._is_in_backward = False
        self._set_prefetch()
        if not self.defers:
            self.synchronize()
        for bucket in self.in_flight:
            bucket.seal()

    # Failure

    def before_reset(self) -> None:
        """Before torch drops the gradients: steps that were requested are made."""
        self._is_in_backward = False
        if self.failure is not None:
            self.reset()
        else:
            self.synchronize()
        self.scatters.reset()
        for scatter in self._scatter:
            scatter.reset()

    def reset(self) -> None:
        """Makes the model usable after an error: drops gradients and steps in flight.

        It restores no parameter. A broken process group stays broken.
        """
        super().reset()
        self._is_in_backward = False
        self.scatters.reset()
        for scatter in self._scatter:
            scatter.reset()
