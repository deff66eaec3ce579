"""`threefs fsck --repair`: corrections of counters of a running cluster."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from threefs.client import connect
from threefs.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["repair_counters"]


def repair_counters(
    cluster: Path | None, check_store: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """Check the store, correct its counters through the cluster, and check it again."""
    with connect(cluster) as client:
        repair = client.start_repair()
        checked = check_store()
        if checked["repair"] != repair:
            raise InvalidArgument(
                "the store does not contain the start of this repair: it is not the store of the "
                "cluster, or another repair has started since; pass the cluster's store with "
                "--data or its options, and repeat the command"
            )
        corrections = checked["corrections"]
        if not corrections:
            return {**checked, "corrected": 0}
        client.repair(repair, json.dumps(corrections))
        # A changed inode keeps its counters, so only another snapshot shows what was corrected.
        after = check_store()
    return {**after, "corrected": max(len(corrections) - len(after["corrections"]), 0)}
