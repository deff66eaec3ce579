"""Errors of pipelines."""

from __future__ import annotations

__all__ = ["PartitionError", "PipelineError"]


class PartitionError(ValueError):
    """Layers that cannot be divided into the stages of a schedule."""


class PipelineError(RuntimeError):
    """A step failed; no rank of the pipeline has returned from it, so no optimizer has stepped.

    `rank` is the rank that raises; `stage` and `microbatch` are what it computed or waited for, and
    `peer` the rank that it waited for, each None where there is none. The text of an error that
    started on another rank contains that rank's text. The pipeline refuses further steps.
    """

    def __init__(
        self,
        detail: str,
        *,
        rank: int,
        stage: int | None = None,
        microbatch: int | None = None,
        peer: int | None = None,
    ) -> None:
        where = f"rank {rank}"
        if stage is not None:
            where += f", stage {stage}"
        if microbatch is not None:
            where += f", micro-batch {microbatch}"
        super().__init__(f"{where}: {detail}")
        self.detail = detail
        self.rank = rank
        self.stage = stage
        self.microbatch = microbatch
        self.peer = peer
