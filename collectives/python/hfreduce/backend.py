"""torch's collectives in terms of the engine's.

The methods' names and arguments are torch's (`torch.distributed.Backend`). Each checks its tensors,
starts one operation of the engine and hands out a `CollectiveWork`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hfreduce import sparse, tensors
from hfreduce.group import Group

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from hfreduce.group import Options
    from hfreduce.work import CollectiveWork

__all__ = ["HFReduceBackend"]


class HFReduceBackend(Group):
    """One group of ranks. torch calls the methods; their names and arguments are torch's."""

    # Reductions

    def allreduce(self, tensor_list: list[torch.Tensor], opts: Any) -> CollectiveWork:
        """In place."""
        op = tensors.operation_code(opts.reduceOp)
        tensor = tensors.single(tensor_list, "allreduce")
        if tensor.is_sparse:
            sparse.allreduce(self, tensor, opts)
            return self._work([], tensor_list, lazy=True)
        buffer = tensors.for_reduction(tensor, "allreduce", op)
        seconds, lazy = self._terms(opts)
        operation = self._on(tensor).allreduce(
            buffer.pointer, buffer.numel, buffer.dtype, buffer.op, seconds, lazy
        )
        return self._work([operation], tensor_list, lazy=lazy)

    def allreduce_coalesced(self, tensor_list: list[torch.Tensor], opts: Any) -> CollectiveWork:
        """In place; tensors of one type travel as one."""
        op = tensors.operation_code(opts.reduceOp)
        seconds, lazy = self._terms(opts)
        by_type: dict[tuple[int, int], list[tuple[int, int]]] = {}
        if any(not tensor.is_cpu for tensor in tensor_list):
            # A GPU's are copied one by one anyway.
            return self._join([self.allreduce([each], opts) for each in tensor_list], tensor_list)
        for tensor in tensor_list:
            buffer = tensors.for_reduction(tensor, "allreduce_coalesced", op)
            buffers = by_type.setdefault((buffer.dtype, buffer.op), [])
            buffers.append((buffer.pointer, buffer.numel))
        operations = [
            self.communicator.allreduce_many(buffers, dtype, code, seconds, lazy)
            for (dtype, code), buffers in by_type.items()
        ]
        return self._work(operations, tensor_list, lazy=lazy)

    def reduce(self, tensor_list: list[torch.Tensor], opts: Any) -> CollectiveWork:
        """Into the root's tensor."""
        op = tensors.operation_code(opts.reduceOp)
        tensor = tensors.single(tensor_list, "reduce")
        buffer = tensors.for_reduction(tensor, "reduce", op)
        seconds, lazy = self._terms(opts)
        operation = self._on(tensor).reduce(
            buffer.pointer, buffer.numel, buffer.dtype, buffer.op, opts.rootRank, seconds, lazy
        )
        return self._work([operation], tensor_list, lazy=lazy)

    def reduce_scatter_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002  (torch's name)
        opts: Any,
    ) -> CollectiveWork:
        """Our share of the sum of everybody's input."""
        name = "reduce_scatter_tensor"
        op = tensors.operation_code(opts.reduceOp)
        target = tensors.for_reduction(output, name, op)
        source = tensors.for_reduction(input, name, op)
        tensors.whole_shares(name, input, output, self.size())
        seconds, lazy = self._terms(opts)
        operation = self._on(output, input).reduce_scatter(
            source.pointer, target.pointer, target.numel, target.dtype, target.op, seconds, lazy
        )
        return self._work([operation], [output], keep=[input], lazy=lazy)

    def reduce_scatter(
        self,
        outputs: list[torch.Tensor],
        inputs: list[list[torch.Tensor]],
        opts: Any,
    ) -> CollectiveWork:
        """As `reduce_scatter_single`, with the input in pieces."""
        output = tensors.single(outputs, "reduce_scatter")
        tensors.same_shape(inputs[0], output, self.size(), "reduce_scatter")
        return self.reduce_scatter_single(
            output, tensors.flatten(inputs[0], "reduce_scatter"), opts
        )

    def reduce_scatter_single_coalesced(
        self,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        opts: Any,
    ) -> CollectiveWork:
        """Several at once."""
        pairs = zip(outputs, inputs, strict=True)
        return self._join([self.reduce_scatter_single(o, i, opts) for o, i in pairs], outputs)

    # Movement

    def broadcast(self, tensor_list: list[torch.Tensor], opts: Any) -> CollectiveWork:
        """From the root's tensor into everybody's."""
        tensor = tensors.single(tensor_list, "broadcast")
        buffer = tensors.for_transport(tensor, "broadcast")
        seconds, lazy = self._terms(opts)
        operation = self._on(tensor).broadcast(
            buffer.pointer, buffer.numel, buffer.dtype, opts.rootRank, seconds, lazy
        )
        return self._work([operation], tensor_list, lazy=lazy)

    def all_gather_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002  (torch's name)
        opts: Any,
    ) -> CollectiveWork:
        """Everybody's input, one behind the other."""
        return self._all_gather(output, input, opts, [output], None)

    def all_gather_single_coalesced(
        self,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        opts: Any,
    ) -> CollectiveWork:
        """Several at once."""
        pairs = zip(outputs, inputs, strict=True)
        return self._join([self.all_gather_single(o, i, opts) for o, i in pairs], outputs)

    def allgather(
        self,
        outputs: list[list[torch.Tensor]],
        inputs: list[torch.Tensor],
        opts: Any,
    ) -> CollectiveWork:
        """Everybody's input, each into a tensor of its own."""
        source = tensors.single(inputs, "all_gather")
        tensors.same_shape(outputs[0], source, self.size(), "all_gather")
        whole, finish = self._landing(outputs[0])
        return self._all_gather(whole, source, opts, outputs[0], finish)

    def allgather_coalesced(
        self,
        outputs: list[list[torch.Tensor]],
        inputs: list[torch.Tensor],
        opts: Any,
    ) -> CollectiveWork:
        """Several at once; `outputs[rank][i]` belongs to input i."""
        columns = [[row[index] for row in outputs] for index in range(len(inputs))]
        works = [
            self.allgather([column], [tensor], opts)
            for column, tensor in zip(columns, inputs, strict=True)
        ]
        return self._join(works, [tensor for row in outputs for tensor in row])

    def gather(
        self,
        outputs: list[list[torch.Tensor]],
        inputs: list[torch.Tensor],
        opts: Any,
    ) -> CollectiveWork:
        """Everybody's input into the root's tensors."""
        source = tensors.single(inputs, "gather")
        buffer = tensors.for_transport(source, "gather")
        target, finish, keep, result = 0, None, [source], []
        if opts.rootRank == self.rank():
            result = outputs[0]
            tensors.same_shape(result, source, self.size(), "gather")
            whole, finish = self._landing(result)
            target = whole.data_ptr()
            keep.append(whole)
        seconds, lazy = self._terms(opts)
        operation = self._on(*keep).gather(
            buffer.pointer, target, buffer.numel, buffer.dtype, opts.rootRank, seconds, lazy
        )
        return self._work([operation], result, keep=keep, finish=finish, lazy=lazy)

    def scatter(
        self,
        outputs: list[torch.Tensor],
        inputs: list[list[torch.Tensor]],
        opts: Any,
    ) -> CollectiveWork:
        """Each rank's piece of the root's tensors."""
        output = tensors.single(outputs, "scatter")
        buffer = tensors.for_transport(output, "scatter")
        source, keep = 0, []
        if opts.rootRank == self.rank():
            tensors.same_shape(inputs[0], output, self.size(), "scatter")
            keep = [tensors.flatten(inputs[0], "scatter")]
            source = keep[0].data_ptr()
        seconds, lazy = self._terms(opts)
        operation = self._on(output, *keep).scatter(
            source, buffer.pointer, buffer.numel, buffer.dtype, opts.rootRank, seconds, lazy
        )
        return self._work([operation], outputs, keep=keep, lazy=lazy)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002  (torch's name)
        output_splits: list[int],
        input_splits: list[int],
        opts: Any,
    ) -> CollectiveWork:
        """Rows of the input to everybody, rows from everybody into the output."""
        counts = [
            tensors.counts(tensor, splits, self.size())
            for tensor, splits in ((input, input_splits), (output, output_splits))
        ]
        return self._all_to_all(output, input, counts, opts, [output], None)

    def alltoall(
        self,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        opts: Any,
    ) -> CollectiveWork:
        """A tensor to everybody, a tensor from everybody."""
        if len(inputs) != self.size() or len(outputs) != self.size():
            raise ValueError(
                f"all_to_all: {len(inputs)} inputs and {len(outputs)} outputs "
                f"for {self.size()} ranks"
            )
        whole, finish = self._landing(outputs)
        counts = [[tensor.numel() for tensor in side] for side in (inputs, outputs)]
        source = tensors.flatten(inputs, "all_to_all")
        return self._all_to_all(whole, source, counts, opts, outputs, finish)

    def send(self, tensor_list: list[torch.Tensor], peer: int, tag: int) -> CollectiveWork:
        """To one rank."""
        tensor = tensors.single(tensor_list, "send")
        buffer = tensors.for_transport(tensor, "send")
        seconds = self._timeout_seconds
        operation = self._on(tensor).send(
            buffer.pointer, buffer.numel, buffer.dtype, peer, tag, seconds
        )
        return self._work([operation], tensor_list, lazy=False)

    def recv(self, tensor_list: list[torch.Tensor], peer: int, tag: int) -> CollectiveWork:
        """From one rank."""
        return self._recv(tensor_list, peer, tag)

    def recv_anysource(self, tensor_list: list[torch.Tensor], tag: int) -> CollectiveWork:
        """From whoever sends with this tag first; who that was depends on who is faster."""
        return self._recv(tensor_list, None, tag)

    def _recv(self, tensor_list: list[torch.Tensor], peer: int | None, tag: int) -> CollectiveWork:
        tensor = tensors.single(tensor_list, "recv")
        buffer = tensors.for_transport(tensor, "recv")
        seconds = self._timeout_seconds
        operation = self._on(tensor).recv(
            buffer.pointer, buffer.numel, buffer.dtype, peer, tag, seconds
        )
        return self._work([operation], tensor_list, lazy=False)

    def barrier(self, opts: Any) -> CollectiveWork:
        """Until everybody is here."""
        seconds, lazy = self._terms(opts)
        return self._work([self.communicator.barrier(seconds, lazy)], [], lazy=lazy)

    def monitored_barrier(self, opts: Any, wait_all_ranks: bool = False) -> None:  # noqa: ARG002, FBT001, FBT002
        """A barrier whose error names who did not come; all of ours do."""
        seconds, _ = self._terms(opts)
        self.communicator.barrier(seconds, True).wait()

    # What several share

    def _all_gather(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        opts: Options,
        result: Sequence[torch.Tensor],
        finish: Callable[[], object] | None,
    ) -> CollectiveWork:
        target = tensors.for_transport(output, "all_gather")
        buffer = tensors.for_transport(source, "all_gather")
        tensors.whole_shares("all_gather", output, source, self.size())
        seconds, lazy = self._terms(opts)
        operation = self._on(output, source).allgather(
            buffer.pointer, target.pointer, buffer.numel, buffer.dtype, seconds, lazy
        )
        return self._work([operation], result, keep=[output, source], finish=finish, lazy=lazy)

    def _all_to_all(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        counts: Sequence[list[int]],
        opts: Options,
        result: Sequence[torch.Tensor],
        finish: Callable[[], object] | None,
    ) -> CollectiveWork:
        if output.dtype != source.dtype:
            raise ValueError(f"all_to_all: input is {source.dtype}, output {output.dtype}")
        target = tensors.for_transport(output, "all_to_all")
        buffer = tensors.for_transport(source, "all_to_all")
        # Types that the engine does not know travel as bytes.
        scale = buffer.numel // max(source.numel(), 1) or target.numel // max(output.numel(), 1)
        sent, received = ([count * max(scale, 1) for count in side] for side in counts)
        seconds, lazy = self._terms(opts)
        operation = self._on(output, source).alltoall(
            buffer.pointer, target.pointer, sent, received, buffer.dtype, seconds, lazy
        )
        return self._work([operation], result, keep=[output, source], finish=finish, lazy=lazy)
