"""Summary of the demo's measurements: a table, and `summary.json` for programs."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from rich.table import Table


@dataclass(frozen=True)
class Summary:
    """Every figure is measured in this run; nothing is assumed."""

    bit_identical: bool
    final_digest: str
    reference_digest: str
    ranks: int
    zones: int
    zone_crossings_per_tree: list[int]
    preemptions: int
    node_failures: int
    storage_kills: int
    steps_lost_by_suspend: int
    steps_lost_by_failure: int
    checkpoints: int
    corpus_bytes: int
    corpus_identical: bool
    loss_first: float
    loss_last: float
    allreduce_gigabytes_per_second: float
    storage_resynced: bool
    memory_peak_bytes: int
    wall_s: float

    @property
    def failures(self) -> list[str]:
        """Why the demo did not show what it is meant to show; empty when it did."""
        expectations = {
            "the final weights differ from the uninterrupted run's": self.bit_identical,
            "the corpus came back different from what was written": self.corpus_identical,
            "the acknowledged suspend lost steps": self.steps_lost_by_suspend == 0,
            "job B did not preempt job A": self.preemptions >= 1,
            "no node was lost": self.node_failures >= 1,
            "no storage process was killed": self.storage_kills >= 1,
            "the killed storage process does not serve again": self.storage_resynced,
            "a tree crosses the zones more or less than once": set(self.zone_crossings_per_tree)
            == {1},
            "the loss did not fall": self.loss_last < self.loss_first,
        }
        return [reason for reason, holds in expectations.items() if not holds]

    def write(self, path: Path) -> None:
        """Writes the JSON document."""
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")

    def table(self) -> Table:
        """The same for a terminal."""
        from rich.table import Table

        table = Table(title="What was measured", show_header=False, title_justify="left")
        table.add_column(style="bold")
        table.add_column()
        for name, value in self._rows():
            table.add_row(name, value)
        return table

    def _rows(self) -> list[tuple[str, str]]:
        same = "[green]identical[/]" if self.bit_identical else "[red]DIFFERENT[/]"
        crossings = ", ".join(map(str, self.zone_crossings_per_tree))
        return [
            ("final weights and optimizer", f"{same} to the uninterrupted run"),
            ("  digest", self.final_digest),
            ("ranks, zones", f"{self.ranks} ranks over {self.zones} zones"),
            ("zone crossings of each tree", crossings),
            ("allreduce of the gradients", f"{self.allreduce_gigabytes_per_second:.2f} GB/s"),
            ("preempted", f"{self.preemptions}×, steps lost: {self.steps_lost_by_suspend}"),
            ("nodes killed", f"{self.node_failures}×, steps redone: {self.steps_lost_by_failure}"),
            (
                "storage processes killed",
                f"{self.storage_kills}×, resynced by itself: "
                + ("yes" if self.storage_resynced else "[red]no[/]"),
            ),
            ("checkpoints made durable", str(self.checkpoints)),
            ("corpus written and read back", f"{self.corpus_bytes / 1e6:.1f} MB"),
            ("loss", f"{self.loss_first:.3f} → {self.loss_last:.3f}"),
            ("peak memory, all processes", f"{self.memory_peak_bytes / 2**30:.2f} GiB"),
            ("time", f"{self.wall_s:.0f} s"),
        ]
