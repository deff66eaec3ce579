"""`python -m demo`: runs the scenario, then prints the summary and writes the timeline."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from pathlib import Path

from rich.console import Console

from demo.display import Display
from demo.memory import PeakMemory
from demo.observer import DemoError
from demo.processes import only_one
from demo.report import draw, summarise
from demo.scenario import Scenario
from demo.stack import ROOT


def main() -> int:
    """Runs the demo. Returns 0 if all checks passed, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__)
    parser.add_argument(
        "--folder",
        type=Path,
        default=ROOT / "build" / "demo",
        help="where its data, logs and results go (emptied first)",
    )
    folder = parser.parse_args().folder.resolve()
    console = Console(stderr=True)
    try:
        with only_one(folder.with_suffix(".lock")):
            return run(folder, console)
    except DemoError as error:
        # Not wrapped: it names paths.
        console.print(f"[red bold]demo failed:[/] {error}", highlight=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted; every process of the demo has been ended")
        return 130


def run(folder: Path, console: Console) -> int:
    """The demo in its own, empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    started = time.monotonic()
    with (
        PeakMemory(os.getpid()) as memory,
        Display(console) as display,
        Scenario(folder, display.say, display.shown) as scenario,
    ):
        scenario.start_storage()
        scenario.upload()
        scenario.start_driver()
        display.observer = scenario.stack.observer
        scenario.preempt()
        scenario.kill_storage()
        scenario.kill_node()
        scenario.finish()
        summary = summarise(scenario, memory.peak_bytes, time.monotonic() - started)
        picture = draw(scenario)
    (folder / "timeline.svg").write_text(picture)
    summary.write(folder / "summary.json")
    console.print(summary.table())
    console.print(
        f"picture   {_relative(folder / 'timeline.svg')}\n"
        f"summary   {_relative(folder / 'summary.json')}",
        highlight=False,
    )
    for failure in summary.failures:
        console.print(f"[red bold]not as promised:[/] {failure}")
    return 1 if summary.failures else 0


def _relative(path: Path) -> str:
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


if __name__ == "__main__":
    sys.exit(main())
