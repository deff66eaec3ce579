"""Balance of the experts of a whole model, and averages of its gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from haiscale.ddp import groups
from haiscale.moe.errors import MoEError
from haiscale.moe.experts import Experts
from haiscale.moe.layer import MoE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor, nn
    from torch.nn import Parameter

__all__ = ["average_gradients", "balance", "balance_loss"]


@torch.no_grad()
def balance(model: nn.Module, group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """Moves the biases of all layers by one step, after the optimizer's: collective over `group`.

    An expert with more tokens than the mean gets a lower bias, one with fewer a higher one; the
    counts start anew. Call it once for each step, after all of its micro-batches.

    Args:
        model: A model with layers of `MoE`.
        group: The ranks that read different data; default: all ranks.

    Returns:
        Tokens of each expert since the last call, for each layer.
    """
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    if not layers:
        return []
    flat = torch.cat([layer.load for layer in layers])
    if dist.is_initialized():
        if dist.get_backend(group) == "nccl":
            flat = flat.cuda()
        dist.all_reduce(flat, group=group)
    loads = [*torch.split(flat.cpu(), [layer.count for layer in layers])]
    for layer, load in zip(layers, loads, strict=True):
        layer.load.zero_()
        bias = getattr(layer.router, "bias", None)
        if layer.routing.balance == "bias" and bias is not None:
            numbers = load.to(torch.float64)
            bias += layer.routing.bias_step * (numbers.mean() - numbers).sign().to(bias)
    return loads


def balance_loss(model: nn.Module) -> Tensor:
    """Sum of the balance losses of the last forward pass: 1 for each layer if it is balanced.

    Add it to the loss with a small factor, for example 0.01. Its gradient is that of the loss over
    all tokens of the links, as shares of the experts are counted there.

    Raises:
        MoEError: A router is trained, and its layer's forward pass recorded no gradients, as in
            `torch.utils.checkpoint` with `use_reentrant=True`.
    """
    losses = []
    for module in model.modules():
        if isinstance(module, MoE) and module.balance_loss is not None:
            _check_trained(module, module.balance_loss)
            losses.append(module.balance_loss)
    return torch.stack(losses).sum() if losses else torch.zeros(())


def _check_trained(layer: MoE, loss: Tensor) -> None:
    """Raises for a loss that would not train the router of a layer in training."""
    if not (layer.training and torch.is_grad_enabled()) or loss.requires_grad:
        return
    if any(parameter.requires_grad for parameter in layer.router.parameters()):
        raise MoEError(
            layer.name,
            None,
            "the forward pass recorded no gradients of the balance loss",
            "pass use_reentrant=False to torch.utils.checkpoint; outside of training call "
            "balance_loss under torch.no_grad",
        )


@torch.no_grad()
def average_gradients(
    model: nn.Module,
    dense: dist.ProcessGroup | None = None,
    experts: dist.ProcessGroup | None = None,
) -> None:
    """Averages gradients after backward: those of experts over their replicas, others over all.

    A simple alternative to DistributedDataParallel, which averages every parameter over one group.
    All gradients of a data type are one allreduce, so nothing overlaps with backward. A parameter
    without a gradient on some ranks counts as zero there; one without on all ranks keeps None. Of
    DTensors each rank's part is averaged: the ranks of a group must have the same parts.

    Args:
        model: A model with layers of `MoE`.
        dense: The ranks that read different data; default: all ranks.
        experts: Of the axis expert_dp; None: each expert is on one rank.
    """
    own = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, Experts)
        for parameter in module.parameters()
    }
    parameters = [p for p in model.parameters() if p.requires_grad]
    if dist.is_initialized():
        world = dense if dense is not None else dist.group.WORLD
        assert world is not None
        _average([p for p in parameters if id(p) not in own], world)
    if experts is not None:
        _average([p for p in parameters if id(p) in own], experts)


def _average(parameters: Iterable[Parameter], group: dist.ProcessGroup) -> None:
    by_kind: dict[torch.dtype, list[Parameter]] = {}
    for parameter in parameters:
        by_kind.setdefault(parameter.dtype, []).append(parameter)
    for same in by_kind.values():
        # Ranks may have gradients of different parameters: all are sent, and which ones there are.
        has = [parameter.grad is not None for parameter in same]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in same]
        local = [_local(gradient) for gradient in gradients]
        used = torch.tensor(has).to(local[0])
        flat = torch.cat([*(each.flatten() for each in local), used])
        groups.allreduce(flat, group).wait()
        *parts, used = torch.split(flat, [*(each.numel() for each in local), len(same)])
        found = has if all(has) else [average > 0 for average in used.tolist()]
        for parameter, gradient, each, part, is_used in zip(
            same, gradients, local, parts, found, strict=True
        ):
            if is_used:
                each.copy_(part.view_as(each))
                parameter.grad = gradient


def _local(gradient: Tensor) -> Tensor:
    """This rank's part of a DTensor, which the collectives of a plain group do not take."""
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
