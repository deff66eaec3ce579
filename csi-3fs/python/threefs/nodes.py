"""Names of storage nodes, as commands, findings and logs print them."""

from __future__ import annotations

__all__ = ["node_name"]


def node_name(node: int) -> str:
    """The name of a node id of mgmtd."""
    return f"node-{node}"
