"""Result of a figure: curves, and the paper's claims next to the model's values."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import sqrt
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from haiscale.model.hardware import Hardware

__all__ = ["HAISCALE", "TORCH", "Claim", "Curves", "Figure", "bisected", "scaled"]

HAISCALE: Final = "HaiScale"
TORCH: Final = "torch"


@dataclass(frozen=True, slots=True)
class Claim:
    """A number in the paper, and the model's."""

    name: str
    paper: float
    model: float
    tolerance: float
    """Goal for the relative difference."""
    is_calibration: bool = False
    """Whether the free constant is chosen so that the model has this number."""

    @property
    def difference(self) -> float:
        """Relative to the paper's number."""
        return self.model / self.paper - 1


@dataclass(frozen=True, slots=True)
class Curves:
    """The step times of a figure, in seconds, over numbers of GPUs."""

    gpus: tuple[int, ...]
    series: Mapping[str, tuple[float, ...]]
    compute_seconds: float
    """The free constant: see the figure."""
    paper: Mapping[int, float] = field(default_factory=dict)
    """Step times in the paper, in seconds, for the scales at which it has them."""

    def at(self, name: str, gpus: int) -> float:
        """Step time at one scale."""
        return self.series[name][self.gpus.index(gpus)]

    def ratio(self, name: str, other: str, gpus: int) -> float:
        """Step time of one curve over that of another one."""
        return self.at(name, gpus) / self.at(other, gpus)


class Figure(Protocol):
    """A figure of the paper. The fields of its dataclass are the assumptions."""

    @property
    def name(self) -> str:
        """For example ``8a``."""

    @property
    def title(self) -> str:
        """For people."""

    @property
    def gpus(self) -> tuple[int, ...]:
        """The scales."""

    def curves(self, hardware: Hardware, gpus: tuple[int, ...] = ()) -> Curves:
        """Computes all curves, at some scales or at all."""

    def claims(self, curves: Curves) -> list[Claim]:
        """The paper's claims, at the scales of `claimed`."""

    @property
    def claimed(self) -> tuple[int, ...]:
        """Scales that the claims need."""

    def alternatives(self) -> dict[str, Figure]:
        """The figure with another value of each assumption that is a whole number."""


def bisected(value_of: Callable[[float], float], target: float, start: float) -> float:
    """The constant, at most 16 times a start, for which a growing function has the target."""
    low, high = start / 16, start * 16
    while high / low > 1 + 1e-6:
        middle = sqrt(low * high)
        low, high = (middle, high) if value_of(middle) < target else (low, middle)
    return sqrt(low * high)


def scaled(value_of: Callable[[float], float], target: float, start: float) -> float:
    """The constant for which a function that is almost proportional to it has the target."""
    constant = start
    for _ in range(20):
        value = value_of(constant)
        constant *= target / value
        if abs(value / target - 1) < 1e-6:
            break
    return constant
