"""Reasons for which a job waits, in `status.pending.reason`, conditions, events and metrics.

`WaitingForQuota` and the words of verdict Never are Kueue's; the others say more than its one.
"""

from __future__ import annotations

from typing import Final

__all__ = ["PENDING_REASONS", "WAITING_REASONS"]

WAITING_FOR_NODES: Final = "WaitingForNodes"  # too few nodes are free
WAITING_FOR_ZONE: Final = "WaitingForZone"  # enough nodes are free, but not in one zone
WAITING_FOR_ZONE_LAYOUT: Final = (
    "WaitingForZoneLayout"  # for the distribution over zones of its checkpoint, until a timeout
)
WAITING_FOR_CROSS_ZONE_TOKEN: Final = "WaitingForCrossZoneToken"  # another job crosses zones  # noqa: S105
WAITING_FOR_TURN: Final = "WaitingForTurn"  # a job ahead of it needs the same nodes
WAITING_FOR_QUOTA: Final = "WaitingForQuota"
WAITING_FOR_PREEMPTED: Final = "WaitingForPreemptedWorkloads"  # for its assigned nodes to be empty
RESTART_BACKOFF: Final = "RestartBackoff"
PODS_REFUSED: Final = "PodsRefused"  # for example by a full ResourceQuota or Pod Security; retried
TEMPLATE_REFUSED: Final = "TemplateRefused"  # no pods can be built from it
PENDING_EVALUATION: Final = "PendingEvaluation"  # not evaluated yet

WAITING_REASONS: Final = (
    WAITING_FOR_NODES, WAITING_FOR_ZONE, WAITING_FOR_ZONE_LAYOUT, WAITING_FOR_CROSS_ZONE_TOKEN,
    WAITING_FOR_TURN, WAITING_FOR_QUOTA, WAITING_FOR_PREEMPTED, RESTART_BACKOFF,
    PODS_REFUSED,
)  # fmt: skip
"""Reasons with the verdict Pending: the job will start."""

PENDING_REASONS: Final = (
    *WAITING_REASONS, "InsufficientNodes", "InsufficientSlots", "NoMatchingNodeClass",
    "NoMatchingZone", "TopologyPlacementFailed",
    "QuotaExceeded", TEMPLATE_REFUSED, PENDING_EVALUATION,
)  # fmt: skip
"""All reasons, including those with the verdict Never."""
