"""Flights: the copies of a hop under way, between two nodes of the autograd graph.

A hop is two functions, start and finish, and what the caller computes between them overlaps with
the transfer. In the backward pass the order is reversed: `finish` starts to send gradients back,
`start` waits for them, and autograd runs the backward pass of the caller's computation in between.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch.distributed as dist
    from torch import Tensor

    from haiscale.moe.errors import ExchangeError
    from haiscale.moe.hops import Route
    from haiscale.moe.links import Links

__all__ = ["Flight", "move"]


class Flight:
    """Tensors that move along routes; each way holds its memory until it has ended."""

    def __init__(
        self, links: Links, layer: str, phase: str, routes: Sequence[Route], *, back: bool
    ) -> None:
        self._links, self._layer, self._phase = links, layer, phase
        self._routes, self._back = routes, back
        self._under_way: list[tuple[Tensor, Tensor, dist.Work | None]] = []

    def start(self, tensors: Sequence[Tensor], *, reverse: bool = False) -> None:
        """Starts the forward way or, `reverse`, that of the gradients."""
        back = self._back != reverse
        for route, tensor in zip(self._routes, tensors, strict=True):
            try:
                self._under_way.append(route.start(tensor, back=back))
            except Exception as error:
                raise self._failed(error, route) from error
            self._count(route, tensor, back=back)

    def finish(self, *, reverse: bool = False) -> list[Tensor]:
        """Waits, and returns the results."""
        back = self._back != reverse
        under_way, self._under_way = self._under_way, []
        results = []
        for route, (_, target, work) in zip(self._routes, under_way, strict=True):
            try:
                if work is not None:
                    work.wait()
                results.append(route.finish(target, back=back))
            except Exception as error:
                raise self._failed(error, route) from error
        return results

    def _count(self, route: Route, tensor: Tensor, *, back: bool) -> None:
        if route.group is not None and route.group is self._links.across:
            counts = route.received if back else route.sent
            own = counts[self._links.node]
            size = tensor[:1].nbytes if tensor.shape[0] else 0
            self._links.counters.bytes += (sum(counts) - own) * size

    def _failed(self, error: Exception, route: Route) -> ExchangeError:
        return self._links.failed(self._layer, self._phase, error, route.group)


def move(
    flight: Flight, tensors: Sequence[Tensor], meanwhile: Callable[[], object] | None = None
) -> tuple[Tensor, ...]:
    """Moves tensors along the routes of a flight; `meanwhile` is called during the transfer."""
    token = _Start.apply(flight, *tensors)
    if meanwhile is not None:
        meanwhile()
    result: tuple[Tensor, ...] = _Finish.apply(flight, token)
    return result


class _Start(torch.autograd.Function):
    """Starts a flight; the result, without elements, only joins the two functions."""

    @staticmethod
    def forward(ctx: Any, flight: Flight, *tensors: Tensor) -> Tensor:
        ctx.flight = flight
        flight.start(tensors)
        return tensors[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, _token: Tensor) -> tuple[Any, ...]:
        return None, *ctx.flight.finish(reverse=True)


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flight: Flight, token: Tensor) -> tuple[Tensor, ...]:
        ctx.flight = flight
        ctx.kind = token.dtype, token.device
        return tuple(flight.finish())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        ctx.flight.start(gradients, reverse=True)
        dtype, device = ctx.kind
        return None, torch.empty(0, dtype=dtype, device=device)
