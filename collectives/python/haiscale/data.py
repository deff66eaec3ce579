"""Order of the training data: a pure function of seed, step and index in the batch.

    order = Order(samples=len(corpus), batch=64, seed=1)
    for step in range(start, steps):
        samples = order.step(step, meshes.data_rank, meshes.data_size)

Each epoch is a pseudo-random permutation of the samples that is computed for one index at a time: a
Feistel network over the next power of four, walked until it returns a sample (Black and Rogaway,
2002, "Ciphers with Arbitrary Finite Domains"). Nothing is stored and nothing depends on the layout:
a job that resumes on another number of ranks continues with the same global batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["Order"]

ROUNDS: Final = 6
MASK: Final = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Order:
    """The samples of every step, for all ranks together."""

    samples: int
    """Samples of the data, numbered from 0."""
    batch: int
    """Samples of a step, over all ranks."""
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuses sizes without samples."""
        for name in ("samples", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"invalid {name} {getattr(self, name)}: expected at least 1")

    def step(self, step: int, part: int = 0, parts: int = 1) -> list[int]:
        """The samples of a step, or the share of one of `parts` ranks that read different data.

        The shares of all parts, one after the other, are the samples of the step.

        Raises:
            ValueError: The batch does not divide into the parts, or the part or step is invalid.
        """
        if step < 0 or not 0 <= part < parts:
            raise ValueError(f"step {step}, part {part} of {parts}: expected numbers from 0")
        if self.batch % parts:
            raise ValueError(
                f"a batch of {self.batch} samples does not divide into {parts} parts: choose a "
                "batch that every planned number of data-parallel ranks divides"
            )
        share = self.batch // parts
        first = step * self.batch + part * share
        return [self._sample(number) for number in range(first, first + share)]

    def _sample(self, number: int) -> int:
        """The sample that is read as the `number`-th one of the job."""
        epoch, index = divmod(number, self.samples)
        key = _mixed(_mixed(self.seed & MASK) ^ epoch)
        half = max(1, ((self.samples - 1).bit_length() + 1) // 2)
        while True:
            index = _permuted(index, half, key)
            if index < self.samples:
                return index


def _permuted(index: int, half: int, key: int) -> int:
    """A permutation of the numbers of twice `half` bits."""
    mask = (1 << half) - 1
    left, right = index >> half, index & mask
    for number in range(ROUNDS):
        left, right = right, left ^ (_mixed(key + (number << 56) + right) & mask)
    return (left << half) | right


def _mixed(value: int) -> int:
    """The finalizer of SplitMix64 (Steele et al., 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)
