"""Threads for many copies: turns of tenants, barriers, errors, cancellation."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
from threefs.csi.copies.fair_pool import FairPool, PoolJob

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from threefs.csi.copies.tree_copy import Unit

WAIT_SECONDS = 30.0
STOPPED = InterruptedError("stopped")


class Recorder:
    """Jobs whose units append their tenant to a list."""

    def __init__(self, workers: int = 1) -> None:
        self.pool = FairPool(workers)
        self.order: list[str] = []
        self.ended: dict[str, Exception | None] = {}
        self._lock = threading.Lock()

    def job(self, name: str, tenant: str, steps: Iterator[Unit | None]) -> PoolJob:
        def end(error: Exception | None) -> None:
            with self._lock:
                self.ended[name] = error

        job = PoolJob(tenant, steps, end)
        self.pool.add(job)
        return job

    def unit(self, text: str) -> Unit:
        def run() -> None:
            with self._lock:
                self.order.append(text)

        return run

    def units(self, text: str, count: int) -> Iterator[Unit | None]:
        for _ in range(count):
            yield self.unit(text)
        yield None


@pytest.fixture
def one() -> Iterator[Recorder]:
    recorder = Recorder()
    yield recorder
    recorder.pool.stop(WAIT_SECONDS, STOPPED)


def finish(*jobs: PoolJob) -> None:
    for job in jobs:
        assert job.ended.wait(WAIT_SECONDS)


def test_tenants_take_turns_whatever_the_number_of_their_copies(one: Recorder) -> None:
    jobs = [one.job(f"a{number}", "a", one.units("a", 10)) for number in range(5)]
    jobs.append(one.job("b", "b", one.units("b", 10)))
    one.pool.start()
    finish(*jobs)
    first = one.order[:20]
    assert abs(first.count("a") - first.count("b")) <= 2, "b waited for the copies of a"
    assert one.order.count("a") == 50


def test_copies_of_one_tenant_take_turns(one: Recorder) -> None:
    jobs = [one.job(text, "a", one.units(text, 10)) for text in "xyz"]
    one.pool.start()
    finish(*jobs)
    assert set(one.order[:3]) == {"x", "y", "z"}
    assert {text: one.order[:15].count(text) for text in "xyz"} == {"x": 5, "y": 5, "z": 5}


def test_a_long_unit_chain_does_not_delay_others(one: Recorder) -> None:
    def chain(remaining: int) -> Unit:
        def run() -> Unit | None:
            one.order.append("long")
            return chain(remaining - 1) if remaining else None

        return run

    def steps() -> Iterator[Unit | None]:
        yield chain(100)
        yield None

    jobs = [one.job("long", "a", steps()), one.job("short", "b", one.units("short", 5))]
    one.pool.start()
    finish(*jobs)
    assert one.order.index("short") < 3
    assert [index for index, text in enumerate(one.order) if text == "short"][-1] < 15
    assert one.order.count("long") == 101


def test_units_after_a_barrier_start_when_all_before_it_have_ended() -> None:
    recorder = Recorder(workers=4)
    running, most = 0, 0
    lock = threading.Lock()
    phases: list[tuple[int, int]] = []

    def unit(phase: int) -> Unit:
        def run() -> None:
            nonlocal running, most
            with lock:
                running += 1
                most = max(most, running)
            both.wait(WAIT_SECONDS)
            with lock:
                running -= 1
                phases.append((phase, running))

        return run

    both = threading.Barrier(2)

    def steps() -> Iterator[Unit | None]:
        for phase in range(3):
            for _ in range(6):
                yield unit(phase)
            yield None
            with lock:
                assert running == 0
                assert [each for each, _ in phases].count(phase) == 6

    job = recorder.job("job", "a", steps())
    recorder.pool.start()
    finish(job)
    recorder.pool.stop(WAIT_SECONDS, STOPPED)
    assert job.error is None
    assert most > 1
    assert [phase for phase, _ in phases] == sorted(phase for phase, _ in phases)


@pytest.mark.parametrize("where", ["unit", "steps", "end"])
def test_an_error_ends_its_copy_only(one: Recorder, where: str) -> None:
    def fail() -> None:
        raise OSError("broken")

    def steps() -> Iterator[Unit | None]:
        yield one.unit("before")
        if where == "unit":
            yield fail
        elif where == "steps":
            fail()
        yield None

    def end(error: Exception | None) -> None:
        if where == "end":
            fail()

    job = PoolJob("a", steps(), end)
    one.pool.add(job)
    other = one.job("other", "a", one.units("other", 3))
    one.pool.start()
    finish(job, other)
    assert isinstance(job.error, OSError)
    assert one.ended == {"other": None}
    assert one.order.count("other") == 3


def test_a_cancelled_copy_ends_after_its_unit_in_progress(one: Recorder) -> None:
    started, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        started.set()
        assert go_on.wait(WAIT_SECONDS)

    def steps() -> Iterator[Unit | None]:
        yield wait
        yield one.unit("never")
        yield None

    job = one.job("job", "a", steps())
    one.pool.start()
    assert started.wait(WAIT_SECONDS)
    error = InterruptedError("cancelled")
    one.pool.cancel(job, error)
    assert not job.ended.is_set()
    go_on.set()
    finish(job)
    assert one.ended == {"job": error}
    assert one.order == []


def test_a_copy_that_waits_for_its_turn_is_cancelled_at_once(one: Recorder) -> None:
    job = one.job("job", "a", one.units("a", 5))
    one.pool.cancel(job, InterruptedError("cancelled"))
    finish(job)
    one.pool.start()
    assert one.order == []


def test_many_copies_on_many_threads_run_each_unit_once() -> None:
    recorder = Recorder(workers=8)
    jobs = [
        recorder.job(f"{number}", f"tenant-{number % 3}", recorder.units(f"{number}", 50))
        for number in range(40)
    ]
    recorder.pool.start()
    finish(*jobs)
    recorder.pool.stop(WAIT_SECONDS, STOPPED)
    assert all(recorder.order.count(f"{number}") == 50 for number in range(40))
    assert len(recorder.ended) == 40


def test_a_stop_ends_all_copies() -> None:
    recorder = Recorder(workers=2)

    def endless() -> Iterator[Unit | None]:
        while True:
            yield recorder.unit("x")

    make: Callable[[str], PoolJob] = lambda name: recorder.job(name, "a", endless())  # noqa: E731
    jobs = [make(f"{number}") for number in range(3)]
    recorder.pool.start()
    recorder.pool.stop(WAIT_SECONDS, STOPPED)
    assert all(job.ended.is_set() for job in jobs)
    assert all(error is STOPPED for error in recorder.ended.values())
