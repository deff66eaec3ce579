"""Averages gradients while backward runs, and steps buckets as the next forward pass needs them.

Every rank starts the allreduces of the buckets in the order of the buckets, whatever order autograd
completes gradients in. A bucket is *in flight* from then until its result is used: put into `.grad`
or, once the optimizer's step was requested, into the parameters. That happens on the caller's
thread: when the step is requested (what has landed), before a module that needs it runs, or in
`synchronize`. ByteScheduler (Peng et al., SOSP 2019) describes the order; here the optimizer is
torch's own (`haiscale.ddp.steps`).
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.autograd import Variable

from haiscale.ddp import groups
from haiscale.ddp.errors import StepError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor, nn
    from torch.nn import Parameter
    from torch.utils.hooks import RemovableHandle

    from haiscale.ddp.buckets import Bucket

__all__ = ["Reducer"]


class Reducer:
    """Buckets in the order of their start, and what is under way."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.buckets = buckets
        self.in_flight: list[Bucket] = []
        self.failure: StepError | None = None
        self.reduces = True
        """Whether the backward pass of the last forward pass averages its gradients."""
        self.defers = False
        """Whether gradients stay in flight after backward, until the optimizer's step."""
        self.step = 0
        """Requested steps of optimizers."""
        self.needs: dict[nn.Module, list[Bucket]] | None = None
        """Buckets with the parameters that a module reads when it is called; None: not known."""
        self.on_change: Callable[[bool], None] = lambda _busy: None
        """Called when the first bucket gets in flight (True) and when none is any more (False)."""
        self._hidden = {
            p: h for b in buckets for p, h in zip(b.parameters, b.in_flight, strict=True)
        }
        self._stepped: list[int] = []
        self._next = 0
        self._has_gradients = False
        self._has_end = False
        self.handles: list[RemovableHandle] = []
        for bucket in buckets:
            for place, parameter in enumerate(bucket.parameters):
                hook = partial(self._on_gradient, bucket, place)
                leaf: Any = parameter
                self.handles.append(leaf.register_post_accumulate_grad_hook(hook))

    # Backward

    def prepare(self, *, reduces: bool) -> None:
        """Before a forward pass of the whole model."""
        self.check()
        if self._has_gradients:
            raise self.fail("the last backward pass did not complete: it raised an error")
        self.reduces = reduces
        self._has_end = False
        self.reveal()

    def on_output_gradient(self, _gradient: Tensor) -> None:
        """When backward reaches an output of the model: before it reaches any parameter."""
        self.check()
        self.reveal()
        self._await_end()

    def _on_gradient(self, bucket: Bucket, place: int, parameter: Parameter) -> None:
        self.check()
        if bucket.work is not None:
            raise self.fail(
                f"a gradient of {bucket.names[place]!r} was computed before its last step was "
                "made: a module read the parameter of another module that was not called; call "
                "synchronize() before the forward pass"
            )
        bucket.collect(place)
        if not self.reduces:
            return
        self._has_gradients = True
        self._await_end()
        bucket.waiting.discard(parameter)
        while self._next < len(self.buckets) and not self.buckets[self._next].waiting:
            self._start(self.buckets[self._next])

    def _await_end(self) -> None:
        # Once in a backward pass, from its outermost part: with reentrant checkpoints backward
        # runs inside backward, and has a separate end.
        if self.reduces and not self._has_end:
            self._has_end = True
            engine: Any = Variable._execution_engine
            engine.queue_callback(self._on_end)

    def _on_end(self) -> None:
        self._has_end = False
        if not self._has_gradients:
            return  # torch.autograd.grad
        while self._next < len(self.buckets):
            self._start(self.buckets[self._next])  # with parameters that are not used here
        self._next = 0
        self._has_gradients = False
        if not self.defers:
            self.synchronize()

    def _start(self, bucket: Bucket) -> None:
        self.settle(bucket)  # a step that no forward pass has needed since
        bucket.seal()
        try:
            bucket.work = groups.allreduce(bucket.buffer, bucket.group)
        except Exception as error:
            raise self.fail(f"allreduce of bucket {bucket.index}: {error}") from error
        self._next += 1
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
        return any(p.grad is not None and p.grad is self._hidden.get(p) for p in parameters)

    def before_use(self, module: nn.Module) -> None:
        """Makes the steps that are due for a module's parameters; the others stay in flight."""
        self.check()
        if self._has_end or self._has_gradients:
            return  # inside backward: a checkpoint computes a part of the model again
        needed = self.needs.get(module) if self.needs is not None and module.training else None
        if needed is None or self.has_unread:
            # In evaluation modules may use fused paths, which read parameters of their children.
            self.synchronize()
            return
        for bucket in needed:
            if bucket.work is not None:
                if not bucket.work.is_completed():
                    self.settle_landed()
                self.settle(bucket)

    def request_step(self) -> None:
        """Counts a step of an optimizer; what follows is part of it."""
        self.step += 1
        self._stepped = []

    def settle_landed(self) -> None:
        """Makes the steps whose gradients are there, after all errors known by now were raised."""
        landed = [b for b in self.in_flight if b.steps and b.work and b.work.is_completed()]
        for bucket in landed:
            self._wait(bucket)
        for bucket in landed:
            self.settle(bucket)

    def reveal(self) -> None:
        """Puts averages into `.grad` for which no step was requested."""
        for bucket in [bucket for bucket in self.in_flight if bucket.unread]:
            self.settle(bucket)

    def synchronize(self) -> None:
        """Waits for all that is in flight: gradients and parameters are final."""
        self.check()
        for bucket in list(self.in_flight):
            self._wait(bucket)
        for bucket in list(self.in_flight):
            self.settle(bucket)

    def settle(self, bucket: Bucket) -> None:
        """Waits for a bucket's averages and uses them."""
        if bucket.work is None:
            return
        self._wait(bucket)
        bucket.work, bucket.unread = None, 0
        self.in_flight.remove(bucket)
        averages = bucket.averages()
        if bucket.steps:
            self._stepped.append(bucket.index)
            try:
                for step in bucket.steps:
                    step(averages)
            except BaseException as error:
                raise self.fail(
                    f"the optimizer's step of bucket {bucket.index}: {error}"
                ) from error
            bucket.steps = []
        columns = zip(bucket.parameters, bucket.in_flight, averages, strict=True)
        for parameter, hidden, average in columns:
            if parameter.grad is hidden:
                parameter.grad = average
        if not self.in_flight:
            self.on_change(False)

    def _wait(self, bucket: Bucket) -> None:
        if bucket.work is not None:
            try:
                bucket.work.wait()
            except Exception as error:
                raise self.fail(f"allreduce of bucket {bucket.index}: {error}") from error

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
            ) from failure

    def fail(self, detail: str) -> StepError:
        """Marks everything as failed; other ranks' waits end. Returns the error to raise."""
        missing = tuple(bucket.index for bucket in self.buckets if bucket.steps)
        step = self.step if missing else self.step + 1
        stepped = tuple(sorted(self._stepped)) if missing else ()
        self.failure = StepError(detail, step=step, stepped=stepped, missing=missing)
        groups.abort({bucket.group for bucket in self.buckets}, f"haiscale.ddp: {detail}")
        return self.failure

    def reset(self) -> None:
        """Drops gradients and steps that are in flight, and the failure."""
        for bucket in self.buckets:
            if bucket.work is not None:
                # Its memory belongs to the operation until that has ended, in success or not.
                with contextlib.suppress(RuntimeError):
                    bucket.work.wait()
            bucket.work, bucket.unread, bucket.steps = None, 0, []
            bucket.waiting = set(bucket.parameters)
            for parameter in bucket.parameters:
                parameter.grad = None
        self.in_flight = []
        self.failure = None
        self._next, self._has_gradients, self._has_end, self._stepped = 0, False, False, []
        self.on_change(False)

    def stop(self) -> None:
        """Waits for what is in flight and leaves the model alone from then on."""
        if self.failure is None:
            self.synchronize()
        remove(self.handles)


def remove(handles: Iterable[RemovableHandle]) -> None:
    """Removes hooks."""
    for handle in handles:
        handle.remove()
