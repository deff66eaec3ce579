"""Errors of data-parallel training."""

from __future__ import annotations

__all__ = ["ModelMismatchError", "StepError"]


class ModelMismatchError(ValueError):
    """A rank wraps another model than rank 0; raised on every rank, before anything is changed."""

    def __init__(self, rank: int, name: str, found: str, expected: str) -> None:
        super().__init__(
            f"the model of rank {rank} differs from that of rank 0, first at {name!r}: "
            f"{found} on rank {rank}, {expected} on rank 0: build the same model on every rank"
        )
        self.rank = rank
        self.name = name


class StepError(RuntimeError):
    """A step failed on this rank; the wrapper refuses further use until `reset`.

    `stepped` are the buckets whose parameters this step has updated, `missing` the others. If both
    are non-empty the model is between two steps.
    """

    def __init__(
        self, detail: str, *, step: int, stepped: tuple[int, ...], missing: tuple[int, ...]
    ) -> None:
        if not stepped:
            extent = "no parameter was updated by this step"
            remedy = "call reset() on every rank, or restart the job"
        elif missing:
            extent = f"parameters of buckets {_list(stepped)} are updated, of {_list(missing)} not"
            remedy = "load a checkpoint on every rank after reset(), or restart the job"
        else:
            extent = "the parameters of every bucket are updated"
            remedy = "call reset() on every rank, or restart the job"
        super().__init__(f"step {step}: {detail}; {extent}: {remedy}")
        self.detail = detail
        self.step = step
        self.stepped = stepped
        self.missing = missing


def _list(buckets: tuple[int, ...]) -> str:
    return ", ".join(map(str, buckets))
