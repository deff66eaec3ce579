"""A torch rank: runs collectives of HFReduce and Gloo in the same process on command."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import socket
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hfreduce.torch
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _compute_bucket_assignment_by_size
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TextIO

__all__ = ["GRADIENT_BUCKETS", "TRAINING_STEP", "rank_main"]

BYTES_MAX = 64 << 20
CONTEXT, BATCH = 128, 1
TRAINING_STEP = "ddp_step"
"""Forward, backward and allreduces of the example's model under DDP with its defaults."""
GRADIENT_BUCKETS = "gradients"
"""The allreduces of such a step alone: all are started, then waited for."""
BUCKET_BYTES = [1 << 20, 25 << 20]
"""DDP's defaults: a small first bucket, so that communication starts early."""


def rank_main(rank: int, size: int, path: str, names: dict[str, str]) -> None:
    """Serves one connection per backend until one closes; `names`: backend to rank group."""
    groups = {
        "hfreduce": dist.group.WORLD,
        "gloo": dist.new_group(backend="gloo") if "gloo" in names else None,
    }
    buffers = Buffers(rank, size)
    connections: dict[int, tuple[socket.socket, TextIO, Any]] = {}
    for backend, name in names.items():
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(path)
        connection.sendall(f"{name} {rank}\n".encode())
        connections[connection.fileno()] = (connection, connection.makefile("r"), groups[backend])
    while True:
        for ready in wait(list(connections)):
            assert isinstance(ready, int)
            connection, file, group = connections[ready]
            order = file.readline().split()
            if not order:
                return
            # The harness closes the connections of a failed group.
            with contextlib.suppress(BrokenPipeError):
                connection.sendall(f"{run_command(order, group, buffers)}\n".encode())


def run_command(order: list[str], group: Any, buffers: Buffers) -> str:
    """Runs one command and returns its answer."""
    name, kind, size_bytes, where, count, check = order
    try:
        if name == TRAINING_STEP:
            operation: Operation = buffers.training(group)
        elif name == GRADIENT_BUCKETS:
            operation = buffers.gradients(group)
        else:
            operation = buffers.operation(name, kind, int(size_bytes), where, group)
    except LookupError as error:
        return f"unknown operation or memory: {error}"
    operation.fill(int(check))
    dist.barrier(group=group)
    start = time.perf_counter()
    for _ in range(int(count)):
        operation.call()
    seconds = time.perf_counter() - start
    if int(check) and not operation.is_correct():
        return "wrong result"
    return f"ok {seconds:.9f}"


class Operation:
    """A call with its input and the expected output values of each block."""

    def __init__(
        self,
        call: Callable[[], object],
        buffers: tuple[torch.Tensor, torch.Tensor],
        values: list[int],
        expected: list[int],
    ) -> None:
        self.call = call
        self._input, self._output = buffers
        self._values, self._expected = values, expected

    def fill(self, check: int) -> None:
        """Fills the input with known values if the result is checked, otherwise with zeros."""
        self._output.zero_()
        for block, value in zip(self._input.chunk(len(self._values)), self._values, strict=True):
            block.fill_(value * check)

    def is_correct(self) -> bool:
        """Whether the output has the expected values."""
        blocks = self._output.chunk(len(self._expected))
        return all(bool(b.eq(v).all()) for b, v in zip(blocks, self._expected, strict=True))


class Buffers:
    """The memory of a rank, the same for both backends."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._memory: dict[tuple[str, str], torch.Tensor] = {}
        self._training: dict[str, Operation] = {}

    def operation(self, name: str, kind: str, size_bytes: int, where: str, group: Any) -> Operation:
        """The operation of a command."""
        rank, size = self.rank, self.size
        ranks = list(range(size))
        a = self._tensor("input", where, group)[:size_bytes].view(getattr(torch, kind))
        if name == "allreduce":
            call: Callable[[], object] = lambda: dist.all_reduce(a, group=group)  # noqa: E731
            return Operation(call, (a, a), [1], [size])
        if name == "broadcast":
            call = lambda: dist.broadcast(a, 0, group=group)  # noqa: E731
            return Operation(call, (a, a), [1 if rank else size + 1], [size + 1])
        b = self._tensor("output", where, group)[:size_bytes].view(a.dtype)
        block = a.numel() // size
        if name == "allgather":
            own = a[:block]
            call = lambda: dist.all_gather_into_tensor(b, own, group=group)  # noqa: E731
            return Operation(call, (own, b), [rank + 1], [r + 1 for r in ranks])
        if name == "reduce_scatter":
            own = b[:block]
            call = lambda: dist.reduce_scatter_tensor(own, a, group=group)  # noqa: E731
            return Operation(call, (a, own), [r + 1 for r in ranks], [size * (rank + 1)])
        if name == "alltoall":
            values = [rank + r + 1 for r in ranks]
            call = lambda: dist.all_to_all_single(b, a, group=group)  # noqa: E731
            return Operation(call, (a, b), values, values)
        nothing = torch.zeros(1)
        if name == "reduce":
            call = lambda: dist.reduce(a, 0, group=group)  # noqa: E731
            # Gloo may write to the tensors of other ranks than the root.
            return Operation(call, (a, nothing if rank else a), [1], [0 if rank else size])
        if name == "gather":
            parts = None if rank else list(b.chunk(size))
            own = a[:block]
            call = lambda: dist.gather(own, parts, dst=0, group=group)  # noqa: E731
            expected = [0] if rank else [r + 1 for r in ranks]
            return Operation(call, (own, nothing if rank else b), [rank + 1], expected)
        if name == "scatter":
            parts = None if rank else list(a.chunk(size))
            own = b[:block]
            call = lambda: dist.scatter(own, parts, src=0, group=group)  # noqa: E731
            return Operation(call, (a, own), [r + 1 for r in ranks], [rank + 1])
        if name == "barrier":
            call = lambda: dist.barrier(group=group)  # noqa: E731
            return Operation(call, (nothing, nothing), [0], [0])
        if name == "p2p":
            call = lambda: self._round_trip(a, b, group)  # noqa: E731
            return Operation(call, (a, b), [rank + 1], [rank // 2 * 2 + 1])
        raise LookupError(name)

    def training(self, group: Any) -> Operation:
        """A step of the example's model."""
        backend = dist.get_backend(group)
        if backend not in self._training:
            torch.set_num_threads(1)
            model = DistributedDataParallel(example_model(), process_group=group)
            data = torch.randint(0, 256, (BATCH, CONTEXT))

            def step() -> None:
                model.zero_grad(set_to_none=False)
                logits = model(data)
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), data.flatten())
                torch.autograd.backward(loss)

            nothing = torch.zeros(1)
            self._training[backend] = Operation(step, (nothing, nothing), [0], [0])
        return self._training[backend]

    def gradients(self, group: Any) -> Operation:
        """The gradients of the example's model, in DDP's buckets."""
        sizes = bucket_sizes()
        gradients = torch.empty(sum(sizes))

        def call() -> None:
            works = [
                dist.all_reduce(bucket, group=group, async_op=True)
                for bucket in gradients.split_with_sizes(sizes)
            ]
            for work in works:
                work.wait()

        return Operation(call, (gradients, gradients), [1], [self.size])

    def _round_trip(self, a: torch.Tensor, b: torch.Tensor, group: Any) -> None:
        peer = self.rank ^ 1
        if self.rank % 2 == 0:
            dist.send(a, peer, group=group)
            dist.recv(b, peer, group=group)
        else:
            dist.recv(b, peer, group=group)
            dist.send(b, peer, group=group)

    def _tensor(self, name: str, where: str, group: Any) -> torch.Tensor:
        """Memory of this kind for the largest case."""
        if where not in {"private", "registered"}:
            raise LookupError(where)
        if where == "registered" and dist.get_backend(group) != "hfreduce":
            raise LookupError(where)
        if (name, where) not in self._memory:
            if where == "private":
                tensor = torch.empty(BYTES_MAX, dtype=torch.uint8)
            else:
                tensor = hfreduce.torch.empty(BYTES_MAX, dtype=torch.uint8, group=group)
            self._memory[name, where] = tensor
        return self._memory[name, where]


@functools.cache
def bucket_sizes() -> list[int]:
    """Elements of each bucket of the example's gradients, in the order in which DDP sends them."""
    # After the first step DDP groups gradients in the order in which they became ready.
    parameters: list[torch.Tensor] = [*reversed([*example_model().parameters()])]
    buckets, _ = _compute_bucket_assignment_by_size(parameters, BUCKET_BYTES)
    return [sum(parameters[index].numel() for index in bucket) for bucket in buckets]


def example_model() -> torch.nn.Module:
    """The model of `examples/gpt`."""
    path = Path(__file__).resolve().parents[2] / "examples/gpt/model.py"
    spec = importlib.util.spec_from_file_location("model", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = module.GPT(CONTEXT)
    assert isinstance(model, torch.nn.Module)
    return model
