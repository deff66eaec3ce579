"""Figure 9: LLaMa-13B and DeepSeekMoE-16B with pipeline and data parallelism.

The batch is fixed, so micro-batches per pipeline become fewer as GPUs become more. The time of a
micro-batch is the free constant: it is chosen so that the first step time is the paper's.

One chain of nodes is simulated, with all its pipelines; the others do the same. Its gradients are
summed over all chains at the rate of the library on that number of GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from haiscale.model.cards import Sharing
from haiscale.model.figures.result import HAISCALE, TORCH, Claim, Curves, Figure, scaled
from haiscale.model.hardware import Library
from haiscale.model.pipelines import Pipeline, Sum, Times, steady
from haiscale.model.simulator import run
from haiscale.pipeline.schedules import one_f_one_b

if TYPE_CHECKING:
    from haiscale.model.hardware import Hardware

__all__ = ["DEEPSEEK_MOE_16B", "LLAMA_13B", "PipelineFigure"]

LINEAR: Final = "linear scaling"
ADAM_BYTES: Final = 28
"""Memory traffic of AdamW in fp32 for each parameter: reads of the gradient, parameter and both
moments, writes of the last three."""


@dataclass(frozen=True)
class PipelineFigure:
    """A model with one stage on each node, and the ranks of a node in different pipelines."""

    name: str
    title: str
    gpus: tuple[int, ...]
    paper: dict[int, float]
    """Step times in the paper, in seconds."""
    tolerances: dict[int, float]
    parameters: float
    layers: int
    width: int
    context: int
    """Tokens of a sequence."""
    sequences: int
    """Of a step; a micro-batch is one sequence."""
    stages: int
    bytes_per_gradient: float = 2.0
    """bf16."""
    bytes_per_activation: float = 2.0
    backward_share: float = 2 / 3
    """Part of the computation that is the backward pass."""

    @property
    def claimed(self) -> tuple[int, ...]:
        """Scales of the paper's step times."""
        return tuple(self.paper)

    def curves(self, hardware: Hardware, gpus: tuple[int, ...] = ()) -> Curves:
        """Steps of HaiScale, of torch's 1F1B with NCCL, and of perfect scaling."""
        first = self.gpus[0]
        slot = scaled(
            lambda slot: self.step(slot, first, hardware),
            self.paper[first],
            self.paper[first] * first / self.stages / self.sequences,
        )
        scales = gpus or self.gpus
        series = {
            HAISCALE: tuple(self.step(slot, gpus, hardware) for gpus in scales),
            TORCH: tuple(self.torch_step(slot, gpus, hardware) for gpus in scales),
            LINEAR: tuple(self.paper[first] * first / gpus for gpus in scales),
        }
        return Curves(scales, series, slot, self.paper)

    def step(self, slot: float, gpus: int, hardware: Hardware) -> float:
        """HaiScale: transfers take turns, and gradients are summed during the last backward pass.

        Args:
            slot: Computation of a stage for one micro-batch, forward and backward, in seconds.
            gpus: Scale.
            hardware: The cluster.
        """
        sums = self._sum(gpus, Library.HFREDUCE, hardware, pieces=self.layers // self.stages)
        return self._simulated(slot, gpus, hardware, Sharing.TURNS, sums, blocking=False)

    def torch_step(self, slot: float, gpus: int, hardware: Hardware) -> float:
        """torch: Schedule1F1B waits for its sends, which share the card; then NCCL's sums."""
        sums = self._sum(gpus, Library.NCCL, hardware, pieces=1)
        return self._simulated(slot, gpus, hardware, Sharing.FAIR, sums, blocking=True)

    def _sum(self, gpus: int, library: Library, hardware: Hardware, pieces: int) -> Sum:
        size = self.parameters / self.stages * self.bytes_per_gradient
        ranks = gpus // self.stages
        seconds = hardware.allreduce_seconds(size, library, ranks)
        return Sum(seconds, pieces, on_card=ranks > hardware.gpus_per_node)

    def _simulated(
        self,
        slot: float,
        gpus: int,
        hardware: Hardware,
        sharing: Sharing,
        sums: Sum,
        *,
        blocking: bool,
    ) -> float:
        backward = slot * self.backward_share
        size = self.context * self.width * self.bytes_per_activation

        def simulated(microbatches: int) -> float:
            pipeline = Pipeline(
                one_f_one_b(self.stages, microbatches),
                min(hardware.gpus_per_node, gpus // self.stages),
                Times(slot - backward, backward),
                size / hardware.card_rate,
                blocking,
                sums,
            )
            actions, nodes, collectives = pipeline.build()
            return run(actions, nodes, sharing=sharing, collectives=collectives).seconds

        optimizer = self.parameters / self.stages * ADAM_BYTES / hardware.memory_rate
        return optimizer + steady(simulated, self.sequences * self.stages // gpus, self.stages)

    def claims(self, curves: Curves) -> list[Claim]:
        """The paper's step times."""
        return [
            Claim(
                f"step on {gpus} GPUs, s",
                seconds,
                curves.at(HAISCALE, gpus),
                self.tolerances[gpus],
                is_calibration=gpus == self.gpus[0],
            )
            for gpus, seconds in self.paper.items()
        ]

    def alternatives(self) -> dict[str, Figure]:
        """Half and twice the stages, sequences and tokens of a sequence."""
        changed: dict[str, Figure] = {}
        for value in _around(self.stages):
            changed[f"stages {value}"] = replace(self, stages=value)
        for value in _around(self.sequences):
            changed[f"sequences {value}"] = replace(self, sequences=value)
        for value in _around(self.context):
            changed[f"context {value}"] = replace(self, context=value)
        return changed


def _around(value: int) -> list[int]:
    return [value * 2] if value % 2 else [value // 2, value * 2]


LLAMA_13B: Final = PipelineFigure(
    name="9a",
    title="9(a) LLaMa-13B, pipeline and data parallel",
    gpus=(64, 128, 256, 512),
    paper={64: 64.118, 512: 9.717},
    tolerances={64: 0.05, 512: 0.05},
    parameters=13.0e9,
    layers=40,
    width=5120,
    context=2048,
    sequences=2048,
    stages=8,
)
DEEPSEEK_MOE_16B: Final = PipelineFigure(
    name="9b",
    title="9(b) DeepSeekMoE-16B, pipeline and data parallel",
    gpus=(40, 80, 160, 320, 640),
    paper={40: 79.615, 320: 10.71, 640: 6.535},
    tolerances={40: 0.05, 320: 0.05, 640: 0.1},
    parameters=16.4e9,
    layers=28,
    width=2048,
    context=4096,
    sequences=4608,
    stages=5,
)
