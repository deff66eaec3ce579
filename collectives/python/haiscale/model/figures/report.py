"""The figures as data: curves, claims, and how each assumption moves the claims."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Final

from haiscale.model.figures.figure8 import Gpt2Medium, Vgg16
from haiscale.model.figures.figure9 import DEEPSEEK_MOE_16B, LLAMA_13B
from haiscale.model.hardware import FIRE_FLYER_2

if TYPE_CHECKING:
    from collections.abc import Iterator

    from haiscale.model.figures.result import Claim, Curves, Figure
    from haiscale.model.hardware import Hardware

__all__ = ["FIGURES", "Report", "document", "make", "table"]

FIGURES: Final[tuple[Figure, ...]] = (Vgg16(), Gpt2Medium(), LLAMA_13B, DEEPSEEK_MOE_16B)
CHANGE: Final = 0.2
"""Relative change of an assumption."""
VARIED: Final = (
    "card_rate", "memory_rate", "hfreduce_first", "hfreduce_last", "nccl_first", "nccl_last",
    "first_gpus", "last_gpus",
)  # fmt: skip
"""Constants of the cluster that the figures use."""


@dataclass(frozen=True, slots=True)
class Report:
    """A figure with its results."""

    figure: Figure
    curves: Curves
    claims: list[Claim]
    sensitivity: dict[str, list[float]]
    """For each change of an assumption, the model's value of each claim. The free constant is
    chosen again."""


def make(figure: Figure, hardware: Hardware = FIRE_FLYER_2, *, vary: bool = True) -> Report:
    """Computes a figure.

    Args:
        figure: One of `FIGURES`.
        hardware: The cluster.
        vary: Whether to compute the sensitivity, which takes most of the time.
    """
    curves = figure.curves(hardware)
    sensitivity = {}
    if vary:
        for name, changed, cluster in _changes(figure, hardware):
            claims = changed.claims(changed.curves(cluster, changed.claimed))
            sensitivity[name] = [claim.model for claim in claims]
    return Report(figure, curves, figure.claims(curves), sensitivity)


def _changes(figure: Any, hardware: Hardware) -> Iterator[tuple[str, Figure, Hardware]]:
    factors = (1 - CHANGE, 1 + CHANGE)
    for name in (field.name for field in fields(figure)):
        value = getattr(figure, name)
        if isinstance(value, float):
            for factor in factors:
                yield f"{name} x {factor:g}", replace(figure, **{name: value * factor}), hardware
    for name, other in figure.alternatives().items():
        yield name, other, hardware
    for name in VARIED:
        for factor in factors:
            changed = replace(hardware, **{name: getattr(hardware, name) * factor})
            yield f"{name} x {factor:g}", figure, changed


def document(reports: list[Report], hardware: Hardware = FIRE_FLYER_2) -> dict[str, Any]:
    """The reports as JSON."""
    return {
        "version": 1,
        "unit": "seconds, unless a name has another one",
        "hardware": asdict(hardware),
        "figures": [_figure(report) for report in reports],
    }


def _figure(report: Report) -> dict[str, Any]:
    figure: Any = report.figure
    names = [field.name for field in fields(figure)]
    known = {"name", "title", "gpus", "paper", "tolerances"}
    return {
        "name": report.figure.name,
        "title": report.figure.title,
        "assumptions": {name: getattr(figure, name) for name in names if name not in known},
        "compute_seconds": report.curves.compute_seconds,
        "gpus": report.curves.gpus,
        "series": dict(report.curves.series),
        "paper": dict(report.curves.paper),
        "claims": [asdict(claim) | {"difference": claim.difference} for claim in report.claims],
        "sensitivity": report.sensitivity,
    }


def table(reports: list[Report]) -> str:
    """The claims, for people."""
    lines = [f"{'figure':<8}{'claim':<34}{'paper':>8}{'model':>9}{'differs':>9}   goal"]
    for report in reports:
        for claim in report.claims:
            goal = "calibrated" if claim.is_calibration else f"{claim.tolerance:.0%}"
            is_met = claim.is_calibration or abs(claim.difference) <= claim.tolerance
            lines.append(
                f"{report.figure.name:<8}{claim.name:<34}{claim.paper:>8.3f}{claim.model:>9.3f}"
                f"{claim.difference:>+9.1%}   {goal}{'' if is_met else ', missed'}"
            )
    return "\n".join(lines) + "\n"
