"""Comparison of all layouts of a model on the nodes of a job."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from itertools import product
from typing import TYPE_CHECKING, Final

from haiscale.model.hardware import FIRE_FLYER_2
from haiscale.placement import LayoutError, Sizes, place
from haiscale.plan.layouts import Candidate, Precision, Schedule
from haiscale.plan.memory import Memory, memory
from haiscale.plan.timing import Timing, simulated_pipeline, timing
from haiscale.plan.traffic import Traffic, traffic

if TYPE_CHECKING:
    from collections.abc import Iterator

    from haiscale.model.hardware import Hardware
    from haiscale.placement import Layout, Nodes
    from haiscale.plan.models import Model

__all__ = ["Choice", "Loss", "Options", "Plan", "plan", "plan_of"]

MICROBATCHES: Final = (1, 2, 4, 8, 16, 32)
"""Sequences of a micro-batch that are tried."""
SIMULATED: Final = 3
"""Layouts whose pipelines are simulated."""
EQUAL: Final = 1e-3
"""Relative difference of two step times below which less memory decides."""
GB: Final = 1e9


@dataclass(frozen=True, slots=True)
class Options:
    """What the layouts are computed with."""

    hardware: Hardware = FIRE_FLYER_2
    precision: Precision = field(default_factory=Precision)
    efficiency: float = 0.36
    """Share of the measured matrix rate: LLaMa-13B's on 64 GPUs in the paper's Figure 9(a)."""
    reserve: float = 0.1
    """Share of an accelerator's memory that is kept free: for the driver, workspaces and gaps."""
    ep_nodes: int = 1
    """Nodes over which an expert-parallel group may be spread."""

    @property
    def memory_limit(self) -> float:
        """Bytes of an accelerator that a layout may use."""
        return self.hardware.memory_bytes * (1 - self.reserve)


@dataclass(frozen=True, slots=True)
class Choice:
    """A layout that fits, with its fastest micro-batch and schedule."""

    candidate: Candidate
    memory: Memory
    traffic: Traffic
    timing: Timing
    simulated: float | None = None
    """Step by the event model of pipelines, for the best layouts."""

    @property
    def seconds(self) -> float:
        """Predicted time of a step."""
        return self.timing.total


@dataclass(frozen=True, slots=True)
class Loss:
    """A layout that is not the best one, and why."""

    sizes: Sizes
    reason: str
    """Name of a rule, `memory`, `batch`, or `slower`."""
    text: str
    seconds: float | None = None
    """Predicted time of a step, of a layout that fits."""


@dataclass(frozen=True, slots=True)
class Plan:
    """All layouts of a model."""

    model: Model
    nodes: Nodes
    options: Options
    best: tuple[Choice, ...]
    """Fastest first."""
    losses: tuple[Loss, ...]


def plan(model: Model, nodes: Nodes, options: Options, best: int = 5) -> Plan:
    """Compares all layouts.

    Args:
        model: The model with its batch.
        nodes: The nodes of the job.
        options: Hardware, precision and limits.
        best: Number of layouts to return in full.
    """
    return _compared(model, nodes, options, _all_sizes(model, nodes, options), best)


def plan_of(model: Model, nodes: Nodes, options: Options, sizes: Sizes) -> Plan:
    """The same for one layout."""
    return _compared(model, nodes, options, iter([sizes]), 1)


def _compared(
    model: Model, nodes: Nodes, options: Options, every: Iterator[Sizes], best: int
) -> Plan:
    choices, losses = [], []
    for sizes in every:
        result = _evaluated(model, nodes, options, sizes)
        if isinstance(result, Choice):
            choices.append(result)
        else:
            losses.append(result)
    choices.sort(key=_order)
    slower = [_slower(choice, choices[0]) for choice in choices[best:]]
    kept = [
        _simulated(choice) if index < SIMULATED else choice
        for index, choice in enumerate(choices[:best])
    ]
    return Plan(model, nodes, options, tuple(kept), (*slower, *losses))


def _order(choice: Choice) -> tuple[float, int, int, int, int]:
    """Faster first; of equally fast layouts, those with shorter axes."""
    sizes = choice.candidate.sizes
    return (round(choice.seconds, 6), sizes.shard, sizes.ep, sizes.pp, sizes.tp)


def _all_sizes(model: Model, nodes: Nodes, options: Options) -> Iterator[Sizes]:
    world = nodes.world_size
    for tp, pp in product(_divisors(nodes.ranks_per_node), _divisors(world)):
        if pp > model.layers or world % (tp * pp):
            continue
        replicas = world // (tp * pp)
        for shard in _divisors(replicas):
            for ep in _divisors(replicas) if model.experts else [1]:
                if model.experts % ep == 0:
                    yield Sizes(
                        dp=replicas // shard, shard=shard, pp=pp, tp=tp, ep=ep,
                        ep_nodes=options.ep_nodes,
                    )  # fmt: skip


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _evaluated(model: Model, nodes: Nodes, options: Options, sizes: Sizes) -> Choice | Loss:
    """The fastest way to run a layout, or why it cannot be run."""
    if sizes.pp > model.layers:
        return Loss(sizes, "layers", f"pp {sizes.pp}, but the model has {model.layers} layers")
    if model.heads % sizes.tp:
        return Loss(sizes, "heads", f"tp {sizes.tp} does not divide {model.heads} heads")
    if sizes.ep > 1 and (model.experts == 0 or model.experts % sizes.ep):
        return Loss(sizes, "experts", f"ep {sizes.ep} does not divide {model.experts} experts")
    try:
        layout = place(nodes, sizes)
    except LayoutError as error:
        return Loss(sizes, str(error.rule), f"{error.problem}: {error.remedy}")
    candidates = list(_candidates(model, layout, options))
    if not candidates:
        return _batch_too_small(model, sizes)
    fitting = [
        (candidate, needed)
        for candidate in candidates
        if (needed := memory(candidate)).total <= options.memory_limit
    ]
    if not fitting:
        least = min(map(memory, candidates), key=lambda needed: needed.total)
        return _too_large(sizes, least, options)
    timed = [(timing(candidate), candidate, needed) for candidate, needed in fitting]
    limit = min(seconds.total for seconds, _, _ in timed) * (1 + EQUAL)
    equal = [entry for entry in timed if entry[0].total <= limit]
    seconds, candidate, needed = min(equal, key=lambda entry: entry[2].total)
    return Choice(candidate, needed, traffic(candidate), seconds)


def _candidates(model: Model, layout: Layout, options: Options) -> Iterator[Candidate]:
    """All micro-batches and schedules; a pipeline needs a micro-batch for each stage."""
    sizes = layout.sizes
    replicas = sizes.dp * sizes.shard
    schedules = list(Schedule) if sizes.pp > 1 else [Schedule.ONE_F_ONE_B]
    for microbatch, schedule, recompute in product(MICROBATCHES, schedules, (False, True)):
        if model.batch % (replicas * microbatch):
            continue
        if model.batch // (replicas * microbatch) >= sizes.pp:
            yield Candidate(
                model, layout, options.hardware, microbatch, schedule, recompute,
                options.precision, options.efficiency,
            )  # fmt: skip


def _batch_too_small(model: Model, sizes: Sizes) -> Loss:
    replicas = sizes.dp * sizes.shard
    if model.batch % replicas:
        text = f"the batch of {model.batch} sequences does not divide over {replicas} replicas"
    else:
        text = (
            f"{model.batch // replicas} sequences for each replica are fewer than the "
            f"{sizes.pp} stages"
        )
    return Loss(sizes, "batch", f"{text}: change the batch or dp x shard")


def _too_large(sizes: Sizes, needed: Memory, options: Options) -> Loss:
    parts = {field.name: getattr(needed, field.name) for field in fields(needed)}
    largest = max(parts, key=lambda name: parts[name])
    return Loss(
        sizes,
        "memory",
        f"{needed.total / GB:.1f} GB on a rank that may use {options.memory_limit / GB:.1f} GB, "
        f"mostly {largest} ({parts[largest] / GB:.1f} GB)",
    )


def _slower(choice: Choice, best: Choice) -> Loss:
    parts = {
        field.name: getattr(choice.timing, field.name) - getattr(best.timing, field.name)
        for field in fields(choice.timing)
    }
    most = max(parts, key=lambda name: parts[name])
    more = choice.seconds - best.seconds
    text = f"slower by {more:.3g} s ({more / best.seconds:.1%})"
    if more > 0:
        text += f", mostly {most} ({parts[most]:+.3g} s)"
    if choice.candidate.recompute and not best.candidate.recompute:
        text += "; activations fit only if they are computed again"
    return Loss(choice.candidate.sizes, "slower", text, choice.seconds)


def _simulated(choice: Choice) -> Choice:
    candidate = choice.candidate
    if candidate.sizes.pp == 1 or candidate.nodes_of("pp") == 1:
        return choice
    parts = choice.timing
    others = parts.gathers + parts.sums + parts.optimizer
    return replace(choice, simulated=simulated_pipeline(candidate) + others)
