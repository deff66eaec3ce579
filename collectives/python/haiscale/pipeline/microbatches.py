"""Division of a batch into micro-batches: equal ones to train, any to evaluate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Batch", "MicrobatchError", "Tensors", "divide", "split"]


class Tensors(NamedTuple):
    """Tensors that are divided along their first dimensions; `name` is theirs in errors."""

    name: str
    values: Sequence[torch.Tensor]


Batch: TypeAlias = "torch.Tensor | Tensors | Sequence[Any] | None"
"""A tensor, several tensors, or a tensor or a tuple of tensors for each micro-batch."""


class MicrobatchError(ValueError):
    """A batch that has no equal micro-batches; `microbatch` is the first unequal one."""

    def __init__(self, detail: str, microbatch: int | None = None) -> None:
        super().__init__(detail)
        self.microbatch = microbatch


def divide(batch: Batch, count: int, name: str) -> list[tuple[Any, ...]]:
    """The arguments of each micro-batch.

    Args:
        batch: Tensors are divided along their first dimension.
        count: Number of micro-batches.
        name: Of the batch, in errors.

    Raises:
        MicrobatchError: There are other micro-batches than `count`, or they are not equal.
    """
    if batch is None:
        raise MicrobatchError(f"{name} are missing: pass them on this rank")
    if isinstance(batch, Tensors):
        columns = [divide(v, count, f"{batch.name}[{k}]") for k, v in enumerate(batch.values)]
        return [tuple(column[k][0] for column in columns) for k in range(count)]
    if isinstance(batch, torch.Tensor):
        rows = len(batch) if batch.dim() else 0
        if rows == 0 or rows % count:
            raise MicrobatchError(
                f"{name}: {rows} rows cannot be divided into {count} equal micro-batches: pass a "
                f"multiple of {count} rows, or a list of equal micro-batches"
            )
        return [(part,) for part in torch.split(batch, rows // count)]
    if len(batch) != count:
        raise MicrobatchError(
            f"{name}: {len(batch)} micro-batches, but the schedule has {count}: build the schedule "
            "for this number"
        )
    parts = [part if isinstance(part, tuple) else (part,) for part in batch]
    expected = _kinds(parts[0])
    for number, part in enumerate(parts):
        if (found := _kinds(part)) != expected:
            raise MicrobatchError(
                f"{name}: this micro-batch is {_text(found)}, but micro-batch 0 is "
                f"{_text(expected)}: make all micro-batches equal, for example by padding",
                number,
            )
    return parts


def split(batch: Tensors, count: int) -> list[tuple[Any, ...]]:
    """At most `count` parts, of almost equal sizes.

    Raises:
        MicrobatchError: The tensors have different numbers of rows, or none.
    """
    rows = sorted({len(each) if each.dim() else 0 for each in batch.values})
    if len(rows) != 1 or rows[0] == 0:
        raise MicrobatchError(
            f"{batch.name} have {rows} rows: pass tensors with the same number of rows, at least 1"
        )
    columns = [each.tensor_split(min(count, rows[0])) for each in batch.values]
    return list(zip(*columns, strict=True))


def _kinds(part: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    return [
        (tuple(each.shape), each.dtype) if isinstance(each, torch.Tensor) else (type(each),)
        for each in part
    ]


def _text(kinds: list[tuple[Any, ...]]) -> str:
    return " and ".join(" ".join(map(str, kind)) for kind in kinds)
