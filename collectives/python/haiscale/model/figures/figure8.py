"""Figure 8: VGG16 with DDP, and GPT2-medium with FSDP.

The paper has no step times for them. The time of the computation is the free constant, chosen so
that the scaling is the paper's; the comparison with torch is a result.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple

from haiscale.model.data_parallel import Layer, replicated_step, sharded_step
from haiscale.model.figures.result import HAISCALE, TORCH, Claim, Curves, Figure, bisected
from haiscale.model.hardware import Library

if TYPE_CHECKING:
    from haiscale.model.hardware import Hardware

__all__ = ["Gpt2Medium", "Vgg16", "vgg16_layers"]

NO_BARRIER: Final = "HaiScale, no barrier"
VGG16: Final = ((64, 64), (128, 128), (256,) * 3, (512,) * 3, (512,) * 3)
"""Channels of the convolutions between poolings, for images of 224 x 224."""


class _Size(NamedTuple):
    parameters: int
    multiplications: int
    """Per image, forward."""


def vgg16_layers() -> list[_Size]:
    """Parameters and multiplications of VGG16's layers."""
    layers, pixels, inputs = [], 224, 3
    for block in VGG16:
        for outputs in block:
            weights = 9 * inputs * outputs
            layers.append(_Size(weights + outputs, weights * pixels * pixels))
            inputs = outputs
        pixels //= 2
    flat = inputs * pixels * pixels
    for width, outputs in ((flat, 4096), (4096, 4096), (4096, 1000)):
        layers.append(_Size(width * outputs + outputs, width * outputs))
    return layers


@dataclass(frozen=True)
class Vgg16:
    """Figure 8(a): the same batch on every GPU at every scale."""

    bytes_per_gradient: float = 4.0
    """fp32."""
    backward_share: float = 2 / 3
    """Part of the computation that is the backward pass."""
    compute_factor: float = 1.0
    """Applied to the calibrated time of the computation: for the sensitivity to it."""

    name: ClassVar[str] = "8a"
    title: ClassVar[str] = "8(a) VGG16, data parallel"
    gpus: ClassVar[tuple[int, ...]] = (32, 64, 128, 256, 512)
    claimed: ClassVar[tuple[int, ...]] = gpus
    scaling: ClassVar[float] = 0.88
    """From the first to the last scale, in the paper; chooses the time of the computation."""

    def curves(self, hardware: Hardware, gpus: tuple[int, ...] = ()) -> Curves:
        """Steps with HFReduce, with NCCL, and with HFReduce and no barrier."""
        first, last = self.gpus[0], self.gpus[-1]

        def step(compute: float, gpus: int, library: Library, *, barrier: bool = True) -> float:
            layers = self._layers(compute, gpus, library, hardware)
            return replicated_step(layers, barrier=barrier)

        def scaling(compute: float) -> float:
            times = [step(compute, gpus, Library.HFREDUCE) for gpus in (first, last)]
            return times[0] / times[1]

        compute = bisected(scaling, self.scaling, 0.05) * self.compute_factor
        scales = gpus or self.gpus
        series = {
            HAISCALE: tuple(step(compute, n, Library.HFREDUCE) for n in scales),
            TORCH: tuple(step(compute, n, Library.NCCL) for n in scales),
            NO_BARRIER: tuple(step(compute, n, Library.HFREDUCE, barrier=False) for n in scales),
        }
        return Curves(scales, series, compute)

    def _layers(
        self, compute: float, gpus: int, library: Library, hardware: Hardware
    ) -> list[Layer]:
        sizes = vgg16_layers()
        total = sum(size.multiplications for size in sizes)
        layers = []
        for size in sizes:
            seconds = compute * size.multiplications / total
            backward = seconds * self.backward_share
            gradients = size.parameters * self.bytes_per_gradient
            transfer = hardware.allreduce_seconds(gradients, library, gpus)
            layers.append(Layer(seconds - backward, backward, transfer))
        return layers

    def claims(self, curves: Curves) -> list[Claim]:
        """Scaling, and the comparison with torch at the scales where a half is plausible."""
        first, last = self.gpus[0], self.gpus[-1]
        scaling = curves.at(HAISCALE, first) / curves.at(HAISCALE, last)
        return [
            Claim("scaling 32 to 512 GPUs", self.scaling, scaling, 0.05, is_calibration=True),
            *_halves(curves, (128, 256, 512)),
        ]

    def alternatives(self) -> dict[str, Figure]:
        """None."""
        return {}


@dataclass(frozen=True)
class Gpt2Medium:
    """Figure 8(b): the same batch on every GPU at every scale, all parameters sharded."""

    layers: int = 24
    width: int = 1024
    vocabulary: int = 50257
    context: int = 1024
    bytes_per_parameter: float = 4.0
    """fp32, of a gathered parameter and of a gradient."""
    backward_share: float = 2 / 3
    compute_factor: float = 1.0
    """Applied to the calibrated time of the computation: for the sensitivity to it."""

    name: ClassVar[str] = "8b"
    title: ClassVar[str] = "8(b) GPT2-medium, fully sharded"
    gpus: ClassVar[tuple[int, ...]] = (16, 32, 64, 128)
    claimed: ClassVar[tuple[int, ...]] = gpus
    scaling: ClassVar[float] = 0.95
    """From the first to the last scale, in the paper; chooses the time of the computation."""

    def curves(self, hardware: Hardware, gpus: tuple[int, ...] = ()) -> Curves:
        """Steps with gathers and scatters at the rates of HFReduce and of NCCL."""
        first, last = self.gpus[0], self.gpus[-1]

        def step(compute: float, gpus: int, library: Library) -> float:
            return sharded_step(self._layers(compute, gpus, library, hardware))

        def scaling(compute: float) -> float:
            times = [step(compute, gpus, Library.HFREDUCE) for gpus in (first, last)]
            return times[0] / times[1]

        compute = bisected(scaling, self.scaling, 0.1) * self.compute_factor
        scales = gpus or self.gpus
        series = {
            HAISCALE: tuple(step(compute, n, Library.HFREDUCE) for n in scales),
            TORCH: tuple(step(compute, n, Library.NCCL) for n in scales),
        }
        return Curves(scales, series, compute)

    def _layers(
        self, compute: float, gpus: int, library: Library, hardware: Hardware
    ) -> list[Layer]:
        block = 12 * self.width**2 + 13 * self.width
        embeddings = (self.vocabulary + self.context) * self.width
        forward = compute * (1 - self.backward_share) / self.layers
        backward = compute * self.backward_share / self.layers

        def gather(parameters: int) -> float:
            size = parameters * self.bytes_per_parameter
            return hardware.allreduce_seconds(size, library, gpus) / 2

        blocks = [Layer(forward, backward, gather(block))] * self.layers
        return [Layer(0.0, 0.0, gather(embeddings)), *blocks]

    def claims(self, curves: Curves) -> list[Claim]:
        """Scaling, and the comparison with torch."""
        first, last = self.gpus[0], self.gpus[-1]
        scaling = curves.at(HAISCALE, first) / curves.at(HAISCALE, last)
        return [
            Claim("scaling 16 to 128 GPUs", self.scaling, scaling, 0.05, is_calibration=True),
            *_halves(curves, (64, 128)),
        ]

    def alternatives(self) -> dict[str, Figure]:
        """Another context."""
        return {"context 256": replace(self, context=256)}


def _halves(curves: Curves, scales: tuple[int, ...]) -> list[Claim]:
    return [
        Claim(f"step over torch's on {gpus} GPUs", 0.5, curves.ratio(HAISCALE, TORCH, gpus), 0.05)
        for gpus in scales
    ]
