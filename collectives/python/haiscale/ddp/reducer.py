"""Averages gradients while backward runs, and steps buckets as the next forward pass needs them.

Every rank starts the allreduces of the buckets in the order of the buckets, whatever order autograd
completes gradients in. `haiscale.overlap.flight` describes what happens to their results.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.autograd import Variable
from torch.utils.weak import WeakIdKeyDictionary

from haiscale.ddp import groups
from haiscale.ddp.buckets import Bucket
from haiscale.overlap.flight import Flight

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor, nn
    from torch.nn import Parameter
    from torch.utils.hooks import RemovableHandle

__all__ = ["Reducer", "check_free"]

_REDUCERS: Any = WeakIdKeyDictionary()
"""A weak reference to the reducer of each parameter."""


class Reducer(Flight[Bucket]):
    """Starts the allreduces of the buckets as autograd completes gradients."""

    layer = "haiscale.ddp"

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        super().__init__(buckets)
        self.reduces = True
        """Whether the backward pass of the last forward pass averages its gradients."""
        self.needs: dict[nn.Module, list[Bucket]] | None = None
        """Buckets with the parameters that a module reads when it is called; None: not known."""
        self._next = 0
        self._has_gradients = False
        self._has_end = False
        self.handles: list[RemovableHandle] = []
        for bucket in buckets:
            for place, parameter in enumerate(bucket.parameters):
                hook = partial(self._on_gradient, bucket, place)
                leaf: Any = parameter
                _REDUCERS[parameter] = weakref.ref(self)
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
        if not self._has_gradients:
            self.reveal()
        # Else the output is a part of another output, and gradients of this pass are under way.
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
        self.started(bucket)

    def start(self) -> None:
        """Starts to average all gradients: for backward passes whose forward pass did not ask."""
        self.check()
        while self._next < len(self.buckets):
            self._start(self.buckets[self._next])
        self._next = 0

    # Results

    def request_step(self) -> None:
        """Counts a step of an optimizer; what follows is part of it."""
        if self._has_gradients:
            raise self.fail("the last backward pass did not complete: it raised an error")
        super().request_step()

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
            self.settle_for_use(bucket)

    def reset(self) -> None:
        """Drops gradients and steps that are in flight, and the failure."""
        super().reset()
        self._next, self._has_gradients, self._has_end = 0, False, False

    def stop(self) -> None:
        """Waits for what is in flight and leaves the model alone from then on."""
        if self.failure is None:
            self.synchronize()
        self.on_change(False)
        for handle in self.handles:
            handle.remove()
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                _REDUCERS.pop(parameter, None)


def check_free(named: Iterable[tuple[str, Parameter]]) -> None:
    """Raises ValueError if a wrapper averages a gradient already: a second one would undo that."""
    for name, parameter in named:
        reducer = _REDUCERS.get(parameter)
        if reducer is not None and reducer() is not None:
            raise ValueError(
                f"the gradient of {name!r} is averaged by another DistributedDataParallel: call "
                "its close() first, or wrap one module that has both"
            )
