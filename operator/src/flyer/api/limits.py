"""Bounds of what a FlyerJob's status lists, so that one object stays within the store's limit."""

from __future__ import annotations

# Kubernetes supports this many nodes in a cluster, and the status of a gang on all of them fits
# into an object.
NODES_MAX = 5_000
NAME_CHARS_MAX = 253
ZONE_CHARS_MAX = 63
# The name of a user or a job. Longer names, for example of service accounts, are cut.
BY_CHARS_MAX = 253
PAST_ATTEMPTS_MAX = 5
PAST_ATTEMPT_NODES_MAX = 8
# Preemptions whose times are kept: more than the scheduler's budget counts.
PREEMPTIONS_MAX = 8
# Why a job waits: the statuses of a queue of thousands of jobs stay small.
PENDING_REASONS_MAX = 8
PENDING_CHARS_MAX = 512
UNBLOCK_MAX = 4

__all__ = [
    "BY_CHARS_MAX",
    "NAME_CHARS_MAX",
    "NODES_MAX",
    "PAST_ATTEMPTS_MAX",
    "PAST_ATTEMPT_NODES_MAX",
    "PENDING_CHARS_MAX",
    "PENDING_REASONS_MAX",
    "PREEMPTIONS_MAX",
    "UNBLOCK_MAX",
    "ZONE_CHARS_MAX",
]
