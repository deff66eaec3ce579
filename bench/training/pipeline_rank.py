"""A rank of the measurements of pipelines: steps of each schedule on command."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from bench.training.pipeline_models import PipelineModel, PipelineTrainer
from bench.training.rank import serve, timed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.training.rank import Spec

__all__ = ["rank_main"]


def rank_main(rank: int, size: int, orders: str, store: str, spec: Spec) -> None:
    """A rank: commands are `SCHEDULE BATCH SECONDS COUNT CHECK`.

    SECONDS is the time of each third of a layer. Names have `_` for spaces.
    """

    def runner(groups: dict[str, dist.ProcessGroup]) -> _Runner:
        assert isinstance(spec.model, PipelineModel)
        return _Runner(rank, spec.model, groups)

    serve(rank, size, orders, store, spec, runner)


class _Runner:
    """The pipelines of one rank, each created at its first command."""

    def __init__(
        self, rank: int, model: PipelineModel, groups: dict[str, dist.ProcessGroup]
    ) -> None:
        self._rank, self._model, self._groups = rank, model, groups
        self._trainers: dict[str, PipelineTrainer] = {}
        self._digest: torch.Tensor | None = None

    def run(self, order: Sequence[str]) -> str:
        """Runs one command and returns its answer."""
        name, _batch, seconds, count, check = order
        if name not in self._trainers:
            self._trainers[name] = PipelineTrainer(
                self._model, name.replace("_", " "), self._groups, self._rank
            )
        trainer = self._trainers[name]
        trainer.set_seconds(float(seconds))
        answer = timed(trainer.steps, int(count))
        if int(check):
            return answer if self._is_equal(trainer) else "wrong gradients: they differ from 1F1B's"
        return answer

    def _is_equal(self, trainer: PipelineTrainer) -> bool:
        """Whether the gradients of all layers are those of the first variant."""
        dist.all_reduce(digest := trainer.digest())
        if self._digest is None:
            self._digest = digest
        return torch.allclose(digest, self._digest, rtol=1e-5, atol=0)
