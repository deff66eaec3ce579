"""Verdict about one run, from what its clients recorded. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from bench.chaos.faults import limits
from bench.chaos.gaps import Gaps, gaps
from bench.chaos.history import Record, by_object
from bench.chaos.linearizability import Check, Model, Operation, check
from bench.chaos.models import Block, Names
from bench.chaos.private import expected, lost
from bench.chaos.workload import (
    DIRECTORIES_PER_CELL,
    FINAL_WORKER,
    NAMES_PER_DIRECTORY,
    WORKERS_MAX,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bench.chaos.load import Disturbance

__all__ = ["Result", "judge", "measure"]


@dataclass(slots=True)
class Result:
    """What one run found."""

    seed: int
    faults: list[str] = field(default_factory=list)
    operations: int = 0
    acknowledged: int = 0
    """Changes and writes whose success was reported to a client."""
    unknown: int = 0
    objects: int = 0
    gaps: dict[str, Gaps] = field(default_factory=dict)
    undisturbed: dict[str, Gaps] = field(default_factory=dict)
    """Gaps before the first fault."""
    limits: dict[str, float] = field(default_factory=dict)
    too_long: list[str] = field(default_factory=list)
    """Gaps above their limit."""
    recovery_seconds: float = 0.0
    """From the end of the load until every service and replica served."""
    failures: list[str] = field(default_factory=list)
    load_average: float = 0.0
    stall_seconds: float = 0.0
    """Longest time in which the machine did not run the process that injects the faults."""

    def document(self) -> dict[str, Any]:
        """The result as JSON."""
        return asdict(self)


def judge(
    result: Result, records: Sequence[Record], private: Mapping[str, Mapping[str, int]],
    killed_clients: set[int],
) -> None:  # fmt: skip
    """Adds the counts, and everything that is lost or impossible.

    `private` is what each private directory contains after the run: the value of each file.
    """
    result.operations = len(records)
    for record in records:
        known = record.operation.result is not None
        result.unknown += not known
        succeeded = known and not isinstance(record.operation.result, str)
        result.acknowledged += record.kind in ("change", "write") and succeeded
        if not known and record.worker // WORKERS_MAX not in killed_clients:
            result.failures.append(f"worker {record.worker}: {record.error}")
    objects = by_object(records)
    result.objects = len(objects)
    for name, operations in objects.items():
        if operations[0].call[0] in ("put", "move", "drop"):
            differences = lost(expected(operations), private.get(name, {}))
            result.failures += [f"acknowledged and lost: {each}" for each in differences]
            continue
        checked = _check(name, operations)
        if not checked.linearizable:
            kind = "undecided" if checked.linearizable is None else "not linearizable"
            result.failures.append(f"{kind}: {name}\n{checked.detail}")


def _check(name: str, operations: list[Operation]) -> Check:
    if name.startswith("cell-"):
        names: Model[Any] = Names(DIRECTORIES_PER_CELL, NAMES_PER_DIRECTORY)
        return check(names, operations)
    block: Model[Any] = Block()
    return check(block, operations)


def measure(
    result: Result, records: Sequence[Record], happened: Disturbance, lease_seconds: float
) -> None:
    """Adds the gaps of the clients that were not killed, and those above a limit."""
    workers = {record.worker for record in records if record.worker < FINAL_WORKER}
    clients = {worker: worker // WORKERS_MAX for worker in workers}
    for worker in workers:
        if clients[worker] in happened.killed_clients:
            del clients[worker]
    result.stall_seconds = happened.stall_seconds
    first = min((at for _, _, at in happened.faults), default=happened.ended_ns)
    result.undisturbed = gaps(records, clients, happened.started_ns, first)
    result.gaps = gaps(records, clients, first, happened.ended_ns)
    for fault, name, _ in happened.faults:
        result.faults.append(f"{fault.action} {name}")
        for kind, seconds in limits(fault, lease_seconds).items():
            result.limits[kind] = max(result.limits.get(kind, 0.0), seconds)
    for kind, seconds in result.limits.items():
        gap = result.gaps.get(kind)
        if gap is not None and gap.one_client > seconds:
            result.too_long.append(f"{kind} {gap.one_client:.1f} s, limit {seconds:g} s")
