"""Rates of all callers of a cluster, from one report of each service."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["KINDS", "Caller", "CallerRates", "Rates", "Service", "Sort", "Top", "top_of"]

KINDS = ("mgmtd", "meta", "storage")
OPERATION_BYTES = 4096
"""A call is about as much load as this number of bytes."""


@dataclass(slots=True)
class Rates:
    """Load per second."""

    operations: float = 0.0
    read_bytes: float = 0.0
    written_bytes: float = 0.0

    def add(self, other: Rates) -> None:
        """Add another load."""
        self.operations += other.operations
        self.read_bytes += other.read_bytes
        self.written_bytes += other.written_bytes


@dataclass(frozen=True, slots=True)
class Caller:
    """A volume on a node; a volume of None is a holder of the cluster's key at an address."""

    volume: int | None
    host: str


@dataclass(slots=True)
class CallerRates:
    """Load of one caller, or of several, by the kind of service."""

    path: str = ""
    kinds: dict[str, Rates] = field(default_factory=lambda: {kind: Rates() for kind in KINDS})

    def add(self, other: CallerRates) -> None:
        """Add another load."""
        for kind, rates in other.kinds.items():
            self.kinds[kind].add(rates)

    @property
    def operations(self) -> float:
        """Calls of all services."""
        return sum(rates.operations for rates in self.kinds.values())

    @property
    def data(self) -> Rates:
        """Load of storage services, whose bytes are those of files."""
        return self.kinds["storage"]


@dataclass(frozen=True, slots=True)
class Service:
    """A service and whether its load is known."""

    kind: str
    name: str
    address: str
    seconds: float | None
    """Length of the measurement; None if its rates are unknown."""
    trouble: str | None
    """Why it did not reply."""


@dataclass(slots=True)
class Top:
    """Load of a cluster."""

    callers: dict[Caller, CallerRates] = field(default_factory=dict)
    other: CallerRates = field(default_factory=CallerRates)
    """The callers that the services do not list: those with the least load."""
    services: list[Service] = field(default_factory=list)

    @property
    def total(self) -> CallerRates:
        """Load of all callers."""
        total = CallerRates()
        for rates in (*self.callers.values(), self.other):
            total.add(rates)
        return total


class Sort(StrEnum):
    """Order of the callers."""

    LOAD = "load"
    OPERATIONS = "operations"
    METADATA = "metadata"
    READ = "read"
    WRITE = "write"

    def sorted(self, callers: dict[Caller, CallerRates]) -> list[tuple[Caller, CallerRates]]:
        """The callers, the most load first."""
        key = _KEYS[self]
        return sorted(callers.items(), key=lambda it: (-key(it[1]), it[1].path, it[0].host))


def _load(rates: CallerRates) -> float:
    bytes_per_second = rates.data.read_bytes + rates.data.written_bytes
    return rates.operations * OPERATION_BYTES + bytes_per_second


_KEYS: dict[Sort, Callable[[CallerRates], float]] = {
    Sort.LOAD: _load,
    Sort.OPERATIONS: lambda rates: rates.operations,
    Sort.METADATA: lambda rates: rates.kinds["meta"].operations,
    Sort.READ: lambda rates: rates.data.read_bytes,
    Sort.WRITE: lambda rates: rates.data.written_bytes,
}


def top_of(reports: Iterable[dict[str, Any]]) -> Top:
    """The load of a cluster; a report is what `Client.usage` returns of one service."""
    top = Top()
    for report in reports:
        kind, elapsed_ms = report["kind"], report["elapsed_ms"]
        seconds = None if elapsed_ms is None else max(elapsed_ms, 1) / 1000
        top.services.append(
            Service(kind, report["name"], report["address"], seconds, report["trouble"])
        )
        if seconds is None:
            continue
        for load in report["callers"]:
            rates = top.callers.setdefault(Caller(load["volume"], load["host"]), CallerRates())
            # A volume that was renamed has one row, with one of its paths.
            rates.path = rates.path or load["path"]
            rates.kinds[kind].add(_per_second(load, seconds))
        top.other.kinds[kind].add(_per_second(report["other"], seconds))
    return top


def _per_second(load: dict[str, Any], seconds: float) -> Rates:
    return Rates(
        load["operations"] / seconds,
        load["read_bytes"] / seconds,
        load["written_bytes"] / seconds,
    )
