"""`python -m demo.chaos`: many runs with one random kill each; all must end with the same bits.

A reference run comes first, without any kill. Then each trial trains the same steps while one
victim, at one random moment, gets SIGKILL: a rank, a node, a service of 3FS, or `flyer` itself.
The seed decides victims and moments, so a trial can be repeated.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from demo import corpus
from demo.observer import DemoError
from demo.processes import only_one
from demo.scenario import variant
from demo.stack import EXAMPLE, ROOT, STORAGE_SERVICES, Stack, kill_all

if TYPE_CHECKING:
    from collections.abc import Sequence

VICTIMS = ("rank", "node", *STORAGE_SERVICES, "mgmtd", "meta", "flyer")
STEPS = 40
JOB_SECONDS = 180.0
MOMENT_SHARE_MAX = 0.7  # of the undisturbed run and of the steps: there is something left to kill
RESTART_AFTER_SECONDS = 1.0
CORPUS_BYTES_MAX = 2 << 20


@dataclass(frozen=True)
class Trial:
    """One run and its end."""

    number: int
    victim: str
    after_seconds: float
    identical: bool
    attempts: int
    seconds: float


class Chaos:
    """Runs trials on one 3FS; what a trial leaves broken there, the next one starts with."""

    def __init__(self, stack: Stack, seed: int) -> None:
        self.stack, self.random = stack, random.Random(seed)
        self._reference_digest = ""
        self._reference_seconds = 0.0

    def prepare(self) -> None:
        """3FS, text, and the undisturbed run."""
        self.stack.start_storage()
        sources = corpus.find_sources(CORPUS_BYTES_MAX)
        corpus.upload(self.stack.files, "/corpus", sources, lambda _: None)
        self._start("reference")
        started = time.monotonic()
        self._finish("reference")
        self._reference_seconds = time.monotonic() - started
        self._reference_digest = self._digest("reference")

    def trial(self, number: int, victim: str) -> Trial:
        """One run with one kill."""
        name = f"trial-{number}"
        after_seconds = self.random.uniform(0.0, MOMENT_SHARE_MAX * self._reference_seconds)
        started = time.monotonic()
        self._start(name)
        killed_after_seconds = self.await_moment(name, after_seconds)
        self._kill(victim, name)
        attempts = self._finish(name)
        return Trial(
            number,
            victim,
            round(killed_after_seconds, 2),
            self._digest(name) == self._reference_digest,
            attempts,
            round(time.monotonic() - started, 1),
        )

    def await_moment(self, name: str, after_seconds: float) -> float:
        """Returns the seconds waited: fewer if this run is much faster than the undisturbed one."""
        started, last_step = time.monotonic(), int(MOMENT_SHARE_MAX * STEPS)
        observer = self.stack.observer
        observer.wait(
            f"{after_seconds:.1f} s or step {last_step} of {name}",
            JOB_SECONDS,
            lambda: time.monotonic() - started >= after_seconds or observer.step(name) >= last_step,
        )
        return time.monotonic() - started

    def _start(self, name: str) -> None:
        """A separate driver for each run: all nodes are available, so the split is the same."""
        path = self.stack.folder / f"{name}.yaml"
        path.write_text(variant(EXAMPLE, name, **{'"120"': f'"{STEPS}"'}))
        self.stack.start_driver(str(path), state=name)
        observer = self.stack.observer
        observer.wait(
            f"the start of {name}",
            JOB_SECONDS,
            lambda: (job := observer.job(name)) is not None and job.state == "Running",
        )

    def _kill(self, victim: str, name: str) -> None:
        if victim == "flyer":
            self.stack.kill_driver()
            self.stack.start_driver(state=name)
        elif victim in ("rank", "node"):
            nodes = [n for n in self.stack.client.nodes() if n.job.endswith(name) and n.pids]
            if not nodes:
                raise DemoError(f"{name} has ended before its {victim} could be killed")
            node = self.random.choice(nodes)
            ranks = [pid for pid in node.pids if pid != node.supervisor_pid]
            kill_all([self.random.choice(ranks)] if victim == "rank" else node.pids)
        else:
            self.stack.kill_service(victim)

    def _finish(self, name: str) -> int:
        """Waits for the job's success; returns how many attempts it took."""
        self.stack.driver.wait(JOB_SECONDS)
        job = self.stack.observer.job(name)
        if job is None or job.state != "Succeeded":
            raise DemoError(
                f"{name} is {job.state if job else 'unknown'}\n{self.stack.driver.tail}"
            )
        return job.attempt

    def _digest(self, name: str) -> str:
        return str(json.loads(self.stack.files.read_file(f"/ckpt/{name}/result.json"))["digest"])


def main() -> int:
    """Runs the trials; 0 when all ended with the reference's bits."""
    parser = argparse.ArgumentParser(prog="python -m demo.chaos", description=__doc__)
    parser.add_argument("--kills", type=int, default=20, help="how many trials (default 20)")
    parser.add_argument("--seed", type=int, default=1, help="decides victims' ranks and moments")
    parser.add_argument(
        "--victims", nargs="+", choices=VICTIMS, default=VICTIMS, metavar="VICTIM",
        help=f"killed in turn (default all: {' '.join(VICTIMS)})",
    )  # fmt: skip
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "chaos")
    args = parser.parse_args()
    folder, console = args.folder.resolve(), Console(stderr=True)
    try:
        with only_one(folder.with_suffix(".lock")):
            trials = run(folder, args.kills, args.victims, args.seed, console)
    except DemoError as error:
        console.print(f"[red bold]failed:[/] {error}", highlight=False)
        return 1
    return 0 if all(trial.identical for trial in trials) else 1


def run(
    folder: Path, kills: int, victims: Sequence[str], seed: int, console: Console
) -> list[Trial]:
    """All trials, shown as they end, and written to `chaos.json`."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    trials: list[Trial] = []
    with Stack(folder, RESTART_AFTER_SECONDS) as stack:
        chaos = Chaos(stack, seed)
        console.print("the undisturbed run")
        chaos.prepare()
        for number in range(kills):
            trial = chaos.trial(number, victims[number % len(victims)])
            trials.append(trial)
            console.print(f"{number + 1:3}/{kills}  {described(trial)}", highlight=False)
    (folder / "chaos.json").write_text(json.dumps([asdict(t) for t in trials], indent=2) + "\n")
    same = sum(trial.identical for trial in trials)
    table = Table(show_header=False)
    table.add_row("random kills", str(len(trials)))
    table.add_row("ended with the reference's bits", f"{same} of {len(trials)}")
    console.print(table)
    return trials


def described(trial: Trial) -> str:
    """A trial in one line."""
    verdict = "same bits" if trial.identical else "[red]OTHER BITS[/]"
    return (
        f"{trial.victim:<10} killed after {trial.after_seconds:5.1f} s  "
        f"attempts {trial.attempts}  {trial.seconds:5.1f} s  {verdict}"
    )


if __name__ == "__main__":
    sys.exit(main())
