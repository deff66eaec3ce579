"""A fingerprint of a state: equal digests mean equal bits."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from threefs.checkpoint.tree import flatten, state_of

__all__ = ["digest"]


def digest(state: dict[str, Any] | None = None, **parts: Any) -> str:
    """SHA-256 over names, dtypes, shapes and bytes of all tensors in name order, and the rest.

    Takes the arguments of `CheckpointManager.save`: `digest(model=model, optimizer=optimizer)`.
    """
    tree, leaves = flatten(state_of(state, parts))
    fingerprint = hashlib.sha256()
    for leaf in leaves:
        fingerprint.update(json.dumps([leaf.name, leaf.dtype, leaf.shape]).encode())
        if leaf.length:
            data = bytearray(leaf.length)
            leaf.copy_into(memoryview(data), 0)
            fingerprint.update(data)
    fingerprint.update(json.dumps(tree).encode())
    return fingerprint.hexdigest()
