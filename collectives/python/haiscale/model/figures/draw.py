"""Drawings of the figures, one document for each number of the paper."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from haiscale.model.figures.chart import Line, Panel, svg
from haiscale.model.figures.figure8 import NO_BARRIER
from haiscale.model.figures.figure9 import LINEAR
from haiscale.model.figures.result import HAISCALE, TORCH

if TYPE_CHECKING:
    from collections.abc import Sequence

    from haiscale.model.figures.report import Report

__all__ = ["picture"]

COLOURS: Final = {
    HAISCALE: "#2b6cb0",
    TORCH: "#c05621",
    NO_BARRIER: "#2f855a",
    LINEAR: "#718096",
}
TITLES: Final = {
    "8": "Data parallelism and full sharding: time of a step relative to HaiScale's first",
    "9": "Pipeline parallelism: time of a step",
}
SUBTITLE: Final = "Lines: computed from constants of the hardware and stated assumptions."


def picture(reports: Sequence[Report]) -> str:
    """The panels of one of the paper's figures as an SVG document."""
    number = reports[0].figure.name[0]
    return svg(TITLES[number], SUBTITLE, [_panel(report) for report in reports])


def _panel(report: Report) -> Panel:
    curves = report.curves
    has_times = bool(curves.paper)
    unit = 1.0 if has_times else curves.series[HAISCALE][0]
    return Panel(
        report.figure.title,
        "s" if has_times else "x",
        curves.gpus,
        [
            Line(name, COLOURS[name], [value / unit for value in values], name == LINEAR)
            for name, values in curves.series.items()
        ],
        curves.paper,
        is_logarithmic=has_times,
    )
