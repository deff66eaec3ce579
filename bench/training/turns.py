"""Variants of a training step that take turns on the ranks of one group."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from bench.collectives.harness import BenchError
from bench.training.figures import ALONE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.collectives.harness import RankGroup

__all__ = ["STEPS_MAX", "TURN_SECONDS", "Turns"]

TURN_SECONDS: Final = 4.0
"""Approximate time of one variant in one round."""
STEPS_MAX: Final = 50


@dataclass(slots=True)
class Turns:
    """Variants that take turns; by name the seconds of one step in each round."""

    group: RankGroup
    batch: int = 1
    compute_seconds: float = 0.0
    seconds: dict[str, list[float]] = field(default_factory=dict)
    _counts: dict[str, int] = field(default_factory=dict)
    """Steps of each variant in a round."""

    def once(self, name: str, count: int = 1, *, check: bool = False) -> float:
        """Seconds of one step of the slowest rank."""
        command = (
            f"{name.replace(' ', '_')} {self.batch} {self.compute_seconds:.6f} {count} {int(check)}"
        )
        answers = self.group.ask(command)
        refused = [" ".join(words) for words in answers if words[:1] != ["ok"]]
        if refused:
            raise BenchError(f"{self.group.name}: {name}: {refused[0]}")
        return max(float(words[1]) for words in answers) / count

    def typical(self, name: str, times: int = 3) -> float:
        """Median of some steps after one that warms up."""
        self.once(name)
        return statistics.median(self.once(name) for _ in range(times))

    @staticmethod
    def count(seconds: float) -> int:
        """Steps of this length in a turn."""
        return max(1, min(STEPS_MAX, round(TURN_SECONDS / max(seconds, 1e-6))))

    def run(self, names: Sequence[str], rounds: int, *, once: bool = False) -> None:
        """All rounds, each with every variant, in varying order; results are checked first.

        `once`: a round has one step of each variant, where a step is long.
        """
        self.start(names, once=once)
        for number in range(rounds):
            self.round(number)

    def start(self, names: Sequence[str], *, once: bool = False) -> None:
        """Checks the results of the variants, and sets their steps in a round."""
        for name in names:
            # Alone, ranks have their own data and results.
            self.once(name, 2, check=name != ALONE)
            self._counts[name] = 1 if once else self.count(self.once(name))
            self.seconds[name] = []

    def round(self, number: int) -> None:
        """One round, in an order that depends on its number."""
        names = list(self._counts)
        at = number % len(names)
        for name in [*names[at:], *names[:at]]:
            self.seconds[name].append(self.once(name, self._counts[name]))
