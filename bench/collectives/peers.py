"""MPI launch configurations: the settings of each library measured for a layout. Pure.

No single configuration is the best for all sizes and layouts, so each library runs in several, and
the quickest of them in a case is the peer's figure there.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["COMMANDS", "PACKAGES", "TITLES", "Launch", "launches", "quickest"]

COMMANDS: Final = {"openmpi": "mpirun.openmpi", "mpich": "mpirun.mpich"}
PACKAGES: Final = {"openmpi": "openmpi-bin libopenmpi-dev", "mpich": "mpich libmpich-dev"}
"""Debian packages, including the compiler."""
TITLES: Final = {"openmpi": "Open MPI", "mpich": "MPICH"}


@dataclass(frozen=True, slots=True)
class Launch:
    """One configuration of one library."""

    peer: str
    name: str
    """Environment variables of the configuration."""
    words: tuple[str, ...]
    """The command up to the number of ranks."""
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def group(self) -> str:
        """The name of its ranks; without spaces, as the command protocol requires."""
        return f"{self.peer}:{self.name}"


def launches(peer: str, ranks: int, cores: int) -> list[Launch]:
    """The configurations of a library for this number of ranks and cores.

    With a core for each rank they are bound and spin. Otherwise they are not bound and yield, which
    is what both libraries advise for more ranks than cores.
    """
    fits = ranks <= cores
    if peer == "mpich":
        binding = (COMMANDS[peer], "-bind-to", "core" if fits else "none")
        gather = {
            f"MPIR_CVAR_{call}_POSIX_INTRA_ALGORITHM": "release_gather"
            for call in ("ALLREDUCE", "BCAST")
        }
        yielding = {} if fits else {"MPIR_CVAR_POLLS_BEFORE_YIELD": "1"}
        return [
            Launch(peer, "default", binding),
            Launch(peer, "release-gather", binding, gather | yielding),
            *([] if fits else [Launch(peer, "yield", binding, yielding)]),
        ]
    words: tuple[str, ...] = (COMMANDS[peer], "--allow-run-as-root")
    if fits:
        words += ("--bind-to", "core")
    else:
        words += ("--oversubscribe", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1")
    # Its pml/ucx needs a network adapter of InfiniBand, even between ranks of one node.
    shared = ("--mca", "pml", "ob1", "--mca", "btl", "self,vader")
    return [
        Launch(peer, "vader", words + shared),
        Launch(peer, "vader+coll-sm", (*words, *shared, "--mca", "coll_sm_priority", "100")),
    ]


def quickest(
    measured: Mapping[str, Sequence[float] | None],
) -> tuple[str, Sequence[float]] | None:
    """The name and rounds with the lowest median; None if nothing was measured."""
    measured_only = {name: rounds for name, rounds in measured.items() if rounds}
    if not measured_only:
        return None
    name = min(
        measured_only, key=lambda configuration: statistics.median(measured_only[configuration])
    )
    return name, measured_only[name]
