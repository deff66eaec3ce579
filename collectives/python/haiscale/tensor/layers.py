"""Modules of each part of a plan, and `parallelize`, which divides a model.

A divided module gets a subclass of its class: the module's own forward pass, with this rank's parts
of its parameters as plain tensors, and exchanges around it. In each block a norm's output is shared
once and read by all matrices with divided columns, so their gradients are summed in one collective;
a matrix with divided rows ends the attention and the feed-forward network with another one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional

from haiscale.ddp import agreement
from haiscale.tensor import exchanges
from haiscale.tensor.plan import LLAMA, PlanError, check_length, check_sizes, parts_of

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

    from haiscale.tensor.plan import Plan

__all__ = ["parallelize"]


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: Plan = LLAMA,
    *,
    head_width: int | None = None,
    sequence: bool = False,
    divided_logits: bool = False,
) -> nn.Module:
    """Divides a model's matrices over the ranks of a mesh with one axis, in place.

    All ranks of the mesh must read the same data and have the same random state, for dropout for
    example: else the tensors that every rank has differ more with each step. Values of rank 0 of
    the mesh are used. An attention must compute its number of heads from the width that it gets:
    ``view(batch, length, -1, head_width)``.

    Args:
        model: The model, with its parameters on the mesh's device.
        mesh: The mesh, for example ``meshes.dense["tp"]``. With one rank nothing is changed.
        plan: The parts of the model.
        head_width: Size of an attention head, to check that no head is divided.
        sequence: Divide activations between the blocks by position, dimension 1 (Korthikanti et
            al., 2022): the same bytes are sent, norms and residuals take 1 / ranks of the memory.
        divided_logits: Leave the logits divided by token, a DTensor, for `loss_parallel`.

    Raises:
        PlanError: Modules have no place in the plan or several, or a pattern matches nothing.
            In the forward pass: the input of divided columns is not from one of `norms`.
        SizeError: A width, a vocabulary or the number of heads does not divide into the ranks; in
            the forward pass also a length, with `sequence`.
    """
    if mesh.ndim != 1:
        raise ValueError(f"a mesh of {mesh.ndim} axes: slice it, for example meshes.dense['tp']")
    parts = parts_of(model, plan, sequence=sequence)
    ranks = mesh.size()
    check_sizes(model, plan, parts, ranks, head_width)
    if ranks == 1:
        return model
    whole = [name for name, part in parts.items() if part == "replicated"]
    agreement.broadcast(
        [p for name in whole for p in model.get_submodule(name).parameters(recurse=False)],
        mesh.get_group(),
    )
    for name, part in parts.items():
        if part != "replicated":
            kind = _Logits if part == "head" and divided_logits else _KINDS[part]
            kind.divide(name, model.get_submodule(name), mesh, sequence=sequence)
    if sequence:
        model.register_forward_pre_hook(lambda _model, inputs: check_length(inputs, ranks))
    return model


class _Divided(nn.Module):
    """A module that computes with its parts of DTensors as plain tensors."""

    axes: ClassVar[dict[str, int]] = {}
    """Dimension along which a parameter is divided, by name; others are whole on every rank."""
    mesh: ClassVar[DeviceMesh]
    """The ranks that share the module: of its class, as copies of a model are on the same ranks."""
    path: ClassVar[str]
    """The module's name in the model."""
    sequence: bool

    @classmethod
    def divide(cls, name: str, module: Any, mesh: DeviceMesh, *, sequence: bool) -> None:
        """Makes a module one of this kind, with rank 0's values."""
        members = {"mesh": mesh, "path": name}
        for key, parameter in list(module.named_parameters(recurse=False)):
            placement = Shard(cls.axes[key]) if key in cls.axes else Replicate()
            part = distribute_tensor(parameter.detach(), mesh, [placement])
            setattr(module, key, nn.Parameter(part, parameter.requires_grad))
        own = type(module)
        module.__class__ = type(f"{cls.__name__[1:]}{own.__name__}", (cls, own), members)
        module.sequence = sequence

    @property
    def group(self) -> dist.ProcessGroup:
        """The same ranks."""
        return self.mesh.get_group()

    def local(self, parameter: Any) -> Any:
        """This rank's part of a parameter."""
        if not isinstance(parameter, DTensor):
            return parameter
        part = parameter.to_local()
        if self.sequence and isinstance(parameter.placements[0], Replicate):
            return exchanges.shared(part, self.group)  # its gradient is that of some positions
        return part

    def compute(self, *inputs: Any, **others: None) -> Any:
        """The module's own forward pass; `others` are parameters that it does not get."""
        own: dict[str, Any] = self._parameters
        held = dict(own)
        parts = {name: self.local(each) for name, each in held.items() if name not in others}
        own.update(parts | others)
        try:
            return super().forward(*inputs)
        finally:
            own.update(held)

    def reduced(self, partial: Tensor) -> Tensor:
        """The sum over the ranks, or this rank's positions of it."""
        exchange = exchanges.scattered if self.sequence else exchanges.summed
        return exchange(partial, self.group)


class _Columns(_Divided):
    axes: ClassVar = {"weight": 0, "bias": 0}

    def compute(self, *inputs: Any, **others: None) -> Any:
        if not torch.compiler.is_compiling() and not exchanges.has_whole_gradients(inputs[0]):
            raise PlanError(
                "the input of layers with divided columns is not that of a norm of the plan, so "
                "gradients would be partial",
                "list the norm before them in norms, also one without parameters",
                (self.path,),
            )
        return super().compute(*inputs, **others)

    def forward(self, x: Tensor) -> Any:
        return self.compute(x)


class _Rows(_Divided):
    axes: ClassVar = {"weight": 1}

    def forward(self, x: Tensor) -> Tensor:
        result = self.reduced(self.compute(x, bias=None))
        bias: Any = self.bias
        return result if bias is None else result + self.local(bias)


class _Norm(_Divided):
    def forward(self, x: Tensor) -> Tensor:
        exchange = exchanges.gathered if self.sequence else exchanges.shared
        return exchange(self.compute(x), self.group)


class _Embedding(_Divided):
    axes: ClassVar = {"weight": 0}

    def forward(self, tokens: Tensor) -> Tensor:
        weight = self.local(self.weight)
        count = weight.shape[0]
        _check_tokens(tokens, count * self.group.size())
        first = self.group.rank() * count
        is_other = (tokens < first) | (tokens >= first + count)
        padding: Any = self.padding_idx
        if padding is not None:
            padding = padding - first if first <= padding < first + count else None
        rows = functional.embedding((tokens - first).masked_fill(is_other, 0), weight, padding)
        return self.reduced(rows.masked_fill(is_other.unsqueeze(-1), 0))


def _check_tokens(tokens: Tensor, vocabulary: int) -> None:
    """Raises on every rank: no rank would find such a token. A GPU would have to be waited for."""
    if tokens.is_cpu and bool(((tokens < 0) | (tokens >= vocabulary)).any()):
        lowest, highest = (int(each) for each in tokens.aminmax())
        raise IndexError(
            f"tokens from {lowest} to {highest}: the vocabulary has those from 0 to "
            f"{vocabulary - 1}: check the tokenizer"
        )


class _Head(_Columns):
    def forward(self, x: Tensor) -> Tensor:
        return exchanges.joined(self.compute(x), self.group)


class _Logits(_Columns):
    """A head whose result stays divided."""

    def forward(self, x: Tensor) -> Any:
        part = self.compute(x)
        return DTensor.from_local(part, self.mesh, [Shard(part.dim() - 1)], run_check=False)


_KINDS: Final[dict[str, type[_Divided]]] = {
    "columns": _Columns,
    "rows": _Rows,
    "norms": _Norm,
    "embedding": _Embedding,
    "head": _Head,
}
"""By the part of the plan."""
