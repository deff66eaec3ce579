"""torch.distributed: groups that only their members create.

torch derives the name of such a group from the number of groups that a rank has created, and stages
of a pipeline create different numbers: with tied layers, or with shards in more layers. The next
group of ranks of two stages would have two names, and its ranks would wait for each other until the
deadline. The names of these groups depend on earlier groups of the same ranks alone.
"""

from __future__ import annotations

import weakref
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import torch.distributed as dist
from torch.distributed import distributed_c10d

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["local_group"]

FIRST: Final = 1 << 32
"""Above torch's own numbers of groups."""
_CREATED: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[int, ...]]] = (
    weakref.WeakKeyDictionary()
)
"""For each default group: how many groups its ranks have created, by their ranks."""


def local_group(ranks: Sequence[int], **options: Any) -> dist.ProcessGroup:
    """`torch.distributed.new_group` with `use_local_synchronization`.

    Args:
        ranks: Numbers in the default group; only these ranks call it, in the same order as their
            other groups of these ranks.
        options: Further arguments of torch's function.

    Raises:
        TypeError: This rank is not a member.
    """
    default = dist.group.WORLD
    assert default is not None, "a process group is initialized"
    created = _CREATED.setdefault(default, Counter())
    key = tuple(sorted(ranks))
    names = distributed_c10d._world
    before, names.group_count = names.group_count, FIRST + created[key]
    try:
        group = dist.new_group(list(ranks), use_local_synchronization=True, **options)
    finally:
        names.group_count = before
    created[key] += 1
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"rank {dist.get_rank()} is not a member of its group {list(ranks)}")
    return group
