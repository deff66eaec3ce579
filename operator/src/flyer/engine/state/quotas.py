"""Quotas as values: limits, the subjects that they apply to, and what jobs hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flyer.api import Priority, QuotaScope, QuotaSubject

if TYPE_CHECKING:
    from flyer.api import FlyerQuota, FlyerQuotaSpec

ANY = "*"
# Narrow limits come first, in messages and in waiting: a job that exceeds its user's limit does
# not wait in the limit of a namespace, where it would delay the jobs of other users.
_WIDTH = {
    QuotaSubject.USER: 0,
    QuotaSubject.QUEUE: 1,
    QuotaSubject.NAMESPACE: 2,
    QuotaSubject.TEAM: 3,
}
_TOTAL_WIDTH = 4


@dataclass(frozen=True, slots=True)
class Subjects:
    """The subjects of one job, one name per kind. Empty: none, as a namespace without team."""

    user: str
    namespace: str = ""
    team: str = ""
    queue: str = ""

    def of(self, kind: QuotaSubject) -> str:
        """The name of the subject of this kind."""
        name: str = getattr(self, kind.value)
        return name


@dataclass(frozen=True, slots=True)
class Quota:
    """One limit. `subject` is a name, or `*` for each of the kind (with `total`: for all)."""

    name: str
    subject: str = ANY
    priority: str = ANY
    node_class: str = ANY
    nodes: int = 0
    expires_at: float | None = None
    kind: QuotaSubject = QuotaSubject.USER
    total: bool = False

    @classmethod
    def of(cls, quota: FlyerQuota) -> Quota:
        """The limit of a FlyerQuota."""
        return cls.from_spec(quota.metadata.name, quota.spec)

    @classmethod
    def from_spec(cls, name: str, spec: FlyerQuotaSpec) -> Quota:
        """The limit with this name and specification."""
        kind, subject = spec.subject
        return cls(
            name, subject, spec.priority, spec.node_class, spec.nodes, spec.expires_at, kind,
            spec.scope is QuotaScope.TOTAL,
        )  # fmt: skip

    @property
    def width(self) -> int:
        """Sort key: limits that fewer jobs share come first."""
        return _TOTAL_WIDTH if self.total else _WIDTH[self.kind]

    def concerns(self, subjects: Subjects) -> bool:
        """Whether the limit applies to jobs of these subjects."""
        name = subjects.of(self.kind)
        return name != "" and self.subject in (ANY, name)

    def applies(self, subjects: Subjects, priority: Priority, node_class: str | None) -> bool:
        """Whether the limit applies to such jobs. An undecided node class matches only `*`."""
        return (
            self.concerns(subjects)
            and self.priority in (ANY, priority.value)
            and self.node_class in (ANY, node_class)
        )

    def account(self, subjects: Subjects) -> tuple[str, str]:
        """The key under which nodes of these subjects count."""
        return self.name, "" if self.total else subjects.of(self.kind)

    def subject_name(self, subjects: Subjects) -> str:
        """The subject in a message."""
        if self.total:
            return f"all {self.kind.value}s"
        name = subjects.of(self.kind)
        return name if self.kind is QuotaSubject.USER else f"{self.kind.value} {name}"


@dataclass(frozen=True, slots=True)
class Holding:
    """The nodes that one job holds in quotas."""

    job: str
    subjects: Subjects
    priority: Priority
    node_class: str | None
    nodes: int


__all__ = ["ANY", "Holding", "Quota", "Subjects"]
