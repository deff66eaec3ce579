"""Errors of data-parallel training."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["ModelMismatchError", "StepError"]


class ModelMismatchError(ValueError):
    """A rank wraps another model than rank 0; raised on every rank, before anything is changed."""

    def __init__(self, rank: int, name: str, found: str, expected: str, first: int = 0) -> None:
        super().__init__(
            f"the model of rank {rank} differs from that of rank {first}, first at {name!r}: "
            f"{found} on rank {rank}, {expected} on rank {first}: "
            "build the same model on every rank"
        )
        self.rank = rank
        self.name = name
        self.fields = (rank, name, found, expected, first)
        """The arguments of this error, for the other ranks."""


class StepError(RuntimeError):
    """A step failed on this rank; the wrapper refuses further use until `reset`.

    `stepped` are the buckets whose parameters this step has updated, `missing` the others. An
    optimizer that raised may have updated a part of a bucket, which is in `stepped`. If both are
    non-empty the model is between two steps. `names` are the names of all buckets, where they
    have one.
    """

    def __init__(
        self,
        detail: str,
        *,
        step: int,
        stepped: tuple[int, ...],
        missing: tuple[int, ...],
        names: Sequence[str] = (),
    ) -> None:
        if not stepped:
            extent = "no parameter was updated by this step"
            remedy = "call reset() on every rank, or restart the job"
        elif missing:
            done, rest = _list(stepped, names), _list(missing, names)
            extent = f"parameters of buckets {done} are updated, of {rest} not"
            remedy = "load a checkpoint on every rank after reset(), or restart the job"
        else:
            extent = "the parameters of every bucket are updated"
            remedy = "call reset() on every rank, or restart the job"
        super().__init__(f"step {step}: {detail}; {extent}: {remedy}")
        self.detail = detail
        self.step = step
        self.stepped = stepped
        self.missing = missing
        self.names = names


def _list(buckets: tuple[int, ...], names: Sequence[str]) -> str:
    return ", ".join(names[bucket] if names else str(bucket) for bucket in buckets)
