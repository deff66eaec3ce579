"""Reads that wait: parameters of a model and of an optimizer while gradients or steps are due."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn
    from torch.nn import Parameter
    from torch.optim import Optimizer

    from haiscale.overlap.flight import Flight

__all__ = ["guard_module", "guard_optimizer", "plain"]


def guard_module(module: nn.Module, flight: Flight[Any], *, busy: bool) -> None:
    """While anything is in flight, `module.parameters()` waits for it."""
    if busy:
        module.__dict__["named_parameters"] = _GuardedRead(module, flight)
    else:
        module.__dict__.pop("named_parameters", None)


class _GuardedRead:
    """`named_parameters` of a module with gradients or steps in flight."""

    def __init__(self, module: nn.Module, flight: Flight[Any]) -> None:
        self._module, self._flight = module, flight

    def __call__(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Parameter]]:
        self._flight.synchronize()
        return type(self._module).named_parameters(self._module, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        raise RuntimeError("steps are in flight: call synchronize() before copying the module")


def guard_optimizer(optimizer: Optimizer, flight: Flight[Any]) -> None:
    """Makes the lists of the optimizer's parameter groups wait when they are read."""
    for group in optimizer.param_groups:
        guarded = GuardedParameters(plain(group["params"]))
        guarded.flight = flight
        group["params"] = guarded


class GuardedParameters(list["Parameter"]):
    """A parameter group's list: reading it while gradients are in flight waits for them.

    GradScaler and scripts that clip or log find gradients through `optimizer.param_groups`.
    """

    flight: Flight[Any] | None = None

    def __iter__(self) -> Iterator[Parameter]:
        """Waits for gradients that no step was requested for."""
        flight = self.flight
        if flight is not None and flight.failure is None and flight.hides(plain(self)):
            flight.synchronize()
        return super().__iter__()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies are plain lists."""
        return list, (list(plain(self)),)


def plain(parameters: list[Parameter]) -> Iterator[Parameter]:
    """Iterates without waiting."""
    return list.__iter__(parameters)
