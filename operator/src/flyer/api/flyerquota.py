"""FlyerQuota v1alpha1: limit on the nodes that a subject holds, by priority and node class.

One object is one limit. Its subject is a user, a namespace, a team or a queue. With `scope: Each`,
`*` applies to each subject of that kind without a limit by name for the same priority and node
class; with `scope: Total` the limit applies to the sum over all of them. `priority: "*"` and
`nodeClass: "*"` limit the sum over all priorities and classes. An object that names no subject
limits each namespace, because the namespace is the only identity that every version of Kubernetes
guarantees.
Every limit that applies to a job must have room for all of its nodes before it gets any;
what a job holds counts until its nodes are empty. Where no limit applies there is none, so a
cluster without FlyerQuotas behaves as before; `nodes: 0` closes a priority or a class.
"""

# ruff: noqa: TC001 - pydantic resolves the annotations

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, JsonValue, model_validator

from flyer.api.base import Model, StrictModel
from flyer.api.conditions import Conditions
from flyer.api.metadata import ClusterMeta
from flyer.api.names import API_VERSION, KIND_QUOTA
from flyer.api.priorities import Priority
from flyer.api.rules import Rule, list_map, message_expression, rules
from flyer.api.timestamps import Timestamp

ANY = "*"
_SUBJECTS_MAX = 1_000
_LEVELS: list[JsonValue] = [level.value for level in Priority if level is not Priority.AUTO]
_EACH = (
    '"*" applies the limit to each one that no other quota names for this priority and node class, '
    "or with scope Total to the sum over all of them. At most one of user, namespace, team and "
    "queue may be set."
)


class QuotaSubject(StrEnum):
    """Kind of the subject of a limit: the name of the field that has its name."""

    USER = "user"
    NAMESPACE = "namespace"
    TEAM = "team"
    QUEUE = "queue"


class QuotaScope(StrEnum):
    """How a limit with the subject `*` is counted."""

    EACH = "Each"
    TOTAL = "Total"


class FlyerQuotaSpec(StrictModel):
    """Desired limit: the number of nodes per subject, priority and node class."""

    user: str = Field(
        default="",
        max_length=253,
        description="User whose jobs are limited: the value of the annotation fireflyer.dev/user. "
        f"Jobs without it, and jobs of service accounts, count for their namespace. {_EACH}",
    )
    namespace: str = Field(
        default="",
        max_length=63,
        description=f"Namespace whose jobs are limited, whichever user created them. {_EACH} If "
        'none of the four is set, the limit applies to namespace "*".',
    )
    team: str = Field(
        default="",
        max_length=63,
        description="Team whose jobs are limited: the value of the namespace label that "
        f"FlyerTopology spec.teamLabel names. {_EACH}",
    )
    queue: str = Field(
        default="",
        max_length=253,
        description="Queue whose jobs are limited: spec.queue of a job, or its queue label. "
        f"{_EACH}",
    )
    scope: Annotated[QuotaScope, Field(strict=False)] = Field(
        default=QuotaScope.EACH,
        description='How "*" is counted. Each: one limit for each subject. Total: one limit for '
        "the sum over all subjects, which other quotas never replace. Default: Each.",
    )
    priority: str = Field(
        default=ANY,
        max_length=16,
        description='Priority whose jobs are limited, or "*" for the sum over all priorities. A '
        "job with priority auto runs at the highest priority that a quota names and that has room. "
        'Default: "*".',
        json_schema_extra={"enum": [*_LEVELS, ANY]},
    )
    node_class: str = Field(
        default=ANY,
        min_length=1,
        max_length=63,
        pattern=r"^(\*|[A-Za-z0-9]([-._A-Za-z0-9]*[A-Za-z0-9])?)$",
        description='Node class whose nodes are limited, or "*" for the sum over all node classes. '
        'Default: "*".',
    )
    nodes: int = Field(
        ge=0,
        le=100_000,
        description="Maximum number of nodes held at the same time. 0 forbids all. Range: 0 to "
        "100000.",
    )
    expires_at: Annotated[Timestamp, Field(strict=False)] | None = Field(
        default=None,
        description="Time from which the limit does not apply. Running jobs keep their nodes. If "
        "absent, the limit does not expire.",
    )

    model_config = ConfigDict(
        json_schema_extra=rules(
            Rule(
                "[self.user, self.__namespace__, self.team, self.queue].filter(one, one != '')"
                ".size() <= 1",
                "spec: names more than one subject: set one of user, namespace, team and queue",
                "",
                ".user",
            ),
            Rule(
                "self.scope != 'Total' || "
                "[self.user, self.__namespace__, self.team, self.queue].all(one, one in ['', '*'])",
                'spec.scope: Total needs the subject "*": a limit by name is a total already',
                "",
                ".scope",
            ),
        )
    )

    @property
    def subject(self) -> tuple[QuotaSubject, str]:
        """Kind of the limited subject, and its name or `*`."""
        for kind in QuotaSubject:
            name: str = getattr(self, kind.value)
            if name:
                return kind, name
        return QuotaSubject.NAMESPACE, ANY

    @model_validator(mode="after")
    def _one_subject(self) -> Self:
        named = [kind.value for kind in QuotaSubject if getattr(self, kind.value)]
        if len(named) > 1:
            raise ValueError(f"{' and '.join(named)} are set: a limit has one subject, set one")
        if self.scope is QuotaScope.TOTAL and self.subject[1] != ANY:
            raise ValueError(
                f'scope Total needs {named[0]} "*": a limit by name is a total already'
            )
        return self


class QuotaUse(Model):
    """Usage of one subject under the limit."""

    name: str = Field(max_length=253, description="Name of the user, namespace, team or queue.")
    nodes: int = Field(ge=0, description="Number of nodes that it holds.")
    jobs: int = Field(ge=0, description="Number of jobs that hold the nodes.")


class FlyerQuotaStatus(Model):
    """Observed use of the limit. Only the scheduler writes it."""

    epoch: int = Field(
        default=0, ge=0, description="Fencing epoch of the leader that wrote this status."
    )
    used_nodes: int = Field(
        default=0, ge=0, description="Number of nodes that jobs hold under this limit."
    )
    waiting_jobs: int = Field(
        default=0, ge=0, description="Number of jobs that wait for room in this limit."
    )
    subjects: tuple[QuotaUse, ...] = Field(
        default=(),
        max_length=_SUBJECTS_MAX,
        description="What each subject holds, the largest first. At most 1000 subjects are listed.",
        json_schema_extra=list_map("name"),
    )
    conditions: Conditions = ()
    observed_generation: int | None = Field(
        default=None, ge=0, description="The metadata.generation that this status describes."
    )

    model_config = ConfigDict(
        json_schema_extra=rules(
            Rule(
                "!has(self.epoch) || !has(oldSelf.epoch) || self.epoch >= oldSelf.epoch",
                "status.epoch: is lower than the one before: a newer leader exists, stop writing",
                message_expression(
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
    """Limit on the number of nodes that a subject holds, by priority and node class."""

    api_version: Literal["fireflyer.dev/v1alpha1"] = API_VERSION
    kind: Literal["FlyerQuota"] = KIND_QUOTA
    metadata: ClusterMeta
    spec: FlyerQuotaSpec
    status: FlyerQuotaStatus | None = None


__all__ = [
    "ANY",
    "FlyerQuota",
    "FlyerQuotaSpec",
    "FlyerQuotaStatus",
    "QuotaScope",
    "QuotaSubject",
    "QuotaUse",
]
