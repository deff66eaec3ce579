"""What the end of a pod means, from the sidecar's account or from the pod's status."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flyer.engine import Outcome

__all__ = ["outcome_of"]


def outcome_of(pod: Mapping[str, Any] | None) -> Outcome:
    """From a pod's JSON in a terminal phase; None: it is gone without a trace."""
    raise NotImplementedError
