"""Topology file of an attempt (FLYER_TOPOLOGY): its nodes and zones in rank order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flyer.api import Assignment

VERSION = 1


def topology_document(
    *,
    job: str,
    chain: str,
    attempt: int,
    ranks_per_node: int,
    assignment: Assignment,
    addresses: Mapping[str, str],
) -> dict[str, Any]:
    """The document as JSON values. `addresses` has one for each node of the assignment."""
    return {
        "version": VERSION,
        "job": job,
        "chain": chain,
        "attempt": attempt,
        "ranks_per_node": ranks_per_node,
        "nodes": [
            {"name": node.name, "zone": node.zone, "address": addresses[node.name]}
            for node in assignment.nodes
        ],
        "bridge": list(assignment.cross_zone_pair),
    }


__all__ = ["VERSION", "topology_document"]
