"""Constants of the paper's cluster, with their sources.

Rates are in bytes per second. None is fitted to the paper's Figures 8 and 9.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import log
from typing import Final

__all__ = ["FIRE_FLYER_2", "Hardware", "Library"]


class Library(StrEnum):
    """Implementation of the collectives."""

    HFREDUCE = "hfreduce"
    NCCL = "nccl"


@dataclass(frozen=True, slots=True)
class Hardware:
    """A node, its card, and the measured rates of the collectives."""

    gpus_per_node: int = 8
    """Paper, III-A."""
    card_rate: float = 25e9
    """Each way: one card of 200 Gb/s (paper, III-A)."""
    nvlink_rate: float = 300e9
    """Each way between the accelerators of a pair: 600 GB/s both ways (paper, V-B1)."""
    pcie_rate: float = 37.5e9 / 4
    """Of one accelerator to another one of its node through the processor, each way: two
    accelerators share a root port of 37.5 GB/s for both directions (paper, IV-D3)."""
    memory_bytes: float = 40e9
    """Of an accelerator: A100 PCIe, 40 GB."""
    memory_rate: float = 1555e9
    """Of an accelerator's memory: A100 PCIe, 40 GB (data sheet)."""
    matmul_rate: float = 220e12
    """FP16 operations per second, measured (paper, Table II)."""
    tf32_rate: float = 107e12
    """TF32 operations per second, measured (paper, Table II)."""
    hfreduce_first: float = 8.1e9
    """Allreduce by HFReduce, size over time, on `first_gpus` (paper, IV-B2: 6.3 to 8.1 GB/s)."""
    hfreduce_last: float = 6.3e9
    """On `last_gpus`."""
    nccl_first: float = 4.8e9
    """Allreduce by NCCL (paper, IV-B2: 1.6 to 4.8 GB/s)."""
    nccl_last: float = 1.6e9
    first_gpus: float = 32
    """Scale at which the ends of both ranges are taken; the paper gives the ranges only."""
    last_gpus: float = 1440

    def allreduce_rate(self, library: Library, gpus: int) -> float:
        """Size over time; between the ends linear in the logarithm of the number of GPUs."""
        first, last = (
            (self.hfreduce_first, self.hfreduce_last)
            if library is Library.HFREDUCE
            else (self.nccl_first, self.nccl_last)
        )
        position = log(max(gpus, 1) / self.first_gpus) / log(self.last_gpus / self.first_gpus)
        return first + (last - first) * min(max(position, 0.0), 1.0)

    def allreduce_seconds(self, size: float, library: Library, gpus: int) -> float:
        """Time of an allreduce of `size` bytes. A gather or a scatter takes half of it."""
        return size / self.allreduce_rate(library, gpus) if gpus > 1 else 0.0


FIRE_FLYER_2: Final = Hardware()
"""The paper's cluster."""
