"""Live screen: steps, nodes, jobs and events; plain lines without a terminal."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Self

from rich.console import Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from flyer.client import JobView
    from rich.console import Console, RenderableType

    from demo.observer import Observer

REFRESH_PER_SECOND = 5
EVENTS_SHOWN = 7
STATE_STYLES = {
    "Running": "green",
    "Queued": "yellow",
    "Suspending": "yellow",
    "Draining": "yellow",
    "Failed": "red",
    "Succeeded": "cyan",
}


class Display:
    """Shows what the observer has seen. Acts are printed above and stay."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.observer: Observer | None = None
        self._began = time.monotonic()
        self._fraction: float | None = None
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._refresh, daemon=True)
        self._printed = 0

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._live.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=5)
        if self.console.is_terminal:
            self._live.stop()

    def say(self, text: str) -> None:
        """Announces an act."""
        self._fraction = None
        elapsed = time.monotonic() - self._began
        self.console.print(f"[dim]{elapsed:6.1f} s[/]  [bold]{text}[/]", highlight=False)

    def shown(self, fraction: float) -> None:
        """Shows the progress of the current step, 0 to 1."""
        self._fraction = fraction

    def _refresh(self) -> None:
        while not self._stop.wait(1 / REFRESH_PER_SECOND):
            if self.console.is_terminal:
                self._live.update(self._screen(), refresh=True)
            else:
                self._print_events()

    def _print_events(self) -> None:
        if self.observer is None:
            return
        for event in list(self.observer.seen.events):
            if event.sequence > self._printed:
                self._printed = event.sequence
                elapsed = time.monotonic() - self._began
                self.console.print(
                    f"[dim]{elapsed:6.1f} s    {event.reason}: {event.message}[/]", highlight=False
                )

    def _screen(self) -> RenderableType:
        parts: list[RenderableType] = []
        if self._fraction is not None:
            parts.append(ProgressBar(total=1.0, completed=self._fraction, width=60))
        if self.observer is not None:
            observed = self.observer.seen
            parts += [self._nodes(), self._jobs(list(observed.jobs.values())), self._events()]
        return Group(*parts)

    def _nodes(self) -> RenderableType:
        assert self.observer is not None
        table = Table.grid(padding=(0, 2))
        zones: dict[str, list[Text]] = {}
        for node in self.observer.seen.nodes:
            style = "red" if node.state not in ("Ready", "Busy") and not node.job else "dim"
            label = node.job.rpartition("/")[2] or node.state.lower()
            cell = Text(f"{node.name} ", style="bold")
            cell.append(f"{label:<13}", style="green" if node.job else style)
            zones.setdefault(node.zone, []).append(cell)
        for zone, cells in sorted(zones.items()):
            table.add_row(Text(f"zone {zone}", style="bold blue"), *cells)
        return Panel(table, title="nodes", title_align="left", border_style="dim")

    def _jobs(self, jobs: list[JobView]) -> RenderableType:
        table = Table(box=None, pad_edge=False)
        for column in ("JOB", "STATE", "STEP", "", "LOSS", "ALLREDUCE", "CHECKPOINT", "ATTEMPT"):
            table.add_column(column, no_wrap=True)
        for job in jobs:
            progress = job.progress
            metrics = progress.metrics if progress else {}
            rate = metrics.get("allreduce_gigabytes_per_second")
            step = f"{progress.step}/{progress.total_steps or '?'}" if progress else "–"
            fraction = (progress.fraction or 0.0) if progress else 0.0
            table.add_row(
                job.name,
                Text(job.state, style=STATE_STYLES.get(job.state, "")),
                step,
                ProgressBar(total=1.0, completed=fraction, width=24),
                f"{metrics['loss']:.3f}" if "loss" in metrics else "–",
                f"{rate:.2f} GB/s" if rate else "–",
                f"step {job.checkpoint.step}" if job.checkpoint else "–",
                str(job.attempt),
            )
        return Panel(table, title="jobs", title_align="left", border_style="dim")

    def _events(self) -> RenderableType:
        assert self.observer is not None
        grid = Table.grid(padding=(0, 1))
        for event in list(self.observer.seen.events)[-EVENTS_SHOWN:]:
            style = "yellow" if event.type == "Warning" else ""
            grid.add_row(
                Text(time.strftime("%H:%M:%S", time.localtime(event.time)), style="dim"),
                Text(event.reason, style=style),
                Text(event.message, overflow="ellipsis", no_wrap=True),
            )
        return Panel(grid, title="events", title_align="left", border_style="dim")
