"""Programs of data-parallel steps: layers, and their sums or gathers on the card of one node.

All nodes do the same, so one rank and one card stand for all. The time of a step is that between
the ends of two consecutive steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from haiscale.model.actions import Action, Collective, Compute, Finish, Start
from haiscale.model.simulator import run

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

__all__ = ["Layer", "replicated_step", "sharded_step"]

STEPS = 6
"""Simulated steps; the last one is measured."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer of a model, in the order of the forward pass."""

    forward: float
    backward: float
    transfer: float
    """Time of its collective with the whole card: of its sum, or of one gather."""


def replicated_step(layers: Sequence[Layer], *, barrier: bool) -> float:
    """Time of a step that sums each layer's gradients (DDP).

    Args:
        layers: The layers. A layer's sum starts after its backward pass.
        barrier: Whether all sums end before the next step starts. Otherwise a layer's forward pass
            waits for that layer's sum, and sums that are needed earlier are sent first.
    """
    program: list[Action] = []
    collectives: dict[Hashable, Collective] = {}
    numbers = range(len(layers))
    for step in range(STEPS):
        for number in numbers:
            if step > 0 and not barrier:
                program.append(Finish((step - 1, number)))
            program.append(Compute(layers[number].forward, ("F", number)))
        for number in reversed(numbers):
            program.append(Compute(layers[number].backward, ("B", number)))
            program.append(Start((step, number)))
            level = 0 if barrier else number
            collectives[step, number] = Collective((0,), layers[number].transfer, level=level)
        if barrier:
            program += [Finish((step, number)) for number in numbers]
        program.append(Compute(0.0, "end"))
    return _last_step(program, collectives)


def sharded_step(layers: Sequence[Layer], *, prefetch: int = 1) -> float:
    """Time of a step that gathers each layer's parameters twice and scatters its gradients (FSDP).

    Args:
        layers: The layers; each gather and each scatter takes `transfer`.
        prefetch: Layers that are gathered ahead of the computation.
    """
    program: list[Action] = []
    collectives: dict[Hashable, Collective] = {}
    count = len(layers)
    for step in range(STEPS):
        passes = [("F", number) for number in range(count)]
        passes += [("B", number) for number in reversed(range(count))]
        gathers = [(step, *item) for item in passes]
        for index, (kind, number) in enumerate(passes):
            layer = layers[number]
            ahead = gathers[index + prefetch : index + prefetch + 1] if index else gathers
            for gather in ahead[: prefetch + 1]:
                program.append(Start(gather))
                collectives[gather] = Collective((0,), layers[gather[2]].transfer)
            program.append(Finish(gathers[index]))
            program.append(Compute(layer.forward if kind == "F" else layer.backward, kind))
            if kind == "B":
                scatter = (step, "scatter", number)
                program.append(Start(scatter))
                collectives[scatter] = Collective((0,), layer.transfer)
        program += [Finish((step, "scatter", number)) for number in range(count)]
        program.append(Compute(0.0, "end"))
    return _last_step(program, collectives)


def _last_step(program: list[Action], collectives: dict[Hashable, Collective]) -> float:
    outcome = run([program], [0], collectives=collectives, trace=True)
    ends = [span.end for span in outcome.spans if span.name == "end"]
    return ends[-1] - ends[-2]
