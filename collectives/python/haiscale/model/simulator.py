"""Event simulator: executes the action lists of ranks whose transfers share the cards of nodes.

    outcome = run(programs, nodes=[0, 0, 1, 1], sharing=Sharing.TURNS)
    outcome.seconds

Deterministic: events at the same time are handled in the order in which they were scheduled.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from haiscale.model.actions import Compute, Receive, Send, Start
from haiscale.model.cards import Card, Sharing, Transfer, card

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from haiscale.model.actions import Action, Collective

__all__ = ["DeadlockError", "Outcome", "Simulation", "Span", "run"]


class DeadlockError(Exception):
    """Ranks wait for each other, or for what no rank sends.

    `waiting` has what each of them waits for.
    """

    def __init__(self, waiting: Mapping[int, str], seconds: float) -> None:
        shown = [f"rank {rank} waits for {what}" for rank, what in list(waiting.items())[:8]]
        more = f", and {len(waiting) - 8} more" if len(waiting) > 8 else ""
        super().__init__(
            f"deadlock after {seconds:g} s: {'; '.join(shown)}{more}: every message needs one Send "
            "before its Receive in an order that all ranks can execute"
        )
        self.waiting = dict(waiting)
        self.seconds = seconds


class Span(NamedTuple):
    """A computation in a trace."""

    rank: int
    name: Hashable
    start: float
    end: float


@dataclass(slots=True)
class Outcome:
    """Result of a simulation."""

    ended: dict[int, float] = field(default_factory=dict)
    """Time at which each rank has executed its list."""
    failed: dict[int, tuple[float, int]] = field(default_factory=dict)
    """For each rank that failed because another one was lost: when, and which one."""
    computed: dict[int, float] = field(default_factory=dict)
    """Time that each rank computed."""
    sent: dict[int, float] = field(default_factory=dict)
    """Time that the transfers of each node take with the whole card."""
    spans: list[Span] = field(default_factory=list)
    """Every computation, if the simulation was traced."""

    @property
    def seconds(self) -> float:
        """Time at which the last rank has executed its list."""
        return max(self.ended.values(), default=0.0)


def run(
    programs: Sequence[Sequence[Action]],
    nodes: Sequence[int],
    *,
    sharing: Sharing = Sharing.TURNS,
    collectives: Mapping[Hashable, Collective] | None = None,
    trace: bool = False,
) -> Outcome:
    """Executes the list of each rank.

    Args:
        programs: The actions of each rank.
        nodes: The node of each rank.
        sharing: How the transfers of a node share its card.
        collectives: The collectives that actions name.
        trace: Whether to record every computation.

    Raises:
        DeadlockError: Ranks wait forever.
        ValueError: An action is invalid: a time below 0, an unknown rank or collective, a message
            that is sent twice, a collective that is started by another rank than its own.
    """
    return Simulation(programs, nodes, sharing, collectives or {}, trace=trace).run()


@dataclass(slots=True)
class _Rank:
    """State of a rank."""

    at: int = 0
    """Index of its next action."""
    waits: Hashable = None
    """What it waits for; None while it computes or has ended."""
    computes_until: float = 0.0
    is_up: bool = True
    """False once it has ended, failed or is lost."""


class Simulation:
    """A simulation; `failures.FaultySimulation` adds faults."""

    def __init__(
        self,
        programs: Sequence[Sequence[Action]],
        nodes: Sequence[int],
        sharing: Sharing,
        collectives: Mapping[Hashable, Collective],
        *,
        trace: bool = False,
    ) -> None:
        if len(programs) != len(nodes):
            raise ValueError(
                f"{len(programs)} programs and {len(nodes)} nodes: expected one node for each rank"
            )
        self.programs = programs
        self.nodes = nodes
        self.collectives = collectives
        self.outcome = Outcome()
        self.now = 0.0
        self.ranks = [_Rank() for _ in programs]
        self._trace = trace
        self._events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._count = 0
        self._runnable: deque[int] = deque(range(len(programs)))
        self._cards: dict[int, Card] = {node: card(sharing) for node in dict.fromkeys(nodes)}
        self._card_versions = dict.fromkeys(self._cards, 0)
        self._sent: set[Hashable] = set()
        self._arrived: set[Hashable] = set()
        self._started: dict[Hashable, set[int]] = {}
        self._transfers_left: dict[Hashable, int] = {}

    def run(self) -> Outcome:
        """Executes all lists."""
        self._execute_runnable()
        while self._events:
            self.now, _, handler, arguments = heapq.heappop(self._events)
            handler(*arguments)
            self._execute_runnable()
        waiting = {n: self._shown(n) for n, rank in enumerate(self.ranks) if rank.is_up}
        if waiting:
            raise DeadlockError(waiting, self.now)
        return self.outcome

    def at(self, time: float, handler: Callable[..., None], *arguments: object) -> None:
        """Schedules an event."""
        self._count += 1
        heapq.heappush(self._events, (time, self._count, handler, arguments))

    def drop_transfers(self, rank: int) -> None:
        """Removes the transfers of a rank from its card."""
        node = self.nodes[rank]
        self._cards[node].drop(self.now, rank)
        self._watch(node)

    def _execute_runnable(self) -> None:
        while self._runnable:
            number = self._runnable.popleft()
            if self.ranks[number].is_up:
                self._execute(number)

    def _execute(self, number: int) -> None:
        """Executes the actions of a rank until it computes, waits or has ended."""
        rank, program = self.ranks[number], self.programs[number]
        while rank.at < len(program):
            action = program[rank.at]
            rank.at += 1
            if isinstance(action, Compute):
                self._compute(number, action)
                return
            if isinstance(action, Send):
                key = (number, action.to, action.name)
                self._send(number, action, key)
                waits_for: Hashable = key if action.blocking else None
            elif isinstance(action, Receive):
                waits_for = (action.source, number, action.name)
            elif isinstance(action, Start):
                self._start(number, action.collective)
                waits_for = None
            else:
                self._collective(number, action.collective)
                waits_for = _ended(action.collective)
            if waits_for is not None and waits_for not in self._arrived:
                rank.waits = waits_for
                return
        rank.is_up = False
        self.outcome.ended[number] = self.now

    def _compute(self, number: int, action: Compute) -> None:
        if not action.seconds >= 0:
            raise ValueError(f"rank {number}: invalid time of {action}: expected at least 0")
        end = self.now + action.seconds
        outcome = self.outcome
        outcome.computed[number] = outcome.computed.get(number, 0.0) + action.seconds
        if self._trace:
            outcome.spans.append(Span(number, action.name, self.now, end))
        self.ranks[number].computes_until = end
        self.at(end, self._computed, number)

    def _computed(self, number: int) -> None:
        until = self.ranks[number].computes_until
        if until > self.now:  # delayed by a fault
            self.at(until, self._computed, number)
        else:
            self._runnable.append(number)

    def _send(self, number: int, action: Send, key: Hashable) -> None:
        if not 0 <= action.to < len(self.nodes):
            raise ValueError(f"rank {number}: unknown rank {action.to} in {action}")
        if key in self._sent:
            raise ValueError(f"rank {number}: {action} is sent twice: give messages other names")
        self._sent.add(key)
        here = self.nodes[number]
        if here == self.nodes[action.to]:
            self.at(self.now + action.seconds, self._arrive, key)
        else:
            ends = partial(self._arrive, key)
            self._add(here, Transfer(number, action.seconds, (action.kind, 0), ends))

    def _start(self, number: int, name: Hashable) -> None:
        collective = self._collective(number, name)
        started = self._started.setdefault(name, set())
        if number not in collective.ranks or number in started:
            raise ValueError(
                f"rank {number}: cannot start collective {name!r} of ranks {collective.ranks}: "
                "each of them starts it once"
            )
        started.add(number)
        if len(started) < len(collective.ranks):
            return
        if not collective.on_card:
            self.at(self.now + collective.seconds, self._arrive, _ended(name))
            return
        nodes = dict.fromkeys(self.nodes[rank] for rank in collective.ranks)
        self._transfers_left[name] = len(nodes)
        for node in nodes:
            urgency = (collective.kind, collective.level)
            ends = partial(self._part_ended, name)
            self._add(node, Transfer(-1, collective.seconds, urgency, ends))

    def _collective(self, number: int, name: Hashable) -> Collective:
        if name not in self.collectives:
            raise ValueError(f"rank {number}: unknown collective {name!r}")
        return self.collectives[name]

    def _part_ended(self, name: Hashable) -> None:
        self._transfers_left[name] -= 1
        if self._transfers_left[name] == 0:
            self._arrive(_ended(name))

    def _add(self, node: int, transfer: Transfer) -> None:
        if not transfer.seconds >= 0:
            raise ValueError(f"invalid time {transfer.seconds} of a transfer: expected at least 0")
        self.outcome.sent[node] = self.outcome.sent.get(node, 0.0) + transfer.seconds
        self._cards[node].add(self.now, transfer)
        self._watch(node)

    def _watch(self, node: int) -> None:
        """Schedules the end of a card's next transfer, in place of the event scheduled before."""
        self._card_versions[node] += 1
        end = self._cards[node].next_end()
        if end < inf:
            self.at(end, self._transferred, node, self._card_versions[node])

    def _transferred(self, node: int, version: int) -> None:
        if version != self._card_versions[node]:
            return
        transfer = self._cards[node].take(self.now)
        self._watch(node)
        transfer.ends()

    def _arrive(self, key: Hashable) -> None:
        """A message has arrived, or a collective has ended."""
        self._arrived.add(key)
        for number in self._waiting_for(key):
            rank = self.ranks[number]
            if rank.waits == key:
                rank.waits = None
                self._runnable.append(number)

    def _waiting_for(self, key: Hashable) -> Sequence[int]:
        """Ranks that may wait for this."""
        if isinstance(key, tuple) and key[0] == _ENDED:
            return self.collectives[key[1]].ranks
        assert isinstance(key, tuple)  # (source, destination, name)
        return (key[1], key[0])

    def _shown(self, number: int) -> str:
        """What a rank waits for, for people."""
        key = self.ranks[number].waits
        assert isinstance(key, tuple)  # only waiting ranks remain when no event is left
        if key[0] == _ENDED:
            collective = self.collectives[key[1]]
            missing = sorted(set(collective.ranks) - self._started.get(key[1], set()))
            return f"collective {key[1]!r}, which ranks {missing} have not started"
        source, to, name = key
        if to == number:
            return f"message {name!r} from rank {source}"
        return f"rank {to} to take message {name!r}"


_ENDED = "ended"


def _ended(collective: Hashable) -> Hashable:
    return (_ENDED, collective)
