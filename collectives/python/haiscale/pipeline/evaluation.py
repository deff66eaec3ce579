"""Forward passes of a pipeline without gradients, for parts of a batch of any shape.

Each transfer has a header with the shapes, so that parts need not be equal, and ranks without the
first stage need not know their number.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
import torch.distributed as dist

from haiscale.pipeline.errors import PipelineError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from datetime import timedelta

    from torch import Tensor, nn

    from haiscale.pipeline.transfers import Messages

__all__ = ["Evaluation"]

HEADER_BYTES: Final = 4096


class _Part(NamedTuple):
    """What one stage passes to the next one for a part of the batch."""

    values: tuple[Any, ...]
    is_last: bool


class Evaluation:
    """The forward passes of one rank.

    Args:
        stages: The stages of the rank.
        rank_of: Rank of each stage in the group.
        group: The ranks of the pipeline.
        device: Where the stages compute.
        messages: Names computations in errors.
        timeout: Deadline of a wait; None: that of the group's operations.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        rank_of: Sequence[int],
        group: dist.ProcessGroup,
        device: torch.device,
        messages: Messages,
        timeout: timedelta | None,
    ) -> None:
        self._stages = dict(sorted(stages.items()))
        self._rank_of, self._group, self._device = rank_of, group, device
        self._messages = messages
        self._timeout = (timeout,) if timeout is not None else ()
        self._sending: list[tuple[dist.Work, Tensor, int, int]] = []

    def run(self, parts: Sequence[tuple[Any, ...]]) -> list[Any] | None:
        """The last stage's outputs for each part; None on ranks without it.

        `parts` are the inputs of the first stage; other ranks pass any value.
        """
        last, result = len(self._rank_of) - 1, None
        local = [_Part(values, number == len(parts) - 1) for number, values in enumerate(parts)]
        for stage, module in self._stages.items():
            is_local = stage == 0 or self._rank_of[stage - 1] == self._group.rank()
            arriving = local if is_local else self._receive(stage)
            outputs = list(self._pass(stage, module, arriving))
            local = [_Part(_values(output), is_last) for output, is_last in outputs]
            if stage == last:
                result = [output for output, _ in outputs]
        while self._sending:
            work, _, stage, number = self._sending.pop(0)
            self._wait(work, stage, number, stage + 1, "sending the activation to")
        return result

    def _pass(
        self, stage: int, module: nn.Module, arriving: Sequence[_Part] | Iterator[_Part]
    ) -> Iterator[tuple[Any, bool]]:
        following = stage + 1
        sends = following < len(self._rank_of) and self._rank_of[following] != self._group.rank()
        for number, (values, is_last) in enumerate(arriving):
            with self._messages.computing(stage, "F", number):
                output = module(*values)
            if sends:
                self._send(stage, number, _Part(_values(output), is_last))
            yield (None if sends else output), is_last

    def _send(self, stage: int, number: int, part: _Part) -> None:
        kinds = [[str(each.dtype).removeprefix("torch."), *each.shape] for each in part.values]
        text = json.dumps([part.is_last, kinds]).encode()
        if len(text) > HEADER_BYTES:
            raise PipelineError(
                f"passes {len(part.values)} tensors to another stage, which take {len(text)} bytes "
                f"to describe: at most {HEADER_BYTES}",
                rank=self._messages.rank,
                stage=stage,
                microbatch=number,
            )
        header = torch.frombuffer(bytearray(text.ljust(HEADER_BYTES)), dtype=torch.uint8)
        tensors = [header.to(self._device), *(each.contiguous() for each in part.values)]
        for index, tensor in enumerate(tensors):
            peer = self._rank_of[stage + 1]
            work = dist.isend(tensor, group=self._group, group_dst=peer, tag=index)
            assert work is not None, "this rank is in the group"
            self._sending.append((work, tensor, stage, number))

    def _receive(self, stage: int) -> Iterator[_Part]:
        is_last, number = False, 0
        while not is_last:
            header = torch.empty(HEADER_BYTES, dtype=torch.uint8, device=self._device)
            self._arrive(header, stage, number, 0)
            is_last, kinds = json.loads(bytes(header.tolist()))
            values = [
                torch.empty(shape, dtype=getattr(torch, name), device=self._device)
                for name, *shape in kinds
            ]
            for index, value in enumerate(values):
                self._arrive(value, stage, number, 1 + index)
            yield _Part(tuple(values), is_last)
            number += 1

    def _arrive(self, tensor: Tensor, stage: int, number: int, index: int) -> None:
        peer = self._rank_of[stage - 1]
        work = dist.irecv(tensor, group=self._group, group_src=peer, tag=index)
        assert work is not None, "this rank is in the group"
        self._wait(work, stage, number, stage - 1, "waiting for the activation from")

    def _wait(self, work: dist.Work, stage: int, number: int, other: int, verb: str) -> None:
        try:
            work.wait(*self._timeout)
        except Exception as error:
            peer = dist.get_global_rank(self._group, self._rank_of[other])
            raise PipelineError(
                f"{verb} stage {other} on rank {peer}: {error}",
                rank=self._messages.rank,
                stage=stage,
                microbatch=number,
                peer=peer,
            ) from error


def _values(output: Any) -> tuple[Any, ...]:
    return output if isinstance(output, tuple) else (output,)
