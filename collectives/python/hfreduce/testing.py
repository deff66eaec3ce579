"""Ranks as processes of this machine: for tests and benchmarks, here and in users' projects.

A fork server imports torch once; each rank is forked from it in milliseconds. Nothing outlives
`run`: ranks that do not end by the deadline are killed, and they die with their parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from multiprocessing.context import ForkServerContext, ForkServerProcess

__all__ = ["Failure", "Layout", "Outcome", "run", "values"]

ERROR_FIELDS = (
    "kind", "job", "rank", "node", "peer", "peer_node", "operation", "sequence", "phase", "detail",
    "absent", "flight_record",
)  # fmt: skip

PR_SET_PDEATHSIG = 1
_OF_TESTS = (
    "pytest", "hypothesis", "torch.distributed.pipelining", "torch.distributed.checkpoint",
    "haiscale.ddp", "haiscale.fsdp", "haiscale.moe", "haiscale.pipeline", "haiscale.state",
    "haiscale.tensor",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Layout:
    """Machines in rank order, as (name, zone), each with as many ranks."""

    nodes: tuple[tuple[str, str], ...]
    ranks_per_node: int

    @classmethod
    def two_zones(cls, nodes_per_zone: int, ranks_per_node: int) -> Layout:
        """Zones A and B of equal size: a0, a1, …, b0, b1, …."""
        names = [(f"{z.lower()}{i}", z) for z in "AB" for i in range(nodes_per_zone)]
        return cls(tuple(names), ranks_per_node)

    @classmethod
    def one_node(cls, ranks: int) -> Layout:
        """All ranks share one machine's memory."""
        return cls((("a0", "A"),), ranks)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.nodes) * self.ranks_per_node

    def document(self) -> dict[str, object]:
        """The topology file."""
        nodes = [{"name": n, "zone": z, "address": "127.0.0.1"} for n, z in self.nodes]
        return {"version": 1, "ranks_per_node": self.ranks_per_node, "nodes": nodes}


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception of a rank: its type, its text and our errors' fields."""

    type: str
    text: str
    fields: dict[str, Any]


@dataclass(slots=True)
class Outcome:
    """How one rank ended: with a value, an exception, or neither (killed or hung)."""

    rank: int
    value: Any = None
    failure: Failure | None = None
    answered: bool = False
    seconds: float = 0.0
    """From the start of all ranks to this one's answer."""


@dataclass(frozen=True, slots=True)
class _Task:
    file: str
    function: str
    arguments: tuple[Any, ...]
    rank: int
    world_size: int
    backend: str | None
    store: str
    timeout_seconds: float
    environment: dict[str, str] = field(default_factory=dict)


def run(
    function: Callable[..., Any],
    layout: Layout,
    *arguments: object,
    backend: str | None = "hfreduce",
    timeout_seconds: float = 60.0,
    deadline_seconds: float = 100.0,
    environment: Mapping[str, str] | None = None,
    per_rank: Mapping[int, Mapping[str, str]] | None = None,
    absent: Sequence[int] = (),
    lost_ranks: Sequence[int] = (),
) -> list[Outcome]:
    """Runs ``function(rank, world_size, *arguments)`` on every rank that is not `absent`.

    With a `backend`, the ranks are in its default process group, whose operations have
    `timeout_seconds`. `per_rank` adds to the environment of single ranks. The answers
    of `lost_ranks` are not awaited. The function is loaded by its file and name: it must be at
    the top level of its module.
    """
    context = _server()
    outcomes = [Outcome(rank) for rank in range(layout.world_size)]
    with tempfile.TemporaryDirectory(prefix="hfreduce-ranks-") as folder:
        topology = Path(folder, "topology.json")
        topology.write_text(json.dumps(layout.document()), encoding="utf-8")
        processes: dict[int, ForkServerProcess] = {}
        answers: dict[Connection, int] = {}
        try:
            for rank in range(layout.world_size):
                if rank in absent:
                    continue
                own = {"FLYER_TOPOLOGY": str(topology), "OMP_NUM_THREADS": "1"}
                # Killed ranks leave their recorders behind: here they go with the folder.
                own |= {"HFREDUCE_RUN_DIR": folder, "HFREDUCE_DUMP_DIR": folder}
                own |= dict(environment or {}) | dict((per_rank or {}).get(rank, {}))
                task = _Task(
                    function.__code__.co_filename,
                    function.__name__,
                    arguments,
                    rank,
                    layout.world_size,
                    backend,
                    str(Path(folder, "store")),
                    timeout_seconds,
                    own,
                )
                receiver, sender = context.Pipe(duplex=False)
                processes[rank] = context.Process(target=_main, args=(task, sender), daemon=True)
                processes[rank].start()
                sender.close()
                answers[receiver] = rank
            # The first start waits until the fork server has imported torch: up to a minute.
            start = time.monotonic()
            _collect(answers, outcomes, start, deadline_seconds, frozenset(lost_ranks))
        finally:
            for process in processes.values():
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                process.join()
    return outcomes


def _collect(
    answers: dict[Connection, int],
    outcomes: list[Outcome],
    start: float,
    deadline: float,
    lost_ranks: frozenset[int],
) -> None:
    while set(answers.values()) - lost_ranks:
        remaining = start + deadline - time.monotonic()
        ready = wait(list(answers), timeout=max(remaining, 0))
        if not ready:
            return
        for connection in ready:
            assert isinstance(connection, Connection)
            outcome = outcomes[answers.pop(connection)]
            outcome.seconds = time.monotonic() - start
            # The end of the file without an answer: it was killed.
            with contextlib.suppress(EOFError):
                outcome.value, outcome.failure = connection.recv()
                outcome.answered = True
            connection.close()


def _server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    # torch imports _dynamo at the first step of an optimizer: seconds for every rank by itself.
    modules = ["numpy", "torch", "torch.nn.parallel", "torch.distributed", "torch._dynamo"]
    modules += ["torch.distributed._functional_collectives", "hfreduce.torch"]
    # A rank imports the module of its function: that is quick where its imports are there already.
    modules += [name for name in _OF_TESTS if name in sys.modules]
    context.set_forkserver_preload([*modules, "hfreduce.testing"])
    # Ranks that share two cores must not start a thread pool each.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return context


def _main(task: _Task, sender: Connection) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ.update(task.environment)
    value, failure = None, None
    try:
        value = _call(task)
    except Exception as error:  # noqa: BLE001  (every failure is an answer)
        error_fields = {name: getattr(error, name) for name in ERROR_FIELDS if hasattr(error, name)}
        failure = Failure(type(error).__name__, str(error), error_fields)
        if os.environ.get("HFREDUCE_TESTING_TRACEBACK"):
            traceback.print_exc()
    sender.send((value, failure))
    sender.close()
    sys.stdout.flush()
    sys.stderr.flush()
    # Dismantling torch takes longer than most tests.
    os._exit(0)


def _call(task: _Task) -> object:
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    torch.set_num_threads(1)
    function = _load(task.file, task.function)
    if task.backend is not None:
        dist.init_process_group(
            task.backend,
            store=FileStore(task.store, task.world_size),
            rank=task.rank,
            world_size=task.world_size,
            timeout=timedelta(seconds=task.timeout_seconds),
        )
    value = function(task.rank, task.world_size, *task.arguments)
    # The function may have joined a group, too: a process that ends without this has died.
    if dist.is_initialized():
        dist.destroy_process_group()
    return value


def values(outcomes: Sequence[Outcome]) -> list[Any]:
    """Return values of all ranks; raises AssertionError that names a rank without one."""
    for outcome in outcomes:
        if outcome.failure is not None:
            raise AssertionError(f"rank {outcome.rank}: {outcome.failure}")
        if not outcome.answered:
            raise AssertionError(f"rank {outcome.rank} ended without an answer")
    return [outcome.value for outcome in outcomes]


def _load(file: str, name: str) -> Callable[..., object]:
    spec = importlib.util.spec_from_file_location("hfreduce_rank_functions", file)
    assert spec is not None, file
    assert spec.loader is not None, file
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    function: Callable[..., object] = getattr(module, name)
    return function
