"""torch's collectives on top of the engine's.

The methods' names and arguments are torch's (`torch.distributed.Backend`). Each checks its tensors,
starts one operation of the engine and hands out a `CollectiveWork`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hfreduce import _native, sparse, tensors
from hfreduce.group import Group
from hfreduce.store_rendezvous import StoreRendezvous

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from datetime import timedelta

    from hfreduce._native import Membership, Settings
    from hfreduce.group import Options
    from hfreduce.work import CollectiveWork

__all__ = ["HFReduceBackend"]


class HFReduceBackend(Group):
    """One group of ranks. torch calls the methods; their names and arguments are torch's."""

    @classmethod
    def join(
        cls, store: Any, membership: Membership, settings: Settings, timeout: timedelta
    ) -> HFReduceBackend:
        """Connects the members through the store."""
        limit = min(timeout.total_seconds(), settings.connect_seconds)
        rendezvous = StoreRendezvous(store, membership)
        connected = _native.join(rendezvous, membership, settings, limit)
        return cls(connected, membership, settings, timeout, store)

    # Reductions

    def allreduce(self, tensor_list: list[torch.Tensor], opts: Any) -> CollectiveWork:
        """Reduces in place."""
        tensor = tensors.single(tensor_list, "allreduce")
        if tensor.is_sparse:
            sparse.allreduce(self, tensor, opts)
            return self._work("sparse_all_reduce", [], tensor_list)
        buffer, memory, finish = tensors.in_place_reduction(tensor, opts.reduceOp, "allreduce")
        seconds, lazy = self._terms(opts)
        operation = self._on(tensor).allreduce(
            buffer.pointer, buffer.numel, buffer.dtype, buffer.op, seconds, lazy, memory
        )
        return self._work("all_reduce", [operation], tensor_list, inputs=[tensor], finish=finish)

    def allreduce_coalesced(self, tensor_list: list[torch.Tensor], opts: Any) -> CollectiveWork:
        """Reduces in place; tensors of one type are sent as one operation."""
        op = tensors.operation_code(opts.reduceOp)
        seconds, lazy = self._terms(opts)
        if op == tensors.PREMUL_SUM or any(not tensor.is_cpu for tensor in tensor_list):
            # GPU tensors are copied one by one anyway.
            each = (self.allreduce([tensor], opts) for tensor in tensor_list)
            return self._join("all_reduce", each, tensor_list, inputs=tensor_list)
        by_type: dict[tuple[int, int], list[tuple[int, int]]] = {}
        keep: list[torch.Tensor] = []
        finishes: list[Callable[[], object]] = []
        for tensor in tensor_list:
            memory, finish = tensors.written(tensor, "allreduce_coalesced")
            keep.append(memory)
            if finish is not None:
                finishes.append(finish)
            buffer = tensors.for_reduction(memory, "allreduce_coalesced", op)
            buffers = by_type.setdefault((buffer.dtype, buffer.op), [])
            buffers.append((buffer.pointer, buffer.numel))
        operations = [
            self.communicator.allreduce_many(buffers, dtype, code, seconds, lazy, keep)
            for (dtype, code), buffers in by_type.items()
        ]

        def finish_all() -> None:
            for finish in finishes:
                finish()

        finish = finish_all if finishes else None
        return self._work("all_reduce", operations, tensor_list, inputs=tensor_list, finish=finish)

    def reduce(self, tensor_list: list[torch.Tensor], opts: Any) -> CollectiveWork:
        """Reduces into the root's tensor."""
        tensor = tensors.single(tensor_list, "reduce")
        root = tensors.root(opts.rootRank, self.size(), "reduce")
        is_root = root == self.rank()
        buffer, memory, finish = tensors.in_place_reduction(tensor, opts.reduceOp, "reduce")
        seconds, lazy = self._terms(opts)
        operation = self._on(tensor).reduce(
            buffer.pointer, buffer.numel, buffer.dtype, buffer.op, root, seconds, lazy,
            memory,
        )  # fmt: skip
        finish = finish if is_root else None
        return self._work("reduce", [operation], tensor_list, inputs=[tensor], finish=finish)

    def reduce_scatter_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002  (torch's name)
        opts: Any,
    ) -> CollectiveWork:
        """This rank's block of the reduction of all inputs."""
        name = "reduce_scatter_tensor"
        tensors.whole_shares(name, input, output, self.size())
        source = tensors.read(input, name)
        if tensors.operation_code(opts.reduceOp) == tensors.PREMUL_SUM:
            source = tensors.premultiplied(source, opts.reduceOp, name)
        return self._reduce_scatter(output, source.data_ptr(), [source], opts, name)

    def reduce_scatter(
        self,
        outputs: list[torch.Tensor],
        inputs: list[list[torch.Tensor]],
        opts: Any,
    ) -> CollectiveWork:
        """As `reduce_scatter_single`, with the input in pieces, which may differ in size."""
        name = "reduce_scatter"
        output, pieces = tensors.single(outputs, name), tensors.single_list(inputs, name)
        tensors.one_each(pieces, self.size(), name)
        tensors.same_shape([pieces[self.rank()]], output, 1, name)
        if len({piece.numel() for piece in pieces}) > 1:
            return self._uneven_reduce_scatter(output, pieces, opts)
        tensors.same_shape(pieces, output, self.size(), name)
        if tensors.operation_code(opts.reduceOp) == tensors.PREMUL_SUM:
            pieces = [tensors.premultiplied(each, opts.reduceOp, name) for each in pieces]
        where, keep = tensors.gathered(pieces, name)
        return self._reduce_scatter(output, where, keep, opts, name)

    def _reduce_scatter(
        self, output: torch.Tensor, source: tensors.Place, keep: object, opts: Any, name: str
    ) -> CollectiveWork:
        op = tensors.operation_code(opts.reduceOp)
        memory, finish = tensors.written(output, name)
        target = tensors.for_reduction(memory, name, op)
        seconds, lazy = self._terms(opts)
        operation = self._on(output).reduce_scatter(
            source, target.pointer, target.numel, target.dtype, target.op, seconds, lazy,
            (memory, keep),
        )  # fmt: skip
        return self._work(name, [operation], [output], inputs=[output], finish=finish)

    def _uneven_reduce_scatter(
        self, output: torch.Tensor, pieces: Sequence[torch.Tensor], opts: Any
    ) -> CollectiveWork:
        """One reduction for each rank: the root's is its output, which gets its piece first."""
        with torch.no_grad():
            output.copy_(pieces[self.rank()].view(output.shape))

        def reductions() -> Iterator[CollectiveWork]:
            for root, piece in enumerate(pieces):
                terms = tensors.Terms(opts.reduceOp, root, opts.timeout, opts.asyncOp)
                yield self.reduce([output if root == self.rank() else piece], terms)

        return self._join("reduce_scatter", reductions(), [output], inputs=[output])

    def reduce_scatter_single_coalesced(
        self,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        opts: Any,
    ) -> CollectiveWork:
        """Several as one operation."""
        pairs = zip(outputs, inputs, strict=True)
        each = (self.reduce_scatter_single(o, i, opts) for o, i in pairs)
        return self._join("reduce_scatter_tensor", each, outputs, inputs=outputs)

    # Movement

    def broadcast(self, tensor_list: list[torch.Tensor], opts: Any) -> CollectiveWork:
        """Copies the root's tensor to all ranks."""
        tensor = tensors.single(tensor_list, "broadcast")
        root = tensors.root(opts.rootRank, self.size(), "broadcast")
        memory, finish = tensors.written(tensor, "broadcast")
        buffer = tensors.for_transport(memory)
        seconds, lazy = self._terms(opts)
        operation = self._on(tensor).broadcast(
            buffer.pointer, buffer.numel, buffer.dtype, root, seconds, lazy, memory
        )
        return self._work("broadcast", [operation], tensor_list, inputs=[tensor], finish=finish)

    def all_gather_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002  (torch's name)
        opts: Any,
    ) -> CollectiveWork:
        """Gathers the inputs of all ranks into one contiguous tensor."""
        name = "all_gather_into_tensor"
        tensors.whole_shares(name, output, input, self.size())
        memory, finish = tensors.written(output, name)
        where, keep = memory.data_ptr(), memory
        return self._all_gather(name, (where, keep, finish), input, opts, [output])

    def all_gather_single_coalesced(
        self,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        opts: Any,
    ) -> CollectiveWork:
        """Several as one operation; of several types or on a GPU one after the other."""
        name = "all_gather_into_tensor"
        pairs = [*zip(outputs, inputs, strict=True)]
        if len({(t.dtype, t.is_cpu) for pair in pairs for t in pair}) != 1 or not inputs[0].is_cpu:
            each = (self.all_gather_single(o, i, opts) for o, i in pairs)
            return self._join(name, each, outputs, inputs=inputs)
        for output, source in pairs:
            tensors.whole_shares(name, output, source, self.size())
        written = [tensors.written(output, name) for output in outputs]
        memory = [each for each, _ in written]
        finishes = [finish for _, finish in written if finish is not None]

        def finish_all() -> None:
            for finish in finishes:
                finish()

        blocks = tensors.shares(memory, self.size()), memory, finish_all if finishes else None
        return self._all_gather(name, blocks, tensors.joined(inputs, name), opts, outputs)

    def allgather(
        self,
        outputs: list[list[torch.Tensor]],
        inputs: list[torch.Tensor],
        opts: Any,
    ) -> CollectiveWork:
        """Gathers the inputs of all ranks into a list of tensors."""
        name = "all_gather"
        source = tensors.single(inputs, name)
        result = tensors.single_list(outputs, name)
        tensors.same_shape(result, source, self.size(), name)
        blocks = self._blocks(result, name, sources=[source], own=self.rank())
        return self._all_gather(name, blocks, source, opts, result)

    def allgather_coalesced(
        self,
        outputs: list[list[torch.Tensor]],
        inputs: list[torch.Tensor],
        opts: Any,
    ) -> CollectiveWork:
        """Several as one operation; `outputs[rank][i]` belongs to input i."""
        columns = [[row[index] for row in outputs] for index in range(len(inputs))]
        each = (
            self.allgather([column], [tensor], opts)
            for column, tensor in zip(columns, inputs, strict=True)
        )
        result = [tensor for row in outputs for tensor in row]
        return self._join("all_gather", each, result, inputs=inputs)

    def gather(
        self,
        outputs: list[list[torch.Tensor]],
        inputs: list[torch.Tensor],
        opts: Any,
    ) -> CollectiveWork:
        """Gathers the inputs of all ranks into the root's tensors."""
        source = tensors.single(inputs, "gather")
        root = tensors.root(opts.rootRank, self.size(), "gather")
        memory = tensors.read(source, "gather")
        buffer = tensors.for_transport(memory)
        target: tensors.Place = 0
        keep: object = None
        finish: Callable[[], object] | None = None
        result: list[torch.Tensor] = []
        if root == self.rank():
            result = tensors.single_list(outputs, "gather")
            tensors.same_shape(result, source, self.size(), "gather")
            target, keep, finish = self._blocks(result, "gather", sources=[memory], own=self.rank())
        seconds, lazy = self._terms(opts)
        operation = self._on(source, *result).gather(
            buffer.pointer, target, buffer.numel, buffer.dtype, root, seconds, lazy,
            (memory, keep),
        )  # fmt: skip
        return self._work("gather", [operation], result, inputs=[source], finish=finish)

    def scatter(
        self,
        outputs: list[torch.Tensor],
        inputs: list[list[torch.Tensor]],
        opts: Any,
    ) -> CollectiveWork:
        """Sends each rank its tensor of the root's list."""
        output = tensors.single(outputs, "scatter")
        root = tensors.root(opts.rootRank, self.size(), "scatter")
        memory, finish = tensors.written(output, "scatter")
        buffer = tensors.for_transport(memory)
        source: tensors.Place = 0
        pieces: Sequence[torch.Tensor] = []
        keep: object = None
        if root == self.rank():
            pieces = tensors.single_list(inputs, "scatter")
            tensors.same_shape(pieces, output, self.size(), "scatter")
            source, keep = tensors.gathered(pieces, "scatter")
        seconds, lazy = self._terms(opts)
        operation = self._on(output, *pieces).scatter(
            source, buffer.pointer, buffer.numel, buffer.dtype, root, seconds, lazy,
            (memory, keep),
        )  # fmt: skip
        return self._work("scatter", [operation], outputs, inputs=[output], finish=finish)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002  (torch's name)
        output_splits: list[int],
        input_splits: list[int],
        opts: Any,
    ) -> CollectiveWork:
        """Sends rows of the input to all ranks and receives rows of the output from them."""
        counts = [
            tensors.counts(tensor, splits, self.size())
            for tensor, splits in ((input, input_splits), (output, output_splits))
        ]
        target, finish = tensors.written(output, "all_to_all")
        source = tensors.read(input, "all_to_all")
        blocks = (target.data_ptr(), target, finish)
        return self._all_to_all(
            [output], [input], blocks, (source.data_ptr(), source), counts, opts
        )

    def alltoall(
        self,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        opts: Any,
    ) -> CollectiveWork:
        """Sends a tensor to each rank and receives a tensor from each rank."""
        name = "all_to_all"
        if len(inputs) != self.size() or len(outputs) != self.size():
            raise ValueError(
                f"all_to_all: expected {self.size()} inputs and outputs, one per rank, "
                f"got {len(inputs)} inputs and {len(outputs)} outputs"
            )
        counts = [[tensor.numel() for tensor in side] for side in (inputs, outputs)]
        blocks = self._blocks(outputs, name, sources=inputs)
        return self._all_to_all(
            outputs, inputs, blocks, tensors.gathered(inputs, name), counts, opts
        )

    def send(self, tensor_list: list[torch.Tensor], peer: int, tag: int) -> CollectiveWork:
        """Sends to one rank."""
        tensor = tensors.single(tensor_list, "send")
        memory = tensors.read(tensor, "send")
        buffer = tensors.for_transport(memory)
        operation = self._on(tensor).send(
            buffer.pointer, buffer.numel, buffer.dtype, peer, tag, self._timeout_seconds, memory
        )
        return self._work("send", [operation], tensor_list, inputs=[tensor])

    def recv(self, tensor_list: list[torch.Tensor], peer: int, tag: int) -> CollectiveWork:
        """Receives from one rank."""
        return self._recv("recv", tensor_list, peer, tag)

    def recv_anysource(self, tensor_list: list[torch.Tensor], tag: int) -> CollectiveWork:
        """Receives from the first rank that sends with this tag, which depends on timing."""
        return self._recv("recvAnySource", tensor_list, None, tag)

    def _recv(
        self, name: str, tensor_list: list[torch.Tensor], peer: int | None, tag: int
    ) -> CollectiveWork:
        tensor = tensors.single(tensor_list, "recv")
        memory, finish = tensors.written(tensor, "recv")
        buffer = tensors.for_transport(memory)
        operation = self._on(tensor).recv(
            buffer.pointer, buffer.numel, buffer.dtype, peer, tag, self._timeout_seconds, memory
        )
        return self._work(name, [operation], tensor_list, inputs=[tensor], finish=finish)

    def barrier(self, opts: Any) -> CollectiveWork:
        """Waits for all ranks, after all work in the current streams of the GPUs in use."""
        seconds, lazy = self._terms(opts)
        for ordinal in sorted(self._gpus):
            torch.cuda.current_stream(ordinal).synchronize()
        return self._work("barrier", [self.communicator.barrier(seconds, lazy)], [])

    def monitored_barrier(self, opts: Any, wait_all_ranks: bool = False) -> None:  # noqa: FBT001, FBT002
        """A barrier whose error names the absent ranks: the first, or all."""
        seconds = opts.timeout.total_seconds()
        self.attendance.meet(
            seconds if seconds >= 0 else self._timeout_seconds, all_absent=wait_all_ranks
        )

    # Groups of some of the members

    @property
    def supports_splitting(self) -> bool:
        """A part of the group is connected through the group's store."""
        return True

    def split(self, store: Any, ranks: list[int], opts: Any) -> HFReduceBackend:
        """The group of these members, in this order; all of them call it."""
        if self.rank() not in ranks:
            # torch crashes where a backend in Python returns nothing.
            raise ValueError(
                f"split_group: rank {self.rank()} is in none of the groups: list it alone, "
                f"[{self.rank()}], or use new_group"
            )
        global_ranks = self.membership.global_ranks
        members = _native.Membership(
            ranks.index(self.rank()),
            [global_ranks[rank] for rank in ranks],
            self.membership.world_size,
        )
        return type(self).join(store, members, self.settings, opts._timeout)

    # What several share

    def _all_gather(
        self,
        name: str,
        blocks: tuple[tensors.Place, object, Callable[[], object] | None],
        source: torch.Tensor,
        opts: Options,
        result: Sequence[torch.Tensor],
    ) -> CollectiveWork:
        target, keep, finish = blocks
        memory = tensors.read(source, name)
        buffer = tensors.for_transport(memory)
        seconds, lazy = self._terms(opts)
        operation = self._on(source, *result).allgather(
            buffer.pointer, target, buffer.numel, buffer.dtype, seconds, lazy, (memory, keep)
        )
        return self._work(name, [operation], result, inputs=[source], finish=finish)

    def _all_to_all(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        blocks: tuple[tensors.Place, object, Callable[[], object] | None],
        source: tuple[tensors.Place, object],
        counts: Sequence[list[int]],
        opts: Options,
    ) -> CollectiveWork:
        dtypes = {tensor.dtype for tensor in (*outputs, *inputs)}
        if len(dtypes) != 1:
            names = ", ".join(sorted(str(dtype) for dtype in dtypes))
            raise ValueError(f"all_to_all: tensors are of several types: {names}")
        code, scale = tensors.unit(dtypes.pop())
        send_counts, received = ([count * scale for count in side] for side in counts)
        target, keep, finish = blocks
        seconds, lazy = self._terms(opts)
        operation = self._on(*outputs, *inputs).alltoall(
            source[0], target, send_counts, received, code, seconds, lazy, (source[1], keep)
        )
        return self._work("all_to_all", [operation], outputs, inputs=inputs, finish=finish)
