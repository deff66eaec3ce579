"""The time of a random kill is within the run, regardless of the speed of the machine."""

from collections.abc import Iterable
from pathlib import Path

from demo.chaos import MOMENT_SHARE_MAX, STEPS, Chaos
from demo.observer import Observer, Seen
from demo.stack import Stack


class Run(Observer):
    """A run whose steps are known in advance; nothing is read from a driver."""

    def __init__(self, steps: Iterable[int]) -> None:
        self.seen, self.trouble = Seen(), None
        self.steps = iter(steps)

    def step(self, name: str) -> int:
        return next(self.steps)


def chaos(run: Observer, folder: Path) -> Chaos:
    stack = Stack(folder, restart_after_seconds=1.0)
    stack.observer = run
    return Chaos(stack, seed=1)


def test_the_kill_waits_for_the_drawn_time(tmp_path: Path) -> None:
    run = Run([])  # no step is asked for
    assert chaos(run, tmp_path).await_moment("trial", 0.0) >= 0.0


def test_a_run_that_is_faster_than_the_undisturbed_one_is_killed_before_its_end(
    tmp_path: Path,
) -> None:
    run = Run(range(0, STEPS, 7))
    chaos(run, tmp_path).await_moment("trial", 10_000.0)
    assert next(run.steps) == int(MOMENT_SHARE_MAX * STEPS) + 7
