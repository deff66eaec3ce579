"""Why a FlyerJob has no nodes: `status.pending`."""

# ruff: noqa: TC001 - pydantic resolves the annotations, and copies the defaults

from __future__ import annotations

from typing import Literal

from pydantic import Field

from flyer.api.base import Model
from flyer.api.conditions import MESSAGE_CHARS_MAX
from flyer.api.limits import (
    BY_CHARS_MAX,
    NAME_CHARS_MAX,
    NODES_MAX,
    PENDING_CHARS_MAX,
    PENDING_REASONS_MAX,
    UNBLOCK_MAX,
)
from flyer.api.timestamps import Timestamp


class PendingReason(Model):
    """Reason why the job has no nodes."""

    reason: str = Field(max_length=128, description="The reason as one word in CamelCase.")
    message: str = Field(
        max_length=PENDING_CHARS_MAX,
        description="Human-readable details of the reason, with names and numbers.",
    )
    job: str = Field(
        default="",
        max_length=2 * NAME_CHARS_MAX,
        description="The job that has the nodes or is ahead, as namespace/name. Empty if it is in "
        "another namespace.",
    )
    user: str = Field(default="", max_length=BY_CHARS_MAX, description="Owner of the other job.")
    node: str = Field(
        default="", max_length=NAME_CHARS_MAX, description="The node that is unavailable, if any."
    )
    since: Timestamp | None = Field(
        default=None, description="Time since which the reason has existed, if it is known."
    )
    until: Timestamp | None = Field(
        default=None, description="Time at which the reason ends by itself, if it is known."
    )


class Unblock(Model):
    """Way to let the job start."""

    command: str = Field(
        max_length=PENDING_CHARS_MAX, description="Command that a user can run to free nodes."
    )
    effect: str = Field(max_length=PENDING_CHARS_MAX, description="Effect of running the command.")
    node: str = Field(
        default="",
        max_length=NAME_CHARS_MAX,
        description="The node that becomes available again, if any.",
    )


class Pending(Model):
    """Why the job has no nodes, as the leading scheduler decided."""

    verdict: Literal["Pending", "Never"] = Field(
        default="Pending",
        description="Whether the job can run. Pending: it waits. Never: it cannot run in this "
        "cluster with these quotas. Default: Pending.",
    )
    reason: str = Field(max_length=128, description="The deciding reason as one word in CamelCase.")
    message: str = Field(
        max_length=MESSAGE_CHARS_MAX,
        description="Human-readable summary of all reasons, with names and numbers.",
    )
    eta: Timestamp | None = Field(
        default=None, description="Estimated time of the start, if it is known."
    )
    blocked_by: tuple[str, ...] = Field(
        default=(),
        max_length=NODES_MAX,
        description="The first jobs of the same namespace that have the nodes or are ahead, as "
        "namespace/name.",
        json_schema_extra={"items": {"type": "string", "maxLength": 2 * NAME_CHARS_MAX}},
    )
    position: int | None = Field(
        default=None,
        ge=1,
        description="Position among the waiting jobs at the time of this status. Minimum: 1.",
    )
    reasons: tuple[PendingReason, ...] = Field(
        default=(),
        max_length=PENDING_REASONS_MAX,
        description="All reasons, the deciding one first. Further reasons are counted in more.",
    )
    more: int = Field(default=0, ge=0, description="Number of reasons that are not listed.")
    unblock: tuple[Unblock, ...] = Field(
        default=(),
        max_length=UNBLOCK_MAX,
        description="Ways to let the job start, the one that loses the least work first.",
    )
    time: Timestamp | None = Field(
        default=None,
        description="Time at which the scheduler wrote this entry. A changed reason is written at "
        "once. Changed numbers are written after 30 s at the front of the queue and later behind "
        "it.",
    )


__all__ = ["Pending", "PendingReason", "Unblock"]
