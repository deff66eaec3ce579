"""The backend `hfreduce` of torch.distributed.

torch ≥ 2.15 finds it by its entry point; with an older one a script imports this module first::

    import hfreduce.torch  # torch < 2.15

    torch.distributed.init_process_group("hfreduce")

It is a `Backend`, not a whole `ProcessGroup`: torch's hooks, flight recorder and debug wrapper go
on working (`base` says what it is to an older torch). Operations run in program order; every rank
must call the same ones in the same order, and a rank that does not is named in the error on every
rank. `plan` and `stats` describe the group.
"""

from __future__ import annotations

import atexit
import os
from dataclasses import dataclass
from functools import cache
from multiprocessing import parent_process
from multiprocessing.util import Finalize
from typing import Any, Final, Literal

import torch
import torch.distributed as dist

from hfreduce import _native, tensors
from hfreduce.backend import HFReduceBackend
from hfreduce.compat import IS_BACKEND
from hfreduce.group import NAME, OPEN
from hfreduce.process_group import HFReduceProcessGroup
from hfreduce.waits import WAITS
from hfreduce.work import answer_for_works

__all__ = [
    "NAME",
    "HFReduceBackend",
    "Options",
    "communicator",
    "empty",
    "plan",
    "register",
    "stats",
    "waited_seconds",
]


TORCH_MIN: Final = (2, 9)
"""An older one hides from DistributedDataParallel what a group in Python has under way."""


@dataclass(frozen=True, slots=True)
class Options:
    """Options of one group: `new_group(pg_options=Options(...))`."""

    priority: Literal["low", "normal", "high"] | int = "normal"
    """Priority of this group's chunks among the groups of a process; must be equal on all ranks.

    A level from 0 to 15; low, normal and high are 4, 8 and 12.
    """

    def __post_init__(self) -> None:
        """Refuse unknown levels."""
        _native.Settings.read({}).with_priority(str(self.priority))


def register() -> None:
    """Registers the backend; called by torch when a script names it, and on import."""
    if NAME in dist.Backend.backend_list:
        return
    major, minor = torch.__version__.split(".")[:2]
    if (int(major), int(minor)) < TORCH_MIN:
        raise ImportError(f"torch {torch.__version__}: hfreduce needs 2.9 or later")
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
    answer_for_works()
    atexit.register(_close_all)


def communicator(group: dist.ProcessGroup | None = None) -> _native.Communicator:
    """The engine under a group (default: the world)."""
    process_group = group if group is not None else dist.group.WORLD
    backend: object = process_group
    if process_group is not None and IS_BACKEND:
        kind = next((d.type for d in process_group._device_types if d.type == "cpu"), "cuda")
        backend = process_group._get_backend(torch.device(kind))
    if not isinstance(backend, HFReduceBackend):
        raise TypeError(f"the group's backend is {backend!r}, not {NAME}")
    return backend.communicator


def empty(
    *size: int, dtype: torch.dtype | None = None, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """A tensor of zeros in registered memory, which the ranks of this machine reduce in place.

    Bits and use are those of any other tensor of the CPU. A forked child shares its memory.
    """
    shape = torch.Size(size)
    kind = dtype or torch.get_default_dtype()
    return tensors.registered(communicator(group), shape.numel(), kind).view(shape)


def plan(group: dist.ProcessGroup | None = None) -> dict[str, object]:
    """The group's trees: nodes, parents, and how often each tree crosses zones."""
    return communicator(group).plan()


def stats(group: dist.ProcessGroup | None = None) -> dict[str, int | float | str]:
    """Counters of the group on this rank."""
    return communicator(group).stats()


def waited_seconds() -> float:
    """Time for which this process has waited for operations that had not ended yet.

    Waits of several threads at the same time count once. Waits in C++ are not counted: those of
    torch's DistributedDataParallel, and those for futures.
    """
    return WAITS.seconds


def _create(options: Any, backend_options: object) -> HFReduceBackend:
    _close_at_the_end_of_a_child(os.getpid())
    settings = _native.Settings.read(os.environ)
    if isinstance(backend_options, Options):
        settings = settings.with_priority(str(backend_options.priority))
    elif backend_options is not None:
        type_name = type(backend_options).__name__
        raise TypeError(f"pg_options is of type {type_name}: give hfreduce.torch.Options")
    # torch gives no list for the default group, and ranks of the job for every other one.
    ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    world = dist.get_world_size() if dist.is_initialized() else options.group_size
    membership = _native.Membership(options.group_rank, ranks, world)
    kind = HFReduceBackend if IS_BACKEND else HFReduceProcessGroup
    return kind.join(options.store, membership, settings, options.timeout)


@cache
def _close_at_the_end_of_a_child(_process: int) -> None:
    """Registers a finalizer: multiprocessing ends forked children without atexit."""
    if parent_process() is not None:
        Finalize(None, _close_all, exitpriority=0)


def _close_all() -> None:
    for backend in list(OPEN):
        backend.shutdown()


register()
