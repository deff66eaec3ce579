"""A rank of the training benchmark: runs steps of each variant on command.

Commands are lines `CALL BATCH SECONDS COUNT CHECK`: CALL is a variant, or `wire:BACKEND` for the
allreduces of a step alone, or `sharded-wire:BACKEND` for the gathers and scatters of a step, or
`memory:VARIANT` for bytes instead of seconds. SECONDS is the time of forward and backward pass of
timed layers.
"""

from __future__ import annotations

import contextlib
import functools
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, _compute_bucket_assignment_by_size

from bench.training import sharded
from bench.training.figures import WIRE
from bench.training.models import Model, Trainer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Commands", "Spec", "rank_main", "serve", "timed"]

TIMEOUT_SECONDS = 120
FIRST_BUCKET_BYTES = 1 << 20
"""Of torch's DDP, so that communication starts early."""


@dataclass(frozen=True, slots=True)
class Spec:
    """What the ranks of a group run."""

    name: str
    """Of the group, without spaces."""
    model: object
    """Of the measurement's own type."""
    backends: tuple[str, ...]
    """The first one is that of the default group."""
    namespaces: tuple[str, ...] = ()
    """Network namespace of each node; none: the host's network."""
    ranks_per_node: int = 1


class Commands(Protocol):
    """What a rank does on command."""

    def run(self, order: Sequence[str]) -> str:
        """Runs one command and returns its answer."""


def rank_main(rank: int, size: int, orders: str, store: str, spec: Spec) -> None:
    """A rank of the data-parallel measurements."""

    def runner(groups: dict[str, dist.ProcessGroup]) -> Commands:
        assert isinstance(spec.model, Model)
        return Runner(rank, spec.model, groups)

    serve(rank, size, orders, store, spec, runner)


def serve(
    rank: int,
    size: int,
    orders: str,
    store: str,
    spec: Spec,
    create: Callable[[dict[str, dist.ProcessGroup]], Commands],
) -> None:
    """Joins the groups and runs commands until the connection closes."""
    if spec.namespaces:
        from bench.netns import enter

        enter(spec.namespaces[rank // spec.ranks_per_node])
    torch.set_num_threads(1)
    dist.init_process_group(
        spec.backends[0],
        store=FileStore(store, size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=TIMEOUT_SECONDS),
    )
    world = dist.group.WORLD
    assert world is not None
    groups: dict[str, dist.ProcessGroup] = {spec.backends[0]: world}
    for backend in spec.backends[1:]:
        group = dist.new_group(backend=backend)
        assert isinstance(group, dist.ProcessGroup)
        groups[backend] = group
    # Other ranks may still connect: without this their first command would wait for them.
    dist.barrier()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(orders)
        connection.sendall(f"{spec.name} {rank}\n".encode())
        runner = create(groups)
        for line in connection.makefile("r"):
            try:
                answer = runner.run(line.split())
            except Exception as error:  # noqa: BLE001  (the coordinator ends the measurement)
                answer = f"{type(error).__name__}: {' '.join(str(error).split())}"
            with contextlib.suppress(BrokenPipeError):
                connection.sendall(f"{answer}\n".encode())
    dist.destroy_process_group()


def timed(call: Callable[[int], object], count: int) -> str:
    """Runs a call that all ranks make, and returns the answer with its seconds."""
    dist.barrier()
    start = time.perf_counter()
    call(count)
    return f"ok {time.perf_counter() - start:.9f}"


class Runner:
    """The variants of one rank, each created at its first command."""

    def __init__(self, rank: int, model: Model, groups: dict[str, dist.ProcessGroup]) -> None:
        self._rank, self._model, self._groups = rank, model, groups
        self._trainers: dict[str, Trainer] = {}

    def run(self, order: Sequence[str]) -> str:
        """Runs one command and returns its answer."""
        name, batch, seconds, count, check = order
        if name.startswith(WIRE):
            return timed(
                functools.partial(self._wire, self._groups[name.removeprefix(WIRE)]), int(count)
            )
        if name.startswith(sharded.WIRE):
            wire = sharded.Traffic(self._model.build(), name, self._groups)
            return timed(wire.steps, int(count))
        is_memory = name.startswith(sharded.MEMORY)
        name = name.removeprefix(sharded.MEMORY)
        if name not in self._trainers:
            self._trainers[name] = Trainer(self._model, name, self._groups, self._rank)
        trainer = self._trainers[name]
        if self._model.kind == "timed":
            trainer.set_seconds(float(seconds))
        if is_memory:
            return f"ok {trainer.memory_bytes(int(batch))}"
        # From the end of one step to that of another: each finishes what the one before left.
        trainer.steps(1, int(batch))
        answer = timed(lambda n: trainer.steps(n, int(batch)), int(count))
        trainer.finish()
        if int(check) and not self._is_equal(trainer):
            return "wrong parameters, which differ between ranks"
        return answer

    def _is_equal(self, trainer: Trainer) -> bool:
        own = trainer.digest()
        dist.broadcast(first := own.clone(), 0)
        return bool(own.equal(first))

    def _wire(self, group: dist.ProcessGroup, count: int) -> None:
        """The allreduces of the gradients, in the buckets of torch's DDP."""
        for _ in range(count):
            works = [dist.all_reduce(b, group=group, async_op=True) for b in self._buckets]
            for work in works:
                assert work is not None
                work.wait()

    @functools.cached_property
    def _buckets(self) -> list[torch.Tensor]:
        parameters: list[torch.Tensor] = [*reversed([*self._model.build().parameters()])]
        limits = [FIRST_BUCKET_BYTES, int(self._model.bucket_mebibytes * (1 << 20))]
        buckets, _ = _compute_bucket_assignment_by_size(parameters, limits)
        return [torch.zeros(sum(parameters[i].numel() for i in bucket)) for bucket in buckets]
