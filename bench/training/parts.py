"""Parts of the training benchmark, by the name that the command line gives them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from bench.training import cost, ddp, fsdp, moe, pipeline, tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.rows import Row

__all__ = ["PARTS"]

PARTS: Final[dict[str, Callable[..., tuple[list[Row], dict[str, Any]]]]] = {
    "gpt": ddp.gpt,
    "wire": ddp.wire,
    "backends": ddp.backends,
    "fsdp": fsdp.fsdp,
    "fsdp-wire": fsdp.fsdp_wire,
    "pipeline": pipeline.bubble,
    "pipeline-wire": pipeline.wire,
    "moe": moe.moe,
    "tensor": tensor.tensor,
    "cost": cost.cost,
}
