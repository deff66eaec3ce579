"""Parameters that stages of several ranks share, such as tied embeddings.

Each of these ranks has a copy. Copies start with the values of the first rank; their gradients are
added once at the end of a step, so equal optimizers keep them equal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from haiscale.internals.groups import local_group

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.nn import Parameter

    from haiscale.pipeline.layers import Tie

__all__ = ["Tied"]


class Tied:
    """The shared parameters of one rank.

    Args:
        group: The ranks of the pipeline.
        ties: Names of each shared parameter.
        rank_of: Rank in the group, by name.
        own: Parameters of this rank, by name.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        ties: Sequence[Tie],
        rank_of: Mapping[str, int],
        own: Mapping[str, Parameter],
    ) -> None:
        self.copies: set[str] = set()
        """Names of this rank's parameters that another rank has under an earlier name."""
        self._shared: list[tuple[Parameter, dist.ProcessGroup]] = []
        self._earlier: dict[Parameter, torch.Tensor] = {}
        groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for names in ties:
            ranks = tuple(dict.fromkeys(rank_of[name] for name in names))
            if len(ranks) == 1 or group.rank() not in ranks:
                continue
            if ranks not in groups:
                groups[ranks] = _group(group, ranks)
            name = next(name for name in names if rank_of[name] == group.rank())
            if group.rank() != ranks[0]:
                # All names: modules decide which of them is a parameter's first one.
                self.copies.update(name for name in names if rank_of[name] == group.rank())
            parameter = own[name]
            if not parameter.is_meta:
                source = dist.get_global_rank(groups[ranks], 0)
                dist.broadcast(parameter.detach(), source, groups[ranks])
            if parameter.requires_grad:
                self._shared.append((parameter, groups[ranks]))

    @property
    def groups(self) -> set[dist.ProcessGroup]:
        """Groups that share a parameter with this rank."""
        return {group for _, group in self._shared}

    def start(self) -> None:
        """Sets gradients of earlier steps aside: they are sums already."""
        for parameter, _group in self._shared:
            if parameter.grad is not None:
                self._earlier[parameter] = parameter.grad.clone()
                parameter.grad = None

    def add(self) -> None:
        """Adds the gradients of all copies; every copy gets the sum."""
        for parameter, group in self._shared:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=group)
            earlier = self._earlier.pop(parameter, None)
            if earlier is not None:
                parameter.grad += earlier


def _group(group: dist.ProcessGroup, ranks: Sequence[int]) -> dist.ProcessGroup:
    """The group of some ranks of another one; only they call it."""
    members = [dist.get_global_rank(group, rank) for rank in ranks]
    return local_group(members, backend=dist.get_backend(group), group_desc="tied")
