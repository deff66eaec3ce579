"""Follows jobs until they end: a live screen on a terminal, lines elsewhere.

The output of ranks goes to stdout unchanged; progress bars, events and messages go to stderr.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from flyer.cli.output import Output, colours, say
from flyer.cli.screens import event_line, progress_text
from flyer.client.logs import LogReader

if TYPE_CHECKING:
    from flyer.cli.live_screen import LiveScreen
    from flyer.client import Client
    from flyer.client.watch_item import WatchItem
    from flyer.views import EventView, JobView

__all__ = ["Follower"]

PROGRESS_LINE_SECONDS = 10.0
# Interval of reading logs without other changes.
BEAT_SECONDS = 0.1


class Follower:
    """Follows jobs of one driver."""

    def __init__(
        self, client: Client, jobs: list[str], logs: str, output: Output, since: int = 0
    ) -> None:
        """Follow `jobs`, printing the output of rank `logs`, of all, or of none."""
        self._since = since
        self.last: dict[str, JobView] = {}
        self.ended_by_driver = False
        self._client = client
        self._jobs = set(jobs)
        self._quiet = output in (Output.JSON, Output.YAML)
        self._logs = "none" if self._quiet else logs
        self._readers: dict[str, LogReader] = {}
        self._progress_printed_at = self._logs_read_at = time.monotonic()
        self._screen: LiveScreen | None = None
        self._reported_waiting = False
        self._others: dict[str, JobView] = {}
        if colours(sys.stderr) and not self._quiet:
            from flyer.cli.live_screen import LiveScreen

            self._screen = LiveScreen()

    def follow(self, *, until_suspended: bool, until_driver_ends: bool = False) -> None:
        """Show everything until the jobs have ended (or the driver, or one is suspended)."""
        try:
            for item in self._client.watch(since=self._since, beat_seconds=BEAT_SECONDS):
                if item.ended:
                    self.ended_by_driver = True
                    return
                self._take(item)
                if until_driver_ends:
                    self._report_waiting()
                elif self._over(until_suspended=until_suspended):
                    return
        finally:
            self._print_logs(final=True)
            self.close()

    def close(self) -> None:
        """Leave the terminal as it was; safe to call twice."""
        if self._screen is not None:
            self._screen.close()
            self._screen = None

    # -- items ---------------------------------------------------------------------------------

    def _take(self, item: WatchItem) -> None:
        if item.job is not None:
            jobs = self.last if item.job.key in self._jobs else self._others
            jobs[item.job.key] = item.job
            if self._screen is not None:
                self._screen.job(item.job)
        if item.nodes is not None and self._screen is not None:
            self._screen.nodes(item.nodes)
        if item.event is not None:
            self._report(item.event)
        # Not at every item: events of the past are printed before the output that followed them.
        if time.monotonic() >= self._logs_read_at + BEAT_SECONDS:
            self._logs_read_at = time.monotonic()
            self._print_logs(final=False)
        self._print_progress()
        if self._screen is not None:
            self._screen.beat()

    def _report(self, event: EventView) -> None:
        if event.job and event.job not in self._jobs:
            return
        if self._screen is not None:
            self._screen.event(event)
        elif not self._quiet:
            say(f"{event_line(event)}  [{event.job or event.node}]")

    def _over(self, *, until_suspended: bool) -> bool:
        ends = {"Succeeded", "Failed"} | ({"Suspended"} if until_suspended else set())
        return len(self.last) == len(self._jobs) and all(
            job.state in ends for job in self.last.values()
        )

    # -- output --------------------------------------------------------------------------------

    def _print_logs(self, *, final: bool) -> None:
        if self._logs == "none":
            return
        rank = None if self._logs == "all" else int(self._logs)
        for key, job in self.last.items():
            reader = self._readers.get(key)
            if reader is None:
                reader = LogReader(Path(job.log_folder), rank=rank, attempt=None)
                self._readers[key] = reader
            ended = final or job.finished
            lines = [
                f"[{line.rank}] {line.text}" if rank is None else line.text
                for line in reader.read(final=ended)
            ]
            if lines and self._screen is not None and sys.stdout.isatty():
                self._screen.above("\n".join(lines))
            elif lines:
                try:
                    print("\n".join(lines), flush=True)
                except BrokenPipeError:
                    self._logs = "none"  # the reader has closed the pipe; the jobs continue
                    return

    def _print_progress(self) -> None:
        """Without a screen and without output of the job: a line at intervals."""
        if self._screen is not None or self._quiet or self._logs != "none":
            return
        if time.monotonic() < self._progress_printed_at + PROGRESS_LINE_SECONDS:
            return
        self._progress_printed_at = time.monotonic()
        for job in self.last.values():
            if job.progress is not None and not job.finished:
                say(f"{job.key} {job.state} {progress_text(job)}")

    def _report_waiting(self) -> None:
        """This command's jobs have ended, others have not: report why the process stays."""
        if self._reported_waiting or not self._over(until_suspended=True) or self._quiet:
            return
        other_jobs = [
            job for job in self._others.values() if not job.finished and job.key not in self._jobs
        ]
        own = [job for job in self.last.values() if not job.finished]
        if own or other_jobs:
            names = ", ".join(f"{job.key} ({job.state})" for job in [*own, *other_jobs])
            say(f"this process drives the cluster until every job has ended: {names}; "
                "Ctrl-C stops it, `flyer run` resumes them")  # fmt: skip
            self._reported_waiting = True
