"""Reader of the API server's audit log: author, object and server time of each write.

Each read returns only the new entries. Benchmarks count and time writes with it, so that no
additional client has to watch the measured objects.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

__all__ = ["OPERATOR", "PEER", "POLICY", "AuditLog", "Write", "by_kind", "parse"]

OPERATOR: Final = "flyer-operator"
PEER: Final = "kube-scheduler"

# Only writes, one entry each, without bodies.
POLICY: Final[dict[str, Any]] = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived", "ResponseStarted"],
    "rules": [{"level": "None", "verbs": ["get", "list", "watch"]}, {"level": "Metadata"}],
}
# Reviews are queries sent as a POST: nothing is stored.
_REVIEWS: Final = ("tokenreviews", "subjectaccessreviews", "serviceaccounts/token")


@dataclass(frozen=True, slots=True)
class Write:
    """One write that the API server answered. Times in seconds since the epoch."""

    client: str  # OPERATOR, PEER, or the program's own name
    verb: str
    kind: str  # resource, or resource/subresource
    namespace: str
    name: str
    code: int
    received_at: float
    done_at: float

    @property
    def stored(self) -> bool:
        """Whether it is an accepted write and not a review."""
        return self.code < 300 and self.kind not in _REVIEWS


def parse(line: str) -> Write:
    """From a line of the log."""
    event = json.loads(line)
    target = event.get("objectRef") or {}
    kind = target.get("resource", "")
    if target.get("subresource"):
        kind += f"/{target['subresource']}"
    user = event["user"].get("username", "")
    client = event.get("userAgent", "").partition("/")[0]
    if user.endswith(f":{OPERATOR}"):
        client = OPERATOR  # any of its clients
    return Write(
        client=client,
        verb=event["verb"],
        kind=kind,
        namespace=target.get("namespace", ""),
        name=target.get("name", ""),
        code=int((event.get("responseStatus") or {}).get("code", 0)),
        received_at=_seconds(event["requestReceivedTimestamp"]),
        done_at=_seconds(event["stageTimestamp"]),
    )


def by_kind(writes: Iterable[Write]) -> dict[str, int]:
    """How many of each verb and kind, the most frequent first."""
    counts: dict[str, int] = {}
    for write in writes:
        label = f"{write.client}: {write.verb} {write.kind}"
        counts[label] = counts.get(label, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


class AuditLog:
    """The file as it grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._rest = ""

    def skip(self) -> None:
        """Skip the existing entries."""
        self._offset = self._path.stat().st_size if self._path.exists() else 0
        self._rest = ""

    def read(self) -> list[Write]:
        """Return the entries added since the last read."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            added = file.read()
        self._offset += len(added)
        *lines, self._rest = (self._rest + added.decode()).split("\n")
        return [parse(line) for line in lines if line]


def _seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()
