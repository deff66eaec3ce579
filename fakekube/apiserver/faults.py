"""Faults that the in-memory API server commits on request, and the record of every call.

Calls are counted as an API server counts them: one for each request that it answered, watches
apart. `agent` is the User-Agent, so that one caller's faults leave the others alone.
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
        """Whether it may have changed something. A token review stores nothing."""
        return self.verb in WRITES and self.resource != "tokenreviews"


@dataclass(slots=True)
class Fault:
    """What happens to the next `times` calls that match (empty fields match everything).

    With `every` n: to the first, the n+1st, the 2n+1st … of them. With `by_chance` too: to each
    with a chance of 1 in n, the same in each run. Else calls that come n at a time, as renewals of
    a Lease do, may keep in step with it, and whatever is called between them is hit each time.

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
    retry_after_seconds: int | None = None
    seconds: float = 0.0
    every: int = 1
    by_chance: bool = False
    watches: bool = True  # also to requests that open a watch
    seen: int = 0
    committed: int = 0
    _random: Random = field(default_factory=lambda: Random(0))

    def matches(self, call: Call) -> bool:
        """Whether it is meant for this call."""
        return (
            self.times > 0
            and (self.watches or call.verb != "watch")
            and self.verb in ("", call.verb)
            and self.resource in ("", call.resource)
            and self.name in ("", call.name)
            and call.agent.startswith(self.agent)
        )

    def hits(self) -> bool:
        """Whether it happens to this one of the calls that match."""
        before = self._random.randrange(self.every) if self.by_chance else self.seen % self.every
        self.seen += 1
        if before:
            return False
        self.times -= 1
        self.committed += 1
        return True


@dataclass(slots=True)
class Death:
    """An agent that dies with its n-th call that counts (`writes`: writes alone).

    The call is performed or not (`performed`), its answer never arrives, `then` runs, and nothing
    that the agent sends from then on is heard.
    """

    agent: str
    after: int
    then: Callable[[], None]
    performed: bool = True
    writes: bool = False
    ignore: str = ""  # a resource whose calls do not count
    seen: int = 0


@dataclass(slots=True)
class WatchFaults:
    """What happens to the events of watches, and how often it has."""

    double: bool = False
    delay_seconds: float = 0.0
    frozen: bool = False  # connected, silent, no bookmarks
    bookmarks: bool = True
    cut_after: int = 0  # events of each stream; 0: never. The proxy does it.
    doubled: int = 0
    delayed: int = 0
    cut: int = 0


@dataclass(slots=True)
class Faults:
    """All of them; also the record of calls."""

    calls: list[Call] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    deaths: list[Death] = field(default_factory=list)
    dead: set[str] = field(default_factory=set)
    watches: WatchFaults = field(default_factory=WatchFaults)

    def add(self, fault: Fault) -> Fault:
        """Commit this fault from now on."""
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
        """Let the agent die with its `after`-th call from now (1: the next)."""
        death = Death(agent, after, then, performed, writes, ignore)
        self.deaths.append(death)
        return death

    def clear(self) -> None:
        """No more faults; the dead stay dead."""
        self.faults.clear()
        self.deaths.clear()
        self.watches = WatchFaults()

    def take(self, call: Call) -> Fault | None:
        """The fault of this call, if it has one."""
        for fault in self.faults:
            if fault.matches(call) and fault.hits():
                return fault
        return None

    def dies(self, call: Call) -> Death | None:
        """Whether the agent dies with this call."""
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
