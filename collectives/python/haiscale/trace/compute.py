"""Forward and backward passes of the parts of a model, as spans.

The backward pass of a part starts when the gradient of its output is there, and is taken to last
until that of another part starts. No hook changes a value or the graph.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.utils import _pytree

from haiscale.trace.spans import Kind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.utils.hooks import RemovableHandle

    from haiscale.trace.recorder import Recorder

__all__ = ["ComputeHooks", "parts"]

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def parts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The children of a model with their names, and those of containers and wrappers instead."""
    children = list(model.named_children())
    is_wrapper = len(children) == 1 and not list(model.parameters(recurse=False))
    if is_wrapper and not isinstance(model, CONTAINERS):
        yield from parts(children[0][1])
        return
    if not children:
        yield type(model).__name__, model
    for name, child in children:
        if isinstance(child, CONTAINERS) and list(child.children()):
            yield from ((f"{name}.{inner}", each) for inner, each in parts(child))
        else:
            yield name, child


class ComputeHooks:
    """Records the passes of models until it is removed."""

    def __init__(self, recorder: Recorder, models: tuple[nn.Module, ...]) -> None:
        self._recorder = recorder
        self._forward: dict[nn.Module, int] = {}
        self._backward: tuple[str, int] | None = None
        self._handles: list[RemovableHandle] = []
        for model in models:
            for name, part in parts(model):
                self._handles += [
                    part.register_forward_pre_hook(self._before),
                    part.register_forward_hook(_named(self._after, name)),
                ]

    def remove(self) -> None:
        """Removes the hooks; a graph that is left records nothing."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def reset(self) -> None:
        """Forgets a pass that raised."""
        self._forward.clear()
        self._backward = None

    def _before(self, module: nn.Module, _inputs: object) -> None:
        self._forward[module] = time.monotonic_ns()

    def _after(self, name: str, module: nn.Module, output: object) -> None:
        start = self._forward.pop(module, None)
        if start is not None:
            self._recorder.add(Kind.FORWARD, name, start, time.monotonic_ns())
        for tensor in _pytree.tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(lambda _gradients: self._on_gradient(name))
                return

    def _on_gradient(self, name: str) -> None:
        if not self._handles:
            return
        now = time.monotonic_ns()
        if self._backward is None:
            engine: Any = Variable._execution_engine
            engine.queue_callback(self._end)
        else:
            self._recorder.add(Kind.BACKWARD, self._backward[0], self._backward[1], now)
        self._backward = name, now

    def _end(self) -> None:
        if self._backward is not None:
            name, start = self._backward
            self._recorder.add(Kind.BACKWARD, name, start, time.monotonic_ns())
            self._backward = None


def _named(call: Any, name: str) -> Any:
    return lambda module, _inputs, output: call(name, module, output)
