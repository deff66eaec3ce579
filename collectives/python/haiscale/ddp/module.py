"""`DistributedDataParallel`: the module around a model, with torch's surface.

Changes to a script with torch's: the import, and `ddp.overlap(optimizer)`. Without the second,
backward returns with averaged gradients, as torch's does.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from haiscale.ddp import agreement, groups, saving
from haiscale.ddp.buckets import Bucket, layout
from haiscale.ddp.reducer import Reducer, check_free
from haiscale.overlap.guards import guard_module, guard_optimizer
from haiscale.overlap.steps import Steps, WholeStep

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor
    from torch.nn import Parameter
    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle

__all__ = ["DistributedDataParallel"]


class DistributedDataParallel(nn.Module):
    """Trains one model on every rank of a group with the average of their gradients.

    `optimizer` (or `overlap`, called later) lets each bucket's step follow its allreduce: `.grad`
    is then not readable between `backward()` and `step()` without `synchronize()`, `step()` uses
    the gradients up, and parameters are final once a module that has them is called, or after
    `synchronize()`, `state_dict()` or `parameters()` of the model or its optimizer.

    `overlap=False` makes each step at once, as torch's, for comparison or for atomic steps.
    `levels` states whether buckets get priorities of HFReduce (`groups.prioritized`).
    Arguments of torch's class that have no effect here: `find_unused_parameters` (such parameters
    are always found), `gradient_as_bucket_view` (gradients always are) and `static_graph`.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int] | None = None,
        output_device: int | None = None,
        broadcast_buffers: bool = True,  # noqa: FBT001, FBT002  (torch's)
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float = 4.0,
        find_unused_parameters: bool = False,  # noqa: ARG002, FBT001, FBT002  (torch's)
        gradient_as_bucket_view: bool = True,  # noqa: ARG002, FBT001, FBT002  (torch's)
        static_graph: bool = False,  # noqa: ARG002, FBT001, FBT002  (torch's)
        *,
        optimizer: Optimizer | Sequence[Optimizer] = (),
        overlap: bool = True,
        levels: bool | None = None,
    ) -> None:
        super().__init__()
        group = process_group if process_group is not None else dist.group.WORLD
        if group is None:
            raise ValueError("torch.distributed is not initialized: call init_process_group first")
        named = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        if not named:
            raise ValueError("the module has no parameter that requires a gradient")
        check_free(named)
        agreement.check_replicas(module, group)
        if len(device_ids or ()) > 1:
            raise ValueError(f"device_ids={device_ids}: a rank has one device")
        if bucket_cap_mb <= 0:
            raise ValueError(f"bucket_cap_mb={bucket_cap_mb}: expected a size in MiB above 0")
        self.module = module
        self.process_group = group
        self.device_ids, self.output_device = device_ids, output_device
        self.broadcast_buffers = broadcast_buffers
        self.checkpoint: saving.Checkpoint | None = None
        """What `try_save` writes; `haiscale.ddp.init_checkpoint` sets it."""
        self.require_backward_grad_sync = True
        self._syncs_buffers = broadcast_buffers
        self._overlap = overlap
        settings = f"bucket_cap_mb={bucket_cap_mb} broadcast_buffers={broadcast_buffers}"
        device = self.device = named[0][1].device
        agreement.check_same_model(agreement.describe(module, settings), group, device)
        agreement.broadcast([*module.parameters(), *module.buffers()], group)
        places = layout([parameter for _, parameter in named], bucket_cap_mb * 2**20)
        chosen = [[named[place] for place in bucket] for bucket in places]
        sizes = [sum(parameter.nbytes for _, parameter in bucket) for bucket in chosen]
        by_bucket = groups.prioritized(group, sizes, levels=levels)
        self.reducer = Reducer(
            [
                Bucket(i, bucket, own, lambda *shape, own=own: groups.allocate(own, *shape))
                for i, (bucket, own) in enumerate(zip(chosen, by_bucket, strict=True))
            ]
        )
        self._steps: list[Steps] = []
        self._called: set[nn.Module] | None = set()
        self.reducer.on_change = lambda busy: guard_module(module, self.reducer, busy=busy)
        self.reducer.handles += self._hooks()
        for each in [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer:
            self.overlap(each)

    def overlap(self, optimizer: Optimizer, *, independent: bool = False) -> None:
        """Lets the optimizer's step of each bucket follow its allreduce.

        `independent` states that an optimizer of the script's own updates each parameter from that
        parameter's gradient and state alone.
        """
        never = None if self._overlap else WholeStep.OVERLAP_OFF
        logs = self.process_group.rank() == 0
        self._steps.append(
            Steps(optimizer, self.reducer, never=never, independent=independent, log=logs)
        )
        self.reducer.handles += self._steps[-1].handles
        guard_optimizer(optimizer, self.reducer)
        owned = {p for steps in self._steps for p in steps.parameters()}
        # Parameters of an optimizer that is not known here need their gradients after backward.
        self.reducer.defers = self.reducer.may_defer = all(
            steps.never is None for steps in self._steps
        ) and all(owned.issuperset(bucket.parameters) for bucket in self.reducer.buckets)

    @property
    def whole_step(self) -> WholeStep | None:
        """Why the last optimizer step was not split by bucket; None if it was."""
        return next((steps.whole for steps in self._steps if steps.whole is not None), None)

    def synchronize(self) -> None:
        """Waits until all gradients are averaged and all requested steps are made."""
        self.reducer.synchronize()

    def reset(self) -> None:
        """Makes the wrapper usable after an error: drops gradients and steps in flight.

        It restores no parameter. A broken process group stays broken.
        """
        self.reducer.reset()

    def close(self) -> None:
        """Makes the steps in flight and leaves the module alone: another wrapper may take it."""
        self.reducer.stop()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes of forward passes in this context accumulate without averaging."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def try_save(
        self,
        epoch: int,
        step: int,
        others: Any = None,
        force: bool = False,  # noqa: FBT001, FBT002  (HAI's)
    ) -> None:
        """Saves and suspends if the job is asked to, as scripts for HAI do after each step.

        Every rank of the job calls it; the job's first rank decides for all of them.

        Args:
            epoch: Epoch in which the job resumes.
            step: Step of the epoch with which it resumes.
            others: Further values, which `init_checkpoint` returns then.
            force: Save in any case; the job continues if it is not asked to suspend.

        Raises:
            CheckpointError: A rank has no checkpoint or cannot write its file; on every rank.
        """
        saving.try_save(self, epoch, step, others, force=force)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scales all gradients to a total norm, in the same order of addition on every rank."""
        self.synchronize()
        parameters = [p for bucket in self.reducer.buckets[::-1] for p in bucket.parameters[::-1]]
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module."""
        trains = torch.is_grad_enabled()
        averages = trains and self.require_backward_grad_sync
        self.reducer.prepare(reduces=averages if trains else self.reducer.reduces)
        if self._syncs_buffers:
            try:
                agreement.broadcast(self.module.buffers(), self.process_group)
            except Exception as error:
                raise self.reducer.fail(f"broadcast of buffers: {error}") from error
        output = self.module(*args, **kwargs)
        # As torch's: buffers are those of rank 0 in the forward pass after one that averages.
        self._syncs_buffers = averages and self.broadcast_buffers
        if self._called is not None and trains:
            self.reducer.needs, self._called = self._read_by(self._called), None
        if trains:
            for tensor in _tensors(output):
                if tensor.requires_grad and not tensor.is_leaf:
                    tensor.register_hook(self.reducer.on_output_gradient)  # type: ignore[no-untyped-call]
        return output

    # What reads parameters waits for their steps

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Parameter]]:
        """As torch's, after `synchronize`."""
        if self.reducer.failure is None:
            self.reducer.synchronize()
        return super().named_parameters(*args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002  (torch's)
        """Drops gradients; without waiting for steps."""
        if set_to_none:
            for parameter in nn.Module.parameters(self):
                parameter.grad = None
        else:
            super().zero_grad(set_to_none=False)

    def _hooks(self) -> list[RemovableHandle]:
        before = _Hook(self._before_module)
        wait = _Hook(lambda *_: self.reducer.synchronize())
        handles = [m.register_forward_pre_hook(before) for m in self.module.modules()]
        module: Any = self.module
        handles.append(module.register_state_dict_pre_hook(wait))
        handles.append(module.register_load_state_dict_pre_hook(wait))
        return handles

    def _before_module(self, module: nn.Module, _args: object) -> None:
        if self.reducer.in_flight or self.reducer.failure is not None:
            self.reducer.before_use(module)
        elif self._called is not None:
            self._called.add(module)

    def _read_by(self, called: set[nn.Module]) -> dict[nn.Module, list[Bucket]]:
        """Buckets that each module reads: its own parameters', and those of children never called.

        MultiheadAttention, for example, reads the weights of `out_proj` without calling it.
        """
        bucket_of = {p: bucket for bucket in self.reducer.buckets for p in bucket.parameters}
        reads: dict[nn.Module, dict[Bucket, None]] = {m: {} for m in self.module.modules()}

        def visit(module: nn.Module, reader: nn.Module) -> None:
            reader = module if module in called else reader
            own = (bucket_of.get(p) for p in module._parameters.values() if p is not None)
            reads[reader].update((bucket, None) for bucket in own if bucket is not None)
            for child in module.children():
                visit(child, reader)

        visit(self.module, self.module)
        return {module: list(buckets) for module, buckets in reads.items()}


class _Hook:
    """A hook that copies of the module do not have."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., None] | None) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        if self._call is not None:
            self._call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, (None,)


def _tensors(output: object) -> Iterator[Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from _tensors(value)
