"""Preemption limits of the administrator: FlyerTopology `spec.limits`.

A value of a job above its limit is reduced, not refused, because limits may be lowered while jobs
run. Without a FlyerTopology the defaults apply, so that every job can be preempted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flyer.api import Duration, PreemptionLimits

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flyer.api import FlyerJobSpec, Priority

_DEFAULTS = PreemptionLimits()
# Checkpoint interval of a job that does not declare one.
_INTERVAL_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class PriorityCaps:
    """Lower limits for one priority; None: the general limit."""

    priority: str
    checkpoint_grace_seconds: float | None = None
    max_checkpoint_grace_seconds: float | None = None
    min_runtime_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class PreemptionTerms:
    """How one job may be preempted, in seconds, within the limits."""

    checkpoint_grace_period: float
    max_checkpoint_grace_period: float
    min_runtime: float
    interval: float


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits in seconds."""

    checkpoint_grace_seconds: float = _DEFAULTS.checkpoint_grace_period.seconds
    max_checkpoint_grace_seconds: float = _DEFAULTS.max_checkpoint_grace_period.seconds
    min_runtime_seconds: float = _DEFAULTS.min_runtime.seconds
    interval_seconds: float = _DEFAULTS.checkpoint_interval.seconds
    priorities: tuple[PriorityCaps, ...] = ()

    @classmethod
    def of(cls, limits: PreemptionLimits) -> Limits:
        """The limits of a FlyerTopology."""
        return cls(
            limits.checkpoint_grace_period.seconds,
            limits.max_checkpoint_grace_period.seconds,
            limits.min_runtime.seconds,
            limits.checkpoint_interval.seconds,
            tuple(
                PriorityCaps(
                    priority.priority.value,
                    priority.checkpoint_grace_period.seconds
                    if priority.checkpoint_grace_period
                    else None,
                    priority.max_checkpoint_grace_period.seconds
                    if priority.max_checkpoint_grace_period
                    else None,
                    priority.min_runtime.seconds if priority.min_runtime is not None else None,
                )
                for priority in limits.priorities
            ),
        )

    def terms(self, spec: FlyerJobSpec, priority: Priority) -> PreemptionTerms:
        """The terms of a job at this priority: its own values within the limits."""
        preemption, own = spec.preemption, self._own(priority)
        grace = _least(
            preemption.checkpoint_grace_period.seconds,
            self.checkpoint_grace_seconds,
            own.checkpoint_grace_seconds,
        )
        longest = _least(
            preemption.max_checkpoint_grace_period.seconds,
            self.max_checkpoint_grace_seconds,
            own.max_checkpoint_grace_seconds,
        )
        saves = spec.checkpoint.interval.seconds if spec.checkpoint else _INTERVAL_SECONDS
        return PreemptionTerms(
            grace,
            max(grace, longest),
            _least(
                preemption.min_runtime.seconds, self.min_runtime_seconds, own.min_runtime_seconds
            ),
            min(saves, self.interval_seconds),
        )

    def clamped(self, spec: FlyerJobSpec, priority: Priority) -> str:
        """Message about values that the limits reduce; empty: none."""
        return ", ".join(self._clamped(spec, priority))

    def _clamped(self, spec: FlyerJobSpec, priority: Priority) -> Iterator[str]:
        preemption, terms = spec.preemption, self.terms(spec, priority)
        for name, requested, seconds in (
            (
                "checkpointGracePeriod",
                preemption.checkpoint_grace_period,
                terms.checkpoint_grace_period,
            ),
            (
                "maxCheckpointGracePeriod",
                preemption.max_checkpoint_grace_period,
                terms.max_checkpoint_grace_period,
            ),
            ("minRuntime", preemption.min_runtime, terms.min_runtime),
        ):
            if seconds < requested.seconds:
                cap = Duration.of_seconds(seconds)
                yield f"spec.preemption.{name}: {requested} is capped to {cap}"

    def _own(self, priority: Priority) -> PriorityCaps:
        matches = (entry for entry in self.priorities if entry.priority == priority.value)
        return next(matches, PriorityCaps(priority.value))


DEFAULT_LIMITS = Limits()


def _least(requested: float, cap: float, own: float | None) -> float:
    return min(requested, cap) if own is None else min(requested, cap, own)


__all__ = ["DEFAULT_LIMITS", "Limits", "PreemptionTerms", "PriorityCaps"]
