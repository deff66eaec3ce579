"""torch.distributed.pipelining: the runtime that executes lists of actions, and its stages.

torch lowers the computations of a schedule to transfers, allocates buffers, runs forward and
backward passes and splits backward passes. `Stage` hands its transfers to a `Transfers` object, so
that receives are posted ahead and every wait has a name; to the runtime they look like no
operations.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    REDUCE_GRAD,
    _Action,
    _ComputationType,
    _PipelineScheduleRuntime,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from collections.abc import Set as AbstractSet
    from contextlib import AbstractContextManager

    import torch.distributed as dist
    from torch import Tensor, nn
    from torch.autograd.graph import Node

__all__ = ["Runtime", "Stage", "Transfers"]

_LOG: Final = logging.getLogger("torch.distributed.pipelining.schedules")


class Transfers(Protocol):
    """The transfers of stages. `way` is "F" for activations and "B" for gradients."""

    def computing(self, stage: int, kind: str, microbatch: int) -> AbstractContextManager[None]:
        """Names the computation that runs inside, in errors."""
        ...

    def receive(self, stage: int, way: str, microbatch: int) -> None:
        """Waits until the input of a computation has arrived."""
        ...

    def send(
        self, stage: int, way: str, microbatch: int, messages: Sequence[tuple[Tensor, int]]
    ) -> None:
        """Starts to send tensors, each to a rank of the group."""
        ...

    def sent(self, stage: int, way: str, microbatch: int) -> None:
        """Waits until tensors are sent."""
        ...


class Stage(PipelineStage):
    """A stage of torch whose transfers are made elsewhere."""

    def __init__(
        self,
        module: nn.Module,
        index: int,
        stages: int,
        device: torch.device,
        group: dist.ProcessGroup,
        transfers: Transfers,
    ) -> None:
        super().__init__(module, index, stages, device, group=group)
        self._transfers = transfers
        self._counters: list[tuple[Tensor, Tensor]] = []
        self._complete: set[int] = set()
        """Micro-batches whose first part of a split backward pass computed all gradients."""

    def buffers(self, way: str, microbatch: int) -> list[tuple[Tensor, int]]:
        """Allocates what an input is received into: tensors, and the ranks that send them."""
        if way == "F":
            operations = super().get_fwd_recv_ops(microbatch)
            infos = self.args_recv_info[microbatch]
        else:
            operations = super().get_bwd_recv_ops(microbatch)
            infos = self.grad_recv_info[microbatch]
        tensors = []
        for info in infos:
            if info.buffer is None:
                continue
            # torch repeats the strides of the sender, such as 0 of the gradient of a sum.
            if 0 in info.buffer.stride():
                info.buffer = info.buffer.contiguous()
            tensors.append(info.buffer)
        peers = [operation.group_peer for operation in operations]
        return list(zip(tensors, peers, strict=True))

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:  # noqa: ARG002
        """Nothing: receives are posted by `Transfers`."""
        return []

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:  # noqa: ARG002
        """Nothing: receives are posted by `Transfers`."""
        return []

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Sends the activations."""
        self._send("F", fwd_chunk_id, super().get_fwd_send_ops(fwd_chunk_id))
        return []

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Sends the gradients of the inputs."""
        self._send("B", bwd_chunk_id, super().get_bwd_send_ops(bwd_chunk_id))
        return []

    def release_fwd_send_outputs(self, fwd_chunk_id: int) -> None:
        """After the activations have been sent."""
        self._transfers.sent(self.stage_index, "F", fwd_chunk_id)
        super().release_fwd_send_outputs(fwd_chunk_id)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Receives and computes."""
        with self._transfers.computing(self.stage_index, "F", fwd_chunk_id):
            self._transfers.receive(self.stage_index, "F", fwd_chunk_id)
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Tensor | None = None,
        full_backward: bool = True,  # noqa: FBT001, FBT002
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Receives and computes; all gradients at once where torch cannot divide the pass."""
        with self._transfers.computing(self.stage_index, "B", bwd_chunk_id):
            self._transfers.receive(self.stage_index, "B", bwd_chunk_id)
            if not full_backward and not self._is_divisible(bwd_chunk_id, loss):
                self._complete.add(bwd_chunk_id)
                full_backward = True
            return super().backward_one_chunk(bwd_chunk_id, loss, full_backward, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Computes what `backward_one_chunk` left."""
        if bwd_chunk_id in self._complete:
            self._complete.remove(bwd_chunk_id)
            return None
        with self._transfers.computing(self.stage_index, "W", bwd_chunk_id):
            return super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)

    def _is_divisible(self, microbatch: int, loss: Tensor | None) -> bool:
        """Whether a split backward pass finds all gradients.

        torch finds the weights of the second part where their graph meets a path from an input to
        an output, and ignores outputs that no such path leads to. It computes the first stage as a
        whole.
        """
        if self.is_first:
            return True
        state = self._forward_chunk_states[microbatch]
        outputs = (loss,) if self.is_last else state.stage_output_for_backward()
        inputs = {edge.node for edge in map(_edge, state.input_values) if edge is not None}
        edges = [edge for edge in map(_edge, outputs) if edge is not None]
        return all(_depends(edge.node, inputs) for edge in edges)

    def computing_loss(self, microbatch: int) -> AbstractContextManager[None]:
        """Names the loss that is computed inside, in errors."""
        return self._transfers.computing(self.stage_index, "L", microbatch)

    # The first pass, in which stages learn the shapes that they receive, is with values of nothing:
    # it leaves no trace. torch restores buffers and gradients.

    def _pre_metadata_inference_backup(self) -> None:
        super()._pre_metadata_inference_backup()
        kept = [v for m in self.submod.modules() for v in vars(m).values() if _is_counter(v)]
        self._counters = [(counter, counter.clone()) for counter in kept]

    def _post_metadata_inference_cleanup(self) -> None:
        super()._post_metadata_inference_cleanup()
        for counter, before in self._counters:
            counter.copy_(before)
        self._counters = []

    def _to_tensor(self, arg: Any) -> Any:
        if isinstance(arg, tuple):  # a target of several tensors, or of none
            return tuple(map(self._to_tensor, arg))
        tensor: Tensor = super()._to_tensor(arg)
        if isinstance(arg, torch.Tensor):
            return tensor
        return tensor.detach().zero_().requires_grad_(tensor.requires_grad)

    def _compute_outputs(self, *args: Any, **kwargs: Any) -> Any:
        with self._transfers.computing(self.stage_index, "F", 0):
            return super()._compute_outputs(*args, **kwargs)

    def _backward_metadata_inference(
        self, loss_fn: Callable[..., Tensor] | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        def named(output: Any, target: Any) -> Tensor:
            assert loss_fn is not None, "torch requires it in the last stage"
            with self.computing_loss(0):
                return loss_fn(output, target)

        return super()._backward_metadata_inference(named, *args, **kwargs)

    def _send(self, way: str, microbatch: int, operations: Sequence[dist.P2POp]) -> None:
        messages = [(op.tensor, op.group_peer) for op in operations]
        self._transfers.send(self.stage_index, way, microbatch, messages)


def _is_counter(value: object) -> bool:
    """Whether a module counts in this tensor, as experts their tokens, and it is not a buffer."""
    return isinstance(value, torch.Tensor) and not value.requires_grad


def _edge(value: object) -> GradientEdge | None:
    """Where the backward pass of a value starts; torch releases outputs that are sent."""
    if isinstance(value, GradientEdge):
        return value
    if isinstance(value, torch.Tensor) and value.requires_grad:
        return get_gradient_edge(value)
    return None


def _depends(output: Node, inputs: AbstractSet[Node]) -> bool:
    """Whether the graph of an output contains an input."""
    found, pending = {output}, [output]
    while pending:
        node = pending.pop()
        if node in inputs:
            return True
        following = {each for each, _ in node.next_functions if each is not None} - found
        found |= following
        pending += following
    return False


class Runtime(_PipelineScheduleRuntime):
    """torch's runtime with a given order of actions. Gradients are never scaled.

    Args:
        stages: The stages of this rank.
        order: For each rank the actions (stage, letter of the kind, micro-batch).
        microbatches: Number of micro-batches.
        loss_fn: Loss of the last stage's output and a target.
        reduce: Called with a stage after its last gradient.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        order: Sequence[Sequence[tuple[int, str, int]]],
        microbatches: int,
        loss_fn: Callable[[Tensor, Any], Tensor],
        reduce: Callable[[int], None],
    ) -> None:
        super().__init__(  # type: ignore[no-untyped-call]
            list(stages), microbatches, loss_fn=loss_fn, scale_grads=False
        )
        self.pipeline_order = {
            rank: [_Action(stage, _ComputationType(str(kind)), mb) for stage, kind, mb in actions]
            for rank, actions in enumerate(order)
        }
        self._prepare_schedule_with_comms(self.pipeline_order)
        self.register_custom_function(
            REDUCE_GRAD, lambda action, _context: reduce(action.stage_index)
        )

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """A step; torch does not log the whole schedule on every rank if an action fails."""
        with _without_errors():
            return super().step(*args, **kwargs)

    def _maybe_compute_loss(
        self, stage: Stage, output: Any, target_mbs: Any, mb_index: int, *args: Any
    ) -> None:
        if stage.is_last:
            with stage.computing_loss(mb_index):
                super()._maybe_compute_loss(  # type: ignore[no-untyped-call]
                    stage, output, target_mbs, mb_index, *args
                )


@contextmanager
def _without_errors() -> Iterator[None]:
    def is_below(record: logging.LogRecord) -> bool:
        return record.levelno < logging.ERROR

    _LOG.addFilter(is_below)
    try:
        yield
    finally:
        _LOG.removeFilter(is_below)
