"""Activations and gradients between the ranks of a pipeline.

Receives are posted ahead of the computations that use them, in the order of the schedule: a message
of more than a few KiB is sent only once its receive is posted, and a posted receive delays no other
operation. A message is matched by its tag, which names stage, direction and micro-batch, so the
order of posts does not matter. Sends are waited for at the latest at the end of a step.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch.distributed as dist

from haiscale.pipeline.actions import Kind
from haiscale.pipeline.errors import PipelineError
from haiscale.trace import recorder
from haiscale.trace.spans import Kind as TracedKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from datetime import timedelta

    from torch import Tensor

    from haiscale.pipeline.actions import Schedule

__all__ = ["Messages", "received"]

AHEAD: Final = 4
"""Receives that are posted before a computation needs them: those of two slots, each with a
forward and a backward pass. More need more buffers and gain nothing where a transfer is shorter."""
TENSORS_MAX: Final = 64
"""Tensors that a stage may pass to the next one."""
WORDS: Final = {"F": "activation", "B": "gradient"}
COMPUTATIONS: Final = {
    "F": "forward pass",
    "L": "loss",
    "B": "backward pass",
    "W": "backward of the weights pass",
}

Key = tuple[int, str, int]
"""Stage, F for an activation or B for a gradient, and micro-batch."""


def received(schedule: Schedule, rank: int) -> list[Key]:
    """The inputs that a rank receives from other ranks, in the order of their use."""
    rank_of = schedule.rank_of()
    keys: list[Key] = []
    for stage, kind, microbatch in schedule.ranks[rank]:
        if kind is Kind.WEIGHT:
            continue
        way, source = ("F", stage - 1) if kind is Kind.FORWARD else ("B", stage + 1)
        if 0 <= source < schedule.stages and rank_of[source] != rank:
            keys.append((stage, way, microbatch))
    return keys


class Messages:
    """The messages of one rank of a pipeline.

    Args:
        group: The ranks of the pipeline.
        schedule: The schedule that they run.
        timeout: Deadline of a wait; None: that of the group's operations.
    """

    def __init__(
        self, group: dist.ProcessGroup, schedule: Schedule, timeout: timedelta | None
    ) -> None:
        self.rank = dist.get_rank()
        """Of the whole job, as in errors."""
        self.is_failed = False
        """Whether waits return at once, as nothing is sent or received any more."""
        self.microbatch = 0
        """That of the forward pass that was started last."""
        self.allocate: Callable[[Key], Sequence[tuple[Tensor, int]]] = lambda _key: ()
        """Tensors to receive into, each with the group's rank that sends it."""
        self._group = group
        self._stages = schedule.stages
        self._rank_of = schedule.rank_of()
        self._order = received(schedule, group.rank())
        self._timeout = (timeout,) if timeout is not None else ()
        self._posted: dict[Key, list[dist.Work]] = {}
        self._sending: dict[Key, list[dist.Work]] = {}
        self._shapes: dict[tuple[int, str, int], tuple[Any, ...]] = {}
        self._next = 0
        self._used = 0

    def start(self) -> None:
        """Before a step: nothing has been received yet."""
        self._next = self._used = 0

    def post(self) -> None:
        """Posts the receives of the next computations."""
        while self._next < min(len(self._order), self._used + AHEAD):
            key = self._order[self._next]
            works = []
            for index, (tensor, peer) in enumerate(self.allocate(key)):
                work = dist.irecv(
                    tensor, group=self._group, group_src=peer, tag=self._tag(key, index)
                )
                assert work is not None, "this rank is in the group"
                works.append(work)
            self._posted[key] = works
            self._next += 1

    def receive(self, stage: int, way: str, microbatch: int) -> None:
        """Waits for an input, unless it comes from this rank; posts receives for later ones."""
        key = stage, way, microbatch
        self.post()
        if key not in self._posted:
            return
        source = stage + (-1 if way == "F" else 1)
        self._wait(key, self._posted.pop(key), source, f"waiting for the {WORDS[way]} from")
        self._used += 1
        self.post()

    def send(
        self, stage: int, way: str, microbatch: int, messages: Sequence[tuple[Tensor, int]]
    ) -> None:
        """Starts to send the output of a stage; HFReduce holds its memory until it is sent."""
        key = stage, way, microbatch
        target = stage + (1 if way == "F" else -1), way, microbatch
        if len(messages) > TENSORS_MAX:
            raise self._error(
                key, f"passes {len(messages)} tensors to another stage: at most {TENSORS_MAX}"
            )
        self._release()
        works = []
        for index, (tensor, peer) in enumerate(messages):
            self._check_shape(key, index, tensor)
            tag = self._tag(target, index)
            work = dist.isend(tensor, group=self._group, group_dst=peer, tag=tag)
            assert work is not None, "this rank is in the group"
            works.append(work)
        self._sending[key] = works

    def sent(self, stage: int, way: str, microbatch: int) -> None:
        """Waits until the output of a stage is sent."""
        works = self._sending.pop((stage, way, microbatch), [])
        if not self.is_failed:
            target = stage + (1 if way == "F" else -1)
            self._wait((stage, way, microbatch), works, target, f"sending the {WORDS[way]} to")

    def finish(self) -> None:
        """At the end of a step: waits until everything is sent."""
        for key in list(self._sending):
            self.sent(*key)

    def _release(self) -> None:
        """Drops the memory of the oldest outputs that are sent."""
        for key, works in list(self._sending.items()):
            if not all(work.is_completed() for work in works):
                return
            self.sent(*key)

    @contextmanager
    def computing(self, stage: int, kind: str, microbatch: int) -> Iterator[None]:
        """Names stage and micro-batch in the error of a computation, and in a trace."""
        if kind == "F":
            self.microbatch = microbatch
        part = TracedKind.FORWARD if kind in "FL" else TracedKind.BACKWARD
        try:
            with recorder.span(part, f"{stage}{kind}{microbatch}"):
                yield
        except PipelineError:
            raise
        except Exception as error:
            cause = error.__cause__ if isinstance(error, RuntimeError) else None
            reason = cause if cause is not None else error
            detail = f"{COMPUTATIONS[kind]}: {type(reason).__name__}: {reason}"
            raise self._error((stage, kind, microbatch), detail) from error

    def _wait(self, key: Key, works: Sequence[dist.Work], other: int, verb: str) -> None:
        for work in works:
            try:
                work.wait(*self._timeout)
            except Exception as error:
                peer = dist.get_global_rank(self._group, self._rank_of[other])
                detail = f"{verb} stage {other} on rank {peer}: {error}"
                raise self._error(key, detail, peer) from error

    def _check_shape(self, key: Key, index: int, tensor: Tensor) -> None:
        stage, way, _microbatch = key
        found = tuple(tensor.shape), tensor.dtype
        expected = self._shapes.setdefault((stage, way, index), found)
        if found != expected:
            raise self._error(
                key,
                f"{WORDS[way]} {index} has shape {found[0]} and type {found[1]}, but the first one "
                f"had {expected[0]} and {expected[1]}: outputs of a stage must have equal shapes "
                "for all micro-batches",
            )

    def _tag(self, key: Key, index: int) -> int:
        stage, way, microbatch = key
        number = (microbatch * self._stages + stage) * 2 + (way == "B")
        return number * TENSORS_MAX + index

    def _error(self, key: Key, detail: str, peer: int | None = None) -> PipelineError:
        stage, _way, microbatch = key
        self.is_failed = True
        return PipelineError(detail, rank=self.rank, stage=stage, microbatch=microbatch, peer=peer)
