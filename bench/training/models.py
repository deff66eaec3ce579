"""Models of the training benchmark, and the ways to train them on several ranks."""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bench.training import sharded
from bench.training.figures import ALONE, HAISCALE
from bench.training.llama import Llama

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch.distributed as dist

__all__ = ["Model", "Trainer", "missing"]


def missing(variant: str) -> str | None:
    """The reason why a variant cannot be measured here."""
    if variant == HAISCALE and importlib.util.find_spec("haiscale.ddp") is None:
        return "haiscale.ddp is not installed"
    return None


@dataclass(frozen=True, slots=True)
class Model:
    """A model with its input and optimizer; equal on all ranks, except for the data."""

    kind: str
    """gpt: the example's model, llama: a small Llama, real computation. timed: layers that take a
    given time."""
    width: int
    layers: int
    context: int
    """gpt, llama: bytes per sequence. timed: elements of the input are context x width."""
    parameters: int = 0
    """timed: of each layer."""
    bucket_mebibytes: float = 25.0

    def build(self) -> nn.Module:
        """The model, with the same parameters on every rank."""
        torch.manual_seed(1)
        if self.kind == "gpt":
            model = _example().GPT(self.context, width=self.width, layers=self.layers)
            assert isinstance(model, nn.Module)
            return model
        if self.kind == "llama":
            return Llama(self.context, self.width, self.layers)
        from haiscale.testing import timed_model

        return timed_model(self.layers, self.width, self.parameters, 0.0)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """AdamW for real computation; SGD for timed layers, whose steps should cost little."""
        if self.kind != "timed":
            return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        return torch.optim.SGD(model.parameters(), lr=1e-3)

    def loss(self, model: nn.Module, data: torch.Tensor) -> torch.Tensor:
        """The loss of one batch."""
        output = model(data)
        if self.kind != "timed":
            return nn.functional.cross_entropy(output.flatten(0, 1), data.flatten())
        result: torch.Tensor = output.square().mean()
        return result

    def data(self, rank: int, batch: int) -> torch.Tensor:
        """A batch of this rank."""
        generator = torch.Generator().manual_seed(100 + rank)
        if self.kind != "timed":
            return torch.randint(0, 256, (batch, self.context), generator=generator)
        return torch.rand(batch * self.context, self.width, generator=generator)


class Trainer:
    """A model of one variant, and its steps."""

    def __init__(
        self, spec: Model, variant: str, groups: dict[str, dist.ProcessGroup], rank: int
    ) -> None:
        self.spec, self._rank = spec, rank
        self._data: dict[int, torch.Tensor] = {}
        self.module = spec.build()
        self._finish: Callable[[], object] = lambda: None
        self._is_sharded = variant.startswith(sharded.PREFIX)
        if self._is_sharded:
            sharded.shard(self.module, variant, groups)
        self.optimizer = spec.optimizer(self.module)
        self._model: nn.Module = self.module
        if self._is_sharded:
            self._finish = sharded.finish(self.module, variant, self.optimizer)
        elif variant == HAISCALE:
            self._model, self._finish = self._haiscale(groups["hfreduce"])
        elif variant != ALONE:
            self._model = DistributedDataParallel(
                self.module,
                process_group=groups[variant.partition("+")[2]],
                bucket_cap_mb=spec.bucket_mebibytes,
            )

    def _haiscale(self, group: dist.ProcessGroup) -> tuple[nn.Module, Callable[[], object]]:
        ddp: Any = importlib.import_module("haiscale.ddp")
        # Its default is a bucket of 4 MiB; timed models are smaller than real ones.
        size = {"bucket_cap_mb": self.spec.bucket_mebibytes} if self.spec.kind == "timed" else {}
        model = ddp.DistributedDataParallel(
            self.module, optimizer=self.optimizer, process_group=group, **size
        )
        return model, model.synchronize

    def set_seconds(self, compute_seconds: float) -> None:
        """The time of forward and backward pass together; 1 : 2, without the first input's."""
        parts = 3 * self.spec.layers - 1
        from haiscale.testing import TimedLayer

        assert isinstance(self.module, nn.Sequential)
        for layer in self.module:
            assert isinstance(layer, TimedLayer)
            layer.forward_seconds = compute_seconds / parts
            layer.input_backward_seconds = compute_seconds / parts
            layer.weight_backward_seconds = compute_seconds / parts

    def steps(self, count: int, batch: int) -> None:
        """Whole steps: forward, backward, optimizer. The last one may still be in flight."""
        if batch not in self._data:
            self._data[batch] = self.spec.data(self._rank, batch)
        for _ in range(count):
            loss = self.spec.loss(self._model, self._data[batch])
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            # With shards kept zeros would be added to, and scatters waited for.
            self.optimizer.zero_grad(set_to_none=self._is_sharded)

    def finish(self) -> None:
        """Waits for what is in flight."""
        self._finish()

    def memory_bytes(self, batch: int) -> int:
        """Largest sum of parameters, gradients and states of the optimizer in one step."""

        def step() -> None:
            self.steps(1, batch)
            self.finish()

        return sharded.memory_bytes(self.module, self.optimizer, step)

    def digest(self) -> torch.Tensor:
        """A checksum of all parameters: equal on ranks that have the same bits."""
        total = torch.zeros(1, dtype=torch.int64)
        for number, parameter in enumerate(self.module.parameters()):
            words = (
                sharded.whole(parameter)
                .detach()
                .contiguous()
                .view(-1)
                .view(torch.int32)
                .to(torch.int64)
            )
            weights = torch.arange(1, words.numel() + 1) * (2 * number + 1)
            total += (words * weights).sum()
        return total


@functools.cache
def _example() -> Any:
    path = Path(__file__).resolve().parents[2] / "examples/gpt/model.py"
    spec = importlib.util.spec_from_file_location("gpt_model", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
