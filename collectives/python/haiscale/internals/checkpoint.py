"""torch.distributed.checkpoint: where the part of a DTensor is in the whole tensor.

torch's planners ask a DTensor for this by a method that has no public name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch.distributed.tensor import DTensor

__all__ = ["part_of"]


def part_of(tensor: DTensor) -> tuple[torch.Size, torch.Size]:
    """Offsets and sizes of this rank's part."""
    (chunk,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    return chunk.offsets, chunk.sizes
