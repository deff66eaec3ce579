"""FlyerQuota v1alpha1: how many nodes a user may have at once, at a priority, in a node class.

One object is one limit. `*` stands for any: `priority: "*"` and `group: "*"` bound the sum over
all of them; `user: "*"` is what each user gets who has no limit of his own for the same priority
and group. Every limit that applies to a job must have room for all of its nodes before it gets any;
what a job holds counts until its nodes are empty. Where no limit applies there is none, so a
cluster without FlyerQuotas behaves as before; `nodes: 0` closes a priority or a class.
"""

# ruff: noqa: TC001 - pydantic resolves the annotations

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, JsonValue

from flyer.api.base import Model, StrictModel
from flyer.api.conditions import Conditions
from flyer.api.metadata import ClusterMeta
from flyer.api.names import API_VERSION, KIND_QUOTA
from flyer.api.priorities import Priority
from flyer.api.rules import Rule, list_map, rules, says
from flyer.api.timestamps import Timestamp

ANY = "*"
NODES_MAX = 5_000
_USERS_MAX = 1_000
_LEVELS: list[JsonValue] = [one.value for one in Priority if one is not Priority.AUTO]


class FlyerQuotaSpec(StrictModel):
    """Nodes per user, priority and group."""

    user: str = Field(
        default=ANY,
        min_length=1,
        max_length=253,
        description="Whose jobs: the name in the annotation fireflyer.dev/user; jobs without it, "
        'and those of service accounts, count for their namespace. "*": each user who has no limit '
        "of his own for this priority and group",
    )
    priority: str = Field(
        default=ANY,
        max_length=16,
        description='One level, or "*" for the sum over all levels. A job with priority auto runs '
        "at the highest level that a limit names and that has room",
        json_schema_extra={"enum": [*_LEVELS, ANY]},
    )
    group: str = Field(
        default=ANY,
        min_length=1,
        max_length=253,
        pattern=r"^(\*|[A-Za-z0-9]([-._A-Za-z0-9]*[A-Za-z0-9])?)$",
        description='A node class, or "*" for the sum over all classes',
    )
    nodes: int = Field(ge=0, le=100_000, description="Nodes at once; 0: none at all")
    expires_at: Annotated[Timestamp, Field(strict=False)] | None = Field(
        default=None,
        description="From then on this limit does not apply; a job that runs keeps its nodes",
    )


class QuotaUse(Model):
    """What one user holds under the limit."""

    user: str = Field(max_length=253, description="Who")
    nodes: int = Field(ge=0, description="Nodes held")
    jobs: int = Field(ge=0, description="Jobs that hold them")


class FlyerQuotaStatus(Model):
    """What is in use, as of the scheduler's latest change of it."""

    epoch: int = Field(
        default=0, ge=0, description="The fencing epoch of the leader that wrote this"
    )
    used_nodes: int = Field(default=0, ge=0, description="Nodes held under this limit")
    waiting_jobs: int = Field(default=0, ge=0, description="Jobs that wait for room in it")
    users: tuple[QuotaUse, ...] = Field(
        default=(),
        max_length=_USERS_MAX,
        description="Who holds them; the largest first, at most 1000",
        json_schema_extra=list_map("user"),
    )
    conditions: Conditions = ()
    observed_generation: int | None = Field(
        default=None, ge=0, description="The metadata.generation that this status is about"
    )

    model_config = ConfigDict(
        json_schema_extra=rules(
            Rule(
                "!has(self.epoch) || !has(oldSelf.epoch) || self.epoch >= oldSelf.epoch",
                "status.epoch: is lower than the one before: a newer leader exists, stop writing",
                says(
                    "status.epoch: %d is lower than %d: a newer leader exists, stop writing and "
                    "elect again",
                    "self.epoch",
                    "oldSelf.epoch",
                ),
                ".epoch",
            )
        )
    )


class FlyerQuota(StrictModel):
    """How many nodes a user may have at once, at a priority, in a node class."""

    api_version: Literal["fireflyer.dev/v1alpha1"] = API_VERSION
    kind: Literal["FlyerQuota"] = KIND_QUOTA
    metadata: ClusterMeta
    spec: FlyerQuotaSpec
    status: FlyerQuotaStatus | None = None


__all__ = ["ANY", "NODES_MAX", "FlyerQuota", "FlyerQuotaSpec", "FlyerQuotaStatus", "QuotaUse"]
