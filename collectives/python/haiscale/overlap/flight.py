"""Gradients in flight: averages whose result is not used yet, and the steps that wait for them.

A bucket is *in flight* from the start of its collective until its result is used: put into `.grad`
or, once the optimizer's step was requested, into the parameters. That happens on the caller's
thread: when the step is requested (what has landed), before a module that needs it runs, or in
`synchronize`. ByteScheduler (Peng et al., SOSP 2019) describes the order; here the optimizer is
torch's own (`haiscale.overlap.steps`).
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from haiscale.overlap import groups
from haiscale.overlap.errors import StepError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch.distributed as dist
    from torch import Tensor
    from torch.nn import Parameter

__all__ = ["Flight", "GradientBucket", "Landing"]


class Landing(Protocol):
    """A collective that was started: torch's `Work`, or several as one."""

    def wait(self) -> object:
        """Returns once the result is in place; raises if there is none."""

    def is_completed(self) -> bool:
        """Whether `wait` would return or raise at once."""


class GradientBucket(ABC):
    """Parameters whose gradients are averaged together and stepped together."""

    def __init__(self, index: int, names: Sequence[str], parameters: Sequence[Parameter]) -> None:
        self.index = index
        self.names = list(names)
        self.parameters = list(parameters)
        self.in_flight: list[Tensor] = []
        """In place of gradients that are being averaged: NaN, and refused to be written."""
        self.work: Landing | None = None
        """The collective, until its result is used."""
        self.steps: list[Callable[[Sequence[Tensor | None]], None]] = []
        """Steps of optimizers that are due once it has ended."""
        self.unread = 0
        """Parameters with averages in flight that no step was requested for."""

    @abstractmethod
    def groups(self) -> set[dist.ProcessGroup]:
        """Process groups that the bucket uses."""

    @abstractmethod
    def averages(self) -> list[Tensor | None]:
        """Averaged gradients; None for a parameter without a gradient on any rank."""

    def drop(self) -> None:
        """Forgets what is in flight."""
        self.work, self.unread, self.steps = None, 0, []


B = TypeVar("B", bound=GradientBucket)


class Flight(Generic[B]):
    """Buckets in the order of their start, and what is under way."""

    layer = "haiscale"
    """Name in the messages that other ranks get."""

    def __init__(self, buckets: Sequence[B], names: Sequence[str] = ()) -> None:
        self.buckets = buckets
        self.names = names
        """Of the buckets, for errors; none: their numbers."""
        self.in_flight: list[B] = []
        self.failure: StepError | None = None
        self.defers = False
        """Whether gradients stay in flight after backward, until the optimizer's step."""
        self.may_defer = False
        """Whether they may: the step of every parameter can be split."""
        self.step = 0
        """Requested steps of optimizers."""
        self.on_change: Callable[[bool], None] = lambda _busy: None
        """Called when the first bucket gets in flight (True) and when none is any more (False)."""
        self._stepped: list[int] = []

    def started(self, bucket: B) -> None:
        """After the start of a bucket's collective."""
        self.in_flight.append(bucket)
        if len(self.in_flight) == 1:
            self.on_change(True)

    # Results

    @property
    def has_unread(self) -> bool:
        """Whether gradients are in flight for which no step was requested."""
        return any(bucket.unread for bucket in self.in_flight)

    def hides(self, parameters: Iterable[Parameter]) -> bool:
        """Whether one of these has a gradient in flight for which no step was requested."""
        if not self.in_flight:
            return False
        hidden = {id(each) for bucket in self.in_flight for each in bucket.in_flight}
        return any(p.grad is not None and id(p.grad) in hidden for p in parameters)

    def request_step(self) -> None:
        """Counts a step of an optimizer; what follows is part of it."""
        self.step += 1
        self._stepped = []

    def settle_landed(self) -> None:
        """Makes the steps whose gradients are there, after all errors known by now were raised."""
        landed = [b for b in self.in_flight if b.steps and b.work and b.work.is_completed()]
        for bucket in landed:
            self.wait(bucket)
        for bucket in landed:
            self.settle(bucket)

    def settle_for_use(self, bucket: B) -> None:
        """Makes a step that is due before its parameters are read; meanwhile those that landed."""
        if bucket.work is not None:
            if not bucket.work.is_completed():
                self.settle_landed()
            self.settle(bucket)

    def reveal(self) -> None:
        """Puts averages into `.grad` for which no step was requested."""
        for bucket in [bucket for bucket in self.in_flight if bucket.unread]:
            self.settle(bucket)

    def synchronize(self) -> None:
        """Waits for all that is in flight: gradients and parameters are final."""
        self.check()
        for bucket in list(self.in_flight):
            self.wait(bucket)
        for bucket in list(self.in_flight):
            self.settle(bucket)

    def settle(self, bucket: B) -> None:
        """Waits for a bucket's averages and uses them."""
        if bucket.work is None:
            return
        self.wait(bucket)
        bucket.work, bucket.unread = None, 0
        self.in_flight.remove(bucket)
        averages = bucket.averages()
        if bucket.steps:
            self._stepped.append(bucket.index)
            try:
                for step in bucket.steps:
                    step(averages)
            except BaseException as error:
                failure = self.fail(f"the optimizer's step of bucket {self._name(bucket)}: {error}")
                if not isinstance(error, Exception):
                    raise  # an interrupt ends the process
                raise failure from error
            bucket.steps = []
        for parameter, hidden, average in zip(
            bucket.parameters, bucket.in_flight, averages, strict=True
        ):
            if parameter.grad is hidden:
                parameter.grad = average
        if not self.in_flight:
            self.on_change(False)

    def wait(self, bucket: B) -> None:
        """Waits for a bucket's collective."""
        if bucket.work is not None:
            try:
                bucket.work.wait()
            except Exception as error:
                raise self.fail(f"averaging bucket {self._name(bucket)}: {error}") from error

    def _name(self, bucket: B) -> str:
        return self.names[bucket.index] if self.names else str(bucket.index)

    # Failure

    def check(self) -> None:
        """Raises the failure of an earlier call."""
        if self.failure is not None:
            failure = self.failure
            raise StepError(
                failure.detail,
                step=failure.step,
                stepped=failure.stepped,
                missing=failure.missing,
                names=failure.names,
            ) from failure

    def fail(self, detail: str) -> StepError:
        """Marks everything as failed; other ranks' waits end. Returns the error to raise."""
        due = tuple(bucket.index for bucket in self.buckets if bucket.steps)
        step = self.step if due else self.step + 1
        stepped = tuple(sorted(self._stepped)) if due else ()
        missing = tuple(index for index in due if index not in stepped)
        self.failure = StepError(
            detail, step=step, stepped=stepped, missing=missing, names=self.names
        )
        used = {group for bucket in self.buckets for group in bucket.groups()}
        groups.abort(used, f"{self.layer}: {detail}")
        return self.failure

    def reset(self) -> None:
        """Drops gradients and steps that are in flight, and the failure."""
        for bucket in self.buckets:
            if bucket.work is not None:
                # Its memory belongs to the operation until that has ended, in success or not.
                with contextlib.suppress(RuntimeError):
                    bucket.work.wait()
            bucket.drop()
            for parameter in bucket.parameters:
                parameter.grad = None
        self.in_flight = []
        self.failure = None
        self._stepped = []
        self.on_change(False)
