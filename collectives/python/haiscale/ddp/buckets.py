"""Buckets of gradients: parameters that are averaged by one allreduce and stepped together.

The layout is a function of the model and the size limit alone, so that each step of each attempt
sums in the same buckets: no regrouping after the first step, and no warm-up pass. PyTorch
Distributed (Li et al., VLDB 2020, section 3.2.3) describes buckets in the reverse order of
registration; Megatron's `param_and_grad_buffer` lets gradients view them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from haiscale.overlap.flight import GradientBucket

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch.distributed as dist
    from torch import Tensor
    from torch.nn import Parameter

__all__ = ["Bucket", "layout"]


def layout(parameters: Sequence[Tensor], limit_bytes: float) -> list[list[int]]:
    """Positions of the parameters of each bucket, in the order in which buckets fill in backward.

    A bucket has parameters of one device and type; one above the limit has a separate bucket.
    """
    filled: list[list[int]] = []
    open_buckets: dict[tuple[torch.device, torch.dtype], tuple[list[int], int]] = {}
    for place in reversed(range(len(parameters))):
        parameter = parameters[place]
        kind = (parameter.device, parameter.dtype)
        places, used_bytes = open_buckets.get(kind, ([], 0))
        if places and used_bytes + parameter.nbytes > limit_bytes:
            filled.append(places)
            places, used_bytes = [], 0
        places.append(place)
        open_buckets[kind] = (places, used_bytes + parameter.nbytes)
    filled += [places for places, _ in open_buckets.values()]
    return sorted(filled, key=lambda places: -places[-1])


class Bucket(GradientBucket):
    """Gradients of some parameters in one flat buffer, and the allreduce that averages them.

    Behind the gradients the buffer has one element for each parameter: 1 where this rank has a
    gradient. Its average is 0 exactly if no rank has one.
    """

    def __init__(
        self,
        index: int,
        named: Sequence[tuple[str, Parameter]],
        group: dist.ProcessGroup,
        allocate: Callable[[int, torch.dtype, torch.device], Tensor],
    ) -> None:
        super().__init__(index, [name for name, _ in named], [p for _, p in named])
        self.group = group
        sizes = [parameter.numel() for parameter in self.parameters]
        first = self.parameters[0]
        self.buffer = allocate(sum(sizes) + len(sizes), first.dtype, first.device)
        *parts, self._is_used = torch.split(self.buffer, [*sizes, len(sizes)])
        self.views = [part.view_as(p) for part, p in zip(parts, self.parameters, strict=True)]
        # In place of a gradient that is being averaged: it reads as NaN and refuses to be written.
        self._nan = torch.full((), math.nan, dtype=first.dtype, device=first.device)
        self.in_flight = [self._nan.expand(p.shape) for p in self.parameters]
        self.waiting = set(self.parameters)
        """Parameters without a gradient in the current backward pass."""
        self._has_all = True

    def groups(self) -> set[dist.ProcessGroup]:
        """The group of its allreduce."""
        return {self.group}

    def drop(self) -> None:
        """Forgets what is in flight."""
        super().drop()
        self.waiting = set(self.parameters)

    def collect(self, place: int) -> bool:
        """Moves a gradient into the buffer, if it is elsewhere; False where there is none."""
        parameter, view = self.parameters[place], self.views[place]
        gradient = parameter.grad
        if gradient is view:
            return True
        if gradient is None:
            view.zero_()
            return False
        if gradient.layout is not torch.strided:
            raise TypeError(
                f"the gradient of {self.names[place]!r} is {gradient.layout}: use dense gradients "
                "(sparse=False)"
            )
        view.copy_(gradient.detach())
        parameter.grad = view
        return True

    def seal(self) -> None:
        """Completes the buffer for the allreduce; gradients are out of reach until it has ended."""
        has = [self.collect(place) for place in range(len(self.parameters))]
        self._has_all = all(has)
        if self._has_all:
            self._is_used.fill_(1)
        else:
            self._is_used.copy_(torch.tensor(has))
        self._nan.fill_(math.nan)
        for parameter, hidden in zip(self.parameters, self.in_flight, strict=True):
            parameter.grad = hidden
        self.waiting = set(self.parameters)
        self.unread = len(self.parameters)

    def averages(self) -> list[Tensor | None]:
        """Averaged gradients; None for a parameter without a gradient on any rank."""
        if self._has_all:
            return list(self.views)
        used = self._is_used.tolist()
        return [view if u else None for view, u in zip(self.views, used, strict=True)]
