"""`CPUOffload`: a share of the activations of a part of a model is kept in the host's memory.

    with CPUOffload(offload_ratio=0.5, tag="blocks"):
        x = self.blocks(x)

What autograd saves inside is copied to the host in the forward pass, in the order in which it is
saved, until its share is reached, and copied back in backward. Copies wait: they do not overlap
with computation. Values have the same bits. Tensors that are in the host's memory stay there, and
parameters and expanded tensors stay where they are, because a copy would release nothing.
In-place changes of tensors that stay raise in backward, as without the context; a copy has the
values of the forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

if TYPE_CHECKING:
    from types import TracebackType

    from torch import Tensor

__all__ = ["CPUOffload"]

HOST: Final = torch.device("cpu")


@dataclass(slots=True)
class Share:
    """Bytes of a tag; the first pass counts them, and moves everything."""

    total_bytes: int = 0
    """Saved in the first pass."""
    is_counted: bool = False
    moved_bytes: int = 0
    """Moved in the current pass."""
    depth: int = 0
    """Active contexts, one inside the other; the outermost is the pass."""

    def takes(self, size_bytes: int, ratio: float) -> bool:
        """Whether a tensor of this size is moved."""
        if not self.is_counted:
            self.total_bytes += size_bytes
            return ratio > 0
        if self.moved_bytes + size_bytes > ratio * self.total_bytes:
            return False
        self.moved_bytes += size_bytes
        return True

    def start(self) -> None:
        """A context is entered."""
        self.depth += 1

    def end(self, *, is_complete: bool) -> None:
        """A context is left; bytes of a pass that raised are not the total of a pass."""
        self.depth -= 1
        if self.depth:
            return
        if not self.is_counted:
            self.is_counted = is_complete and self.total_bytes > 0
            self.total_bytes *= self.is_counted
        self.moved_bytes = 0


class _Moved(NamedTuple):
    """A saved tensor in the host's memory, and where it was."""

    tensor: Tensor
    device: torch.device


class _Kept(NamedTuple):
    """A saved tensor in its place. Autograd checks no versions of tensors that hooks return."""

    tensor: Tensor
    version: int


class CPUOffload:
    """A context of forward passes whose activations are partly kept in the host's memory.

    Inside another `CPUOffload`, the inner context decides; with the same tag both are one pass.

    Args:
        offload_ratio: Share of the bytes that is moved, from 0 to 1. The first pass of a tag moves
            everything, as their number is not known yet.
        tag: Name of the part of the model. Passes of one tag save the same tensors.

    Raises:
        ValueError: The ratio is not from 0 to 1.
    """

    shares: ClassVar[dict[str, Share]] = {}
    """By tag."""

    def __init__(self, offload_ratio: float, tag: str) -> None:
        if not 0 <= offload_ratio <= 1:
            raise ValueError(
                f"CPUOffload: invalid offload_ratio {offload_ratio}: expected a number from 0 to 1"
            )
        self.offload_ratio = offload_ratio
        self._share = self.shares.setdefault(tag, Share())
        self._hooks = saved_tensors_hooks(self._pack, _unpack)

    def __enter__(self) -> None:
        """Moves what is saved from now on."""
        self._hooks.__enter__()
        self._share.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Ends the pass."""
        self._hooks.__exit__(kind, error, trace)
        self._share.end(is_complete=error is None)

    def _pack(self, tensor: Tensor) -> Any:
        if _stays(tensor) or not self._share.takes(tensor.nbytes, self.offload_ratio):
            # Detached: an output would hold the node that holds it, and never be released.
            return _Kept(tensor.detach(), tensor._version)
        return _Moved(tensor.detach().to(HOST, copy=True), tensor.device)


def _stays(tensor: Tensor) -> bool:
    if tensor.layout is not torch.strided or _is_expanded(tensor):
        return True
    # A saved matrix of a linear layer is a view of the parameter.
    whole = tensor if tensor._base is None else tensor._base
    return is_on_host(tensor) or isinstance(whole, nn.Parameter)


def is_on_host(tensor: Tensor) -> bool:
    """Whether a copy to the host would release nothing."""
    return tensor.device == HOST


def _is_expanded(tensor: Tensor) -> bool:
    """Whether elements share memory, so that a copy is larger."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return any(size > 1 and stride == 0 for size, stride in sizes)


def _unpack(saved: _Moved | _Kept) -> Tensor:
    if isinstance(saved, _Moved):
        return saved.tensor.to(saved.device)
    if saved.tensor._version != saved.version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: tensor of shape {tuple(saved.tensor.shape)}, saved inside CPUOffload, is "
            f"at version {saved.tensor._version}; expected version {saved.version}: modify a copy "
            "of it"
        )
    return saved.tensor
