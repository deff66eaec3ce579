"""Fault injection of the in-memory API server, and the record of all calls.

Calls are counted as by an API server: one for each answered request, without watches. `agent` is
the User-Agent, so that faults can be limited to one client.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable

WRITES = frozenset({"create", "update", "patch", "delete", "deletecollection"})


@dataclass(frozen=True, slots=True)
class Call:
    """One request: verb, resource ("pods", "pods/binding", "flyerjobs/status"), and its answer."""

    agent: str
    verb: str
    resource: str
    namespace: str
    name: str
    status: int = 0

    @property
    def writes(self) -> bool:
        """Whether it may have changed an object. A token review stores nothing."""
        return self.verb in WRITES and self.resource != "tokenreviews"


@dataclass(slots=True)
class Fault:
    """A fault of the next `times` calls that match (empty fields match everything).

    With `every` n, it hits the first, the n+1st, the 2n+1st … matching call. With `by_chance` it
    hits each with a probability of 1/n, the same calls in each run. Otherwise calls that come n at
    a time, such as renewals of a Lease, could stay in step with it, so that the same call is always
    hit.

    refuse: answered with `code`. hang: never answered. drop: the connection is cut before the
    call is performed. lose: the call is performed, and the connection cut before the answer.
    delay: answered after `seconds`.
    """

    do: Literal["refuse", "hang", "drop", "lose", "delay"]
    verb: str = ""
    resource: str = ""
    name: str = ""
    agent: str = ""
    times: int = 1
    code: int = 500
    reason: str = "InternalError"
    message: str = "injected"
    retry_after_seconds: int | None = None
    seconds: float = 0.0
    every: int = 1
    by_chance: bool = False
    watches: bool = True  # also hits requests that open a watch
    seen: int = 0
    committed: int = 0
    _random: Random = field(default_factory=lambda: Random(0))

    def matches(self, call: Call) -> bool:
        """Whether it matches this call."""
        return (
            self.times > 0
            and (self.watches or call.verb != "watch")
            and self.verb in ("", call.verb)
            and self.resource in ("", call.resource)
            and self.name in ("", call.name)
            and call.agent.startswith(self.agent)
        )

    def hits(self) -> bool:
        """Whether it hits this one of the matching calls."""
        before = self._random.randrange(self.every) if self.by_chance else self.seen % self.every
        self.seen += 1
        if before:
            return False
        self.times -= 1
        self.committed += 1
        return True


@dataclass(slots=True)
class Death:
    """Death of an agent at its n-th counted call (`writes`: only writes count).

    The call is performed or not (`performed`) and never answered, `then` is called, and later
    requests of the agent are ignored.
    """

    agent: str
    after: int
    then: Callable[[], None]
    performed: bool = True
    writes: bool = False
    ignore: str = ""  # resource whose calls are not counted
    seen: int = 0


@dataclass(slots=True)
class WatchFaults:
    """Faults of watch events, with counters."""

    double: bool = False
    delay_seconds: float = 0.0
    frozen: bool = False  # connected, silent, no bookmarks
    bookmarks: bool = True
    cut_after: int = 0  # events of each stream; 0: never. Only the proxy implements it.
    doubled: int = 0
    delayed: int = 0
    cut: int = 0


@dataclass(slots=True)
class Faults:
    """All faults, and the record of calls."""

    calls: list[Call] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    deaths: list[Death] = field(default_factory=list)
    dead: set[str] = field(default_factory=set)
    watches: WatchFaults = field(default_factory=WatchFaults)

    def add(self, fault: Fault) -> Fault:
        """Add a fault."""
        self.faults.append(fault)
        return fault

    def kill(
        self,
        agent: str,
        then: Callable[[], None],
        *,
        after: int,
        performed: bool = True,
        writes: bool = False,
        ignore: str = "",
    ) -> Death:
        """Let the agent die at its `after`-th call from now (1: the next)."""
        death = Death(agent, after, then, performed, writes, ignore)
        self.deaths.append(death)
        return death

    def clear(self) -> None:
        """Remove all faults; dead agents stay dead."""
        self.faults.clear()
        self.deaths.clear()
        self.watches = WatchFaults()

    def take(self, call: Call) -> Fault | None:
        """The fault that hits this call, if any."""
        for fault in self.faults:
            if fault.matches(call) and fault.hits():
                return fault
        return None

    def dies(self, call: Call) -> Death | None:
        """Whether the agent dies at this call."""
        for death in self.deaths:
            counts = (call.writes or not death.writes) and call.resource != death.ignore
            if death.agent == call.agent and counts:
                death.seen += 1
                if death.seen == death.after:
                    self.dead.add(call.agent)
                    return death
        return None

    def writes(self, agent: str = "", since: int = 0) -> list[Call]:
        """The writes of an agent, from the n-th recorded call on."""
        return [call for call in self.calls[since:] if call.writes and call.agent.startswith(agent)]


__all__ = ["WRITES", "Call", "Death", "Fault", "Faults", "WatchFaults"]
