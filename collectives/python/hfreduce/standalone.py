"""A group without torch: ranks that a launcher started, or that start each other.

The environment has torchrun's variables: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Rank 0
listens there (or at HFREDUCE_RENDEZVOUS) until all ranks have joined, and rejects peers that do not
hold the key in HFREDUCE_KEY_FILE::

    communicator = hfreduce.standalone.connect(os.environ)
    hfreduce.allreduce(array, communicator)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hfreduce import _native

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["connect"]


def connect(environment: Mapping[str, str]) -> _native.Communicator:
    """Joins the group that the environment describes."""
    return _native.Rendezvous(environment).join()
