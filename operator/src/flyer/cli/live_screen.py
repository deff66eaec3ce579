"""The live screen of `flyer run`: nodes by zone and jobs with bars, below what is printed."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from flyer.cli.screens import event_line, progress_text

if TYPE_CHECKING:
    from rich.console import RenderableType

    from flyer.views import EventView, JobView, NodeView

__all__ = ["LiveScreen"]

JOBS_SHOWN = 8
NODES_SHOWN = 64
BAR_COLUMNS = 30
REFRESH_SECONDS = 0.1
STATE_STYLES = {"Running": "green", "Succeeded": "cyan", "Failed": "red", "Suspended": "magenta"}


class LiveScreen:
    """Drawn on stderr, below whatever is printed above it."""

    def __init__(self) -> None:
        """Take the lower part of the terminal until `close`."""
        self._console = Console(stderr=True, highlight=False)
        self._jobs: dict[str, JobView] = {}
        self._nodes: list[NodeView] = []
        self._drawn_at = 0.0
        self._stale = False
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._live.start()

    def close(self) -> None:
        """Leave the terminal to what was printed above."""
        self._live.stop()

    def job(self, job: JobView) -> None:
        """A job changed."""
        self._jobs[job.key] = job
        self._stale = True

    def nodes(self, nodes: list[NodeView]) -> None:
        """The nodes changed."""
        self._nodes = nodes
        self._stale = True

    def event(self, event: EventView) -> None:
        """Something happened: a line among the ranks' output, in the order of time."""
        style = "yellow" if event.type == "Warning" else "dim"
        self._console.print(Text(event_line(event), style=style))

    def above(self, text: str) -> None:
        """Print the ranks' output above the screen, as it is."""
        self._console.print(Text.from_ansi(text))

    def beat(self) -> None:
        """Draw what changed, if it is time to."""
        if self._stale and time.monotonic() >= self._drawn_at + REFRESH_SECONDS:
            self._drawn_at = time.monotonic()
            self._stale = False
            self._live.update(Group(self._node_lines(), self._job_lines()), refresh=True)

    def _node_lines(self) -> RenderableType:
        grid = Table.grid(padding=(0, 2))
        zones: dict[str, list[Text]] = {}
        for node in self._nodes[:NODES_SHOWN]:
            name = node.job.rpartition("/")[2] or node.state.lower()
            style = "red" if node.state == "Lost" else "green" if node.job else "dim"
            cell = Text.assemble((f"{node.name} ", "bold"), (name, style))
            zones.setdefault(node.zone, []).append(cell)
        for zone, cells in sorted(zones.items()):
            grid.add_row(Text(f"zone {zone}", style="blue"), *cells)
        return grid

    def _job_lines(self) -> RenderableType:
        grid = Table.grid(padding=(0, 2))
        ordered = sorted(self._jobs.values(), key=lambda job: (job.finished, job.created_at))
        for job in ordered[:JOBS_SHOWN]:
            progress = job.progress
            fraction = (progress.fraction or 0.0) if progress else 0.0
            metrics = progress.metrics if progress else {}
            numbers = " ".join(f"{name}={value:.4g}" for name, value in metrics.items())
            saved = f"saved {job.checkpoint.step}" if job.checkpoint else ""
            words = job.reason if job.state != "Running" else numbers
            grid.add_row(
                Text(job.name, style="bold"),
                Text(job.state, style=STATE_STYLES.get(job.state, "yellow")),
                ProgressBar(total=1.0, completed=fraction, width=BAR_COLUMNS),
                progress_text(job),
                Text(saved, style="dim"),
                Text(words, no_wrap=True, overflow="ellipsis"),
            )
        return grid
