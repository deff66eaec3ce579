"""A plan as text for a terminal, and as JSON."""

from __future__ import annotations

import textwrap
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

    from haiscale.placement import Nodes, Sizes
    from haiscale.plan.search import Choice, Loss, Plan

__all__ = ["AXES", "document", "layout", "table"]

GB: Final = 1e9
AXES: Final = ("dp", "shard", "pp", "tp", "ep")
SHOWN: Final = 6
"""Slower and too large layouts that are shown without --all."""


def layout(sizes: Sizes) -> str:
    """The axes of more than one rank."""
    axes = [f"{axis} {getattr(sizes, axis)}" for axis in AXES if getattr(sizes, axis) > 1]
    return " ".join(axes) or "one rank"


def table(plan: Plan, *, every: bool = False, width: int = 100) -> str:
    """The plan for people.

    Args:
        plan: The plan.
        every: Whether to list all layouts.
        width: Columns of the terminal.
    """
    lines = [*_head(plan), ""]
    if plan.best:
        lines += [*_choices(plan), "", *_details(plan.best[0])]
    else:
        lines.append("no layout fits")
    lines += _losses(plan, width, every=every)
    return "\n".join(lines) + "\n"


def _head(plan: Plan) -> Iterator[str]:
    model, hardware = plan.model, plan.options.hardware
    active = f", {model.active_parameters / 1e9:.2f} G of a token" if model.experts else ""
    yield (
        f"{model.name}: {model.parameters / 1e9:.2f} G parameters{active}; a step has "
        f"{model.batch:,} sequences of {model.context:,} tokens"
    )
    yield (
        f"{_nodes(plan.nodes)}; accelerators {hardware.memory_bytes / GB:.0f} GB, "
        f"{hardware.matmul_rate * plan.options.efficiency / 1e12:.0f} Tflop/s; "
        f"card {hardware.card_rate / GB:.0f} GB/s"
    )


def _nodes(nodes: Nodes) -> str:
    zones = ", ".join(f"{count} in {zone}" for zone, count in Counter(nodes.zones).items())
    return f"nodes of {nodes.ranks_per_node} ranks: {zones}"


def _choices(plan: Plan) -> Iterator[str]:
    yield (
        f"{'layout':<26}{'micro-batches':>14}  {'schedule':<12}{'memory':>9}{'step':>10}"
        f"{'bubble':>8}{'card sends':>12}"
    )
    for choice in plan.best:
        candidate = choice.candidate
        schedule = str(candidate.schedule) if candidate.sizes.pp > 1 else "-"
        again = "*" if candidate.recompute else " "
        count = f"{candidate.microbatches} x {candidate.microbatch}"
        yield (
            f"{layout(candidate.sizes):<26}{count:>14}  {schedule:<12}"
            f"{choice.memory.total / GB:>6.1f}{again}GB{_seconds(choice.seconds):>10} "
            f"{choice.timing.bubble_share:>7.1%}{choice.traffic.card / GB:>9.1f} GB"
        )
    if any(choice.candidate.recompute for choice in plan.best):
        yield "* activations are computed again in the backward pass"


def _details(choice: Choice) -> Iterator[str]:
    memory, traffic, timing = choice.memory, choice.traffic, choice.timing
    yield f"best: {layout(choice.candidate.sizes)}"
    rows = {
        "memory of a rank": _parts(
            {name: value / GB for name, value in asdict(memory).items()}, "GB"
        ),
        "card of a node": _parts(
            {
                "activations": traffic.card_pipeline / GB,
                "gradients": traffic.card_gradients / GB,
                "shards": traffic.card_shards / GB,
                "experts": traffic.card_experts / GB,
            },
            "GB",
        ),
        "inside a node": _parts(
            {"PCIe": traffic.node / GB, "NVLink of a rank": traffic.nvlink / GB}, "GB"
        ),
        "between zones": _parts({"each way": traffic.zones / GB}, "GB"),
        "step": _parts(asdict(timing), "s"),
    }
    if choice.simulated is not None:
        rows["simulated step"] = _seconds(choice.simulated)
    for name, text in rows.items():
        yield from textwrap.wrap(
            f"  {name:<18}{text}", 100, subsequent_indent=" " * 20, drop_whitespace=True
        )


def _parts(values: dict[str, float], unit: str) -> str:
    shown = [f"{name} {value:.3g}" for name, value in values.items() if value >= 0.0005]
    return f"{', '.join(shown)} {unit}" if shown else "none"


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value < 1000 else f"{value:.0f} s"


def _losses(plan: Plan, width: int, *, every: bool) -> Iterator[str]:
    computed = [loss for loss in plan.losses if loss.reason == "slower"]
    others = [loss for loss in plan.losses if loss.reason != "slower"]
    if computed:
        yield ""
        yield "slower layouts"
        for loss in computed if every else computed[:SHOWN]:
            yield from _loss(loss, width)
        if len(computed) > SHOWN and not every:
            yield f"  and {len(computed) - SHOWN} more: --all lists them"
    if others:
        yield ""
        yield "layouts that do not run"
        for reason, count in Counter(loss.reason for loss in others).most_common():
            same = [loss for loss in others if loss.reason == reason]
            yield f"  {reason}: {count} layout{'s' if count > 1 else ''}"
            for loss in same if every else same[:1]:
                yield from _loss(loss, width)


def _loss(loss: Loss, width: int) -> list[str]:
    text = f"  {layout(loss.sizes):<25} {loss.text}"
    return textwrap.wrap(text, width, subsequent_indent=" " * 28, drop_whitespace=True)


def document(plan: Plan) -> dict[str, Any]:
    """The plan as JSON. Sizes in bytes, times in seconds."""
    options = plan.options
    return {
        "version": 1,
        "model": asdict(plan.model) | {"parameters": plan.model.parameters},
        "nodes": asdict(plan.nodes),
        "hardware": asdict(options.hardware),
        "precision": asdict(options.precision),
        "efficiency": options.efficiency,
        "memory_limit": options.memory_limit,
        "best": [_choice(choice) for choice in plan.best],
        "losses": [
            {
                "sizes": _sizes(loss.sizes),
                "reason": loss.reason,
                "text": loss.text,
                "seconds": loss.seconds,
            }
            for loss in plan.losses
        ],
    }


def _choice(choice: Choice) -> dict[str, Any]:
    candidate = choice.candidate
    return {
        "sizes": _sizes(candidate.sizes),
        "microbatch": candidate.microbatch,
        "microbatches": candidate.microbatches,
        "schedule": str(candidate.schedule) if candidate.sizes.pp > 1 else None,
        "recompute": candidate.recompute,
        "memory": asdict(choice.memory) | {"total": choice.memory.total},
        "traffic": asdict(choice.traffic) | {"card": choice.traffic.card},
        "seconds": asdict(choice.timing) | {"total": choice.seconds, "simulated": choice.simulated},
        "bubble_share": choice.timing.bubble_share,
    }


def _sizes(sizes: Sizes) -> dict[str, int]:
    return {axis: getattr(sizes, axis) for axis in AXES}
