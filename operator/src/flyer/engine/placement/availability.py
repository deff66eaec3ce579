"""Node availability: which nodes a job can get now, which by preemption, and when the others."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from flyer.engine import scheduling_policy
from flyer.engine.placement import node_selection
from flyer.engine.placement.node_selection import PlacementHistory, by_zone, node_requirements
from flyer.engine.state.jobs import ACTIVE, RESERVING, JobState
from flyer.engine.state.nodes import Node, natural_order

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from flyer.engine.state.cycle_state import CycleState


# Time at which a node is available, and its name.
AvailableAt = tuple[float, str]
# Number of jobs whose failed starts make a node suspect.
_SUSPECT_JOBS = 2


@dataclass(frozen=True, slots=True)
class Supply:
    """The nodes that satisfy certain requirements, counted, and the jobs that have them."""

    usable: frozenset[str]
    zones: tuple[str, ...]
    free: Mapping[str, int]  # open nodes by zone
    places: Mapping[tuple[str, str], int]  # open nodes by class and zone
    held: tuple[tuple[str, int], ...]  # jobs with the number of nodes of each, the largest first
    out: tuple[str, ...]  # nodes that are not eligible

    @property
    def sizes(self) -> str:
        """The free nodes of each zone, for messages."""
        return ", ".join(f"{self.free.get(zone, 0)} in {zone}" for zone in self.zones)


@dataclass(slots=True)
class NodeAvailability:
    """Availability of nodes within a scheduling pass; `reserved` and `refresh` update it."""

    cycle: CycleState
    reserved_by: dict[str, str] = field(init=False)
    occupied_by: dict[str, str] = field(init=False)

    _eligible: set[str] = field(init=False)
    _open: set[str] = field(init=False)
    _suspects: frozenset[str] = field(init=False)
    _holders: tuple[list[str], list[str]] | None = field(init=False)
    _classes: dict[tuple[str | None, str | None, int], list[list[Node]]] = field(init=False)
    _inventory: Counter[tuple[str, str, int]] | None = field(init=False)
    _positions: dict[str, int] | None = field(init=False)
    _supplies: dict[tuple[str | None, str | None, int], Supply] = field(init=False)
    _protections: dict[str, scheduling_policy.Protection] = field(init=False)
    _costs: dict[str, int] = field(init=False)
    _freed: dict[str, list[Node]] = field(init=False)
    _backfilled: bool = field(init=False)
    _victims: dict[tuple[object, ...], tuple[tuple[str, ...], float]] = field(init=False)
    _most: dict[tuple[object, ...], int] = field(init=False)
    _times: dict[tuple[object, ...], dict[tuple[str, ...], list[AvailableAt]]] = field(init=False)

    def __post_init__(self) -> None:
        self._classes = {}
        self._inventory = None
        self._positions = None
        self._suspects = self._suspected()
        self._eligible = {name for name, state in self.cycle.nodes.items() if state.eligible}
        self.refresh()

    def refresh(self) -> None:
        """Recompute everything after a preemption."""
        self.reserved_by = self.cycle.reserved_by()
        self.occupied_by = self.cycle.occupied_by()
        taken_names = self.reserved_by.keys() | self.occupied_by.keys()
        self._open = self._eligible - taken_names
        self._open |= {name for name in self._eligible & taken_names if self._is_open(name)}
        self._holders = None
        self._protections = {}
        self._costs = {}
        self._backfilled = any(
            job.status.assignment is not None and job.status.assignment.backfill
            for job in self.cycle.active_jobs().values()
        )
        self._count_again()

    def _count_again(self) -> None:
        """Drop all counts after a change of the nodes' holders."""
        self._supplies = {}
        self._freed = {}
        self._victims = {}
        self._most = {}
        self._times = {}

    def reserved(self, key: str) -> None:
        """Record that the job reserved unreserved nodes."""
        assignment = self.cycle.jobs[key].status.assignment
        assert assignment is not None, f"{key}: reserved without nodes"
        names = assignment.names
        self.reserved_by |= dict.fromkeys(names, key)
        self._open.difference_update(names)
        self._backfilled = self._backfilled or assignment.backfill
        self._count_again()
        if len(assignment.zones) > 1:
            self._holders = None

    def classes(self, job: JobState) -> list[list[Node]]:
        """The usable nodes, ready or not, by node class: a gang never mixes them."""
        key = node_requirements(job)
        if key not in self._classes:
            by_class: dict[str, list[Node]] = {}
            for node in self.cycle.usable_nodes(job):
                by_class.setdefault(node.node_class, []).append(node)
            self._classes[key] = [by_class[name] for name in sorted(by_class)]
        return self._classes[key]

    @property
    def inventory(self) -> Counter[tuple[str, str, int]]:
        """Number of nodes, ready or not, by class, zone and slots."""
        if self._inventory is None:
            nodes = self.cycle.known_nodes()
            self._inventory = Counter(
                (entry.node_class, entry.zone, entry.slots) for entry in nodes
            )
        return self._inventory

    def supply(self, job: JobState) -> Supply:
        """The usable nodes of `classes`, counted."""
        key = node_requirements(job)
        if key not in self._supplies:
            self._supplies[key] = self._count(
                [node for nodes in self.classes(job) for node in nodes]
            )
        return self._supplies[key]

    def _count(self, nodes: Sequence[Node]) -> Supply:
        owners = (
            self.reserved_by.get(node.name) or self.occupied_by.get(node.name) for node in nodes
        )
        counts = Counter(owner for owner in owners if owner is not None)
        free = self.open_of(nodes)
        return Supply(
            frozenset(node.name for node in nodes),
            tuple(sorted({node.zone for node in nodes})),
            Counter(node.zone for node in free),
            Counter((node.node_class, node.zone) for node in free),
            tuple(sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))),
            tuple(node.name for node in nodes if node.name not in self._eligible),
        )

    def is_open(self, node: Node) -> bool:
        """Whether a job may reserve the node now: healthy, unreserved, and empty or being left.

        A node that its holder cannot be made to leave is not waited for.
        """
        return node.name in self._open

    def open_of(self, nodes: Sequence[Node]) -> list[Node]:
        """Those of the nodes that are open."""
        names = self._open
        return [node for node in nodes if node.name in names]

    def _is_open(self, name: str) -> bool:
        return name not in self.reserved_by and self._may_be_had(name)

    def _may_be_had(self, name: str) -> bool:
        if name not in self._eligible:
            return False
        holder = self.occupied_by.get(name)
        return holder is None or not self.cycle.has_left(self.cycle.jobs[holder], name)

    def freed_by(self, victim: JobState, nodes: Collection[str]) -> list[Node]:
        """The nodes among `nodes` that become available if the victim is preempted."""
        if victim.key not in self._freed:
            self._freed[victim.key] = self._freed_by(victim)
        return [node for node in self._freed[victim.key] if node.name in nodes]

    def _freed_by(self, victim: JobState) -> list[Node]:
        assignment = victim.status.assignment
        assert assignment is not None, f"{victim.key}: a victim without nodes"
        active = victim.status.phase in ACTIVE
        freed = [
            self.cycle.nodes[name].node
            for name in assignment.names
            if name in self.cycle.nodes
            and self.reserved_by.get(name) == victim.key
            and (active or self._may_be_had(name))
            and name in self._eligible
        ]
        freed.sort(key=self._position)
        return freed

    def _position(self, node: Node) -> int:
        """Index of the node in natural order."""
        if self._positions is None:
            names = sorted(self.cycle.nodes, key=natural_order)
            self._positions = {name: index for index, name in enumerate(names)}
        return self._positions[node.name]

    def reserving_jobs(self) -> list[str]:
        """The jobs that have nodes reserved, sorted by key."""
        return sorted(set(self.reserved_by.values()))

    def is_empty(self, node: Node) -> bool:
        """Whether no job has processes there."""
        return node.name not in self.occupied_by

    def token_holders(self, job: JobState) -> tuple[list[str], list[str]]:
        """Other holders of the cross-zone token: jobs that keep it, and jobs that are leaving."""
        if self._holders is None:
            self._holders = self._token_holders()
        keeping, leaving = self._holders
        return [key for key in keeping if key != job.key], [
            key for key in leaving if key != job.key
        ]

    def _token_holders(self) -> tuple[list[str], list[str]]:
        keeping, leaving = [], []
        having = (
            key
            for key, job in self.cycle.active_jobs().items()
            if job.status.occupied or job.status.phase in RESERVING
        )
        for key in sorted(having):
            other = self.cycle.jobs[key]
            if self.cycle.needs_token(other):
                keeping.append(key)
            elif self.cycle.crosses_zones(other):
                leaving.append(key)
        return keeping, leaving

    def victims(self, job: JobState) -> tuple[tuple[str, ...], float]:
        """The jobs that this one may preempt now, sorted, and when it may preempt another one."""
        preemptor = self._preemptor_key(job)
        if preemptor not in self._victims:
            keys, next_at = [], math.inf
            for key in self.reserving_jobs():
                at = self.preemptible_at(job, self.cycle.jobs[key])
                if at <= self.cycle.now:
                    keys.append(key)
                else:
                    next_at = min(next_at, at)
            self._victims[preemptor] = tuple(keys), next_at
        return self._victims[preemptor]

    def largest_gang(self, job: JobState) -> int:
        """Upper bound of the size of a gang with the job's requirements that could be placed now.

        It lies in one zone, or in two if it may cross, on nodes of one class.
        """
        keys, next_at = self.victims(job)
        self.cycle.wake(next_at)
        crosses = self.cycle.may_cross(job)
        requirements = (*node_requirements(job), crosses, *self._preemptor_key(job))
        if requirements not in self._most:
            supply = self.supply(job)
            places = Counter(supply.places)
            for key in keys:
                freed = self.freed_by(self.cycle.jobs[key], supply.usable)
                places.update((node.node_class, node.zone) for node in freed)
            by_class: dict[str, list[int]] = {}
            for (node_class, _), count in places.items():
                by_class.setdefault(node_class, []).append(count)
            sizes = [sorted(counts, reverse=True) for counts in by_class.values()]
            self._most[requirements] = max((sum(size[: 1 + crosses]) for size in sizes), default=0)
        return self._most[requirements]

    def _preemptor_key(self, job: JobState) -> tuple[object, ...]:
        """The properties of a waiting job that decide which jobs it may preempt, and when."""
        # A job started by backfill can be preempted by any job ahead of it, so each is different.
        own = job.key if self._backfilled else ""
        return self.cycle.level(job), scheduling_policy.is_crash_looping(self.cycle, job), own

    def preemptible_at(self, job: JobState, victim: JobState) -> float:
        """From when on the job may preempt the victim; infinite: never in the current state."""
        assignment, phase = victim.status.assignment, victim.status.phase
        if victim.key == job.key or phase not in RESERVING or assignment is None:
            return math.inf
        if victim.key not in self._protections:
            self._protections[victim.key] = scheduling_policy.protection(self.cycle, victim)
        return scheduling_policy.preemptible_at(
            self.cycle, job, victim, self._protections[victim.key]
        )

    def cost_node_ms(self, victim: JobState) -> int:
        """The cost of preempting the victim."""
        if victim.key not in self._costs:
            self._costs[victim.key] = scheduling_policy.preemption_cost_node_ms(self.cycle, victim)
        return self._costs[victim.key]

    def placement_history(self, job: JobState) -> PlacementHistory:
        """Placement history of the job, with suspect nodes added to those that it avoids."""
        history = node_selection.placement_history(job)
        if not self._suspects:
            return history
        return replace(history, avoid=history.avoid | self._suspects)

    def _suspected(self) -> frozenset[str]:
        """Nodes on which jobs of two users, or two jobs of the only user, failed to start.

        A failure may be caused by the job, so one user's jobs must not make others avoid nodes.
        """
        since = self.cycle.now - self.cycle.settings.suspect_seconds
        suspects: dict[str, list[str]] = {}
        for name, state in self.cycle.nodes.items():
            users = [user for _, user, time in state.start_failures if time >= since]
            if len(users) >= _SUSPECT_JOBS:
                suspects[name] = users
        if not suspects:
            return frozenset()
        active_users = {job.user for job in self.cycle.jobs.values() if not job.ended}
        return frozenset(
            name
            for name, users in suspects.items()
            if len(set(users)) >= _SUSPECT_JOBS or len(active_users | set(users)) == 1
        )

    def available_times(
        self, job: JobState, nodes: Sequence[Node], zones: tuple[str, ...]
    ) -> list[AvailableAt]:
        """When each eligible node is available to the job, the earliest first.

        `nodes` is one of `classes`; of it, those in these zones.
        """
        key = (*node_requirements(job), nodes[0].node_class, *self._preemptor_key(job))
        if key not in self._times:
            given_back_at: dict[str, float] = {}
            self._times[key] = {
                (zone,): sorted(self._available_at(job, members, given_back_at))
                for zone, members in by_zone(nodes).items()
            }
        times = self._times[key]
        if zones not in times:
            times[zones] = sorted(match for zone in zones for match in times[zone,])
        return times[zones]

    def _available_at(
        self, job: JobState, nodes: Sequence[Node], given_back_at: dict[str, float]
    ) -> Iterator[AvailableAt]:
        """When each node is available if nothing fails; infinite: unknown.

        `given_back_at` keeps the answer for each owner.
        """
        for node in nodes:
            name = node.name
            if name not in self._eligible:
                continue
            owner = self.reserved_by.get(name)
            if owner is None:
                yield self._left_at(name), name
                continue
            if owner not in given_back_at:
                given_back_at[owner] = self._given_back_at(job, self.cycle.jobs[owner])
            yield given_back_at[owner], name

    def _given_back_at(self, job: JobState, other: JobState) -> float:
        now = self.cycle.now
        assignment, terms = other.status.assignment, self.cycle.terms(other)
        started = assignment.running_at if assignment and assignment.running_at else now
        ends = math.inf
        if other.spec.active_deadline:
            ends = started + other.spec.active_deadline.seconds + terms.max_checkpoint_grace_period
        return min(ends, max(now, self.preemptible_at(job, other)) + terms.checkpoint_grace_period)

    def _left_at(self, name: str) -> float:
        now, holder = self.cycle.now, self.occupied_by.get(name)
        if holder is None:
            return now
        job = self.cycle.jobs[holder]
        if self.cycle.has_left(job, name):
            return math.inf
        suspension = job.status.suspension
        return max(now, suspension.deadline) if suspension else now


__all__ = ["AvailableAt", "NodeAvailability", "Supply"]
