"""Selection of nodes: what a job requires of them, and which it gets, in the order of ranks.

Jobs get whole nodes. Within a zone the nodes of the previous attempt keep their places, and the
others come from as few leaves as possible. Over two zones, the maximum, ranks are contiguous by
zone, so that exactly one pair of neighbors (the cross-zone pair) communicates across.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations
from typing import TYPE_CHECKING

from flyer.api import quantize
from flyer.engine.scheduling_policy import is_crash_looping
from flyer.engine.state.nodes import Node, natural_order

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from flyer.engine.state.cycle_state import CycleState
    from flyer.engine.state.jobs import JobState


@dataclass(frozen=True, slots=True)
class PlacementOption:
    """One way to place a gang in zones.

    `counts` says how many nodes each zone gives, in rank order; None leaves the distribution to
    `choose`.
    """

    zones: tuple[str, ...]
    nodes: int
    counts: tuple[int, ...] | None = None

    @property
    def crosses(self) -> bool:
        """Whether it requires the cross-zone token."""
        return len(self.zones) > 1


@dataclass(frozen=True, slots=True)
class PlacementHistory:
    """Nodes and zones of the previous attempt in rank order, and nodes on which the job failed."""

    previous: tuple[tuple[str, str], ...] = ()
    avoid: frozenset[str] = frozenset()

    @property
    def zone_layout(self) -> tuple[int, ...]:
        """The number of nodes in each zone, in rank order."""
        zones = [zone for _, zone in self.previous]
        return tuple(zones.count(zone) for zone in dict.fromkeys(zones))

    @property
    def zones(self) -> tuple[str, ...]:
        """The zones in rank order."""
        return tuple(dict.fromkeys(zone for _, zone in self.previous))


def node_requirements(job: JobState) -> tuple[str | None, str | None, int]:
    """The requirements that a single node has to satisfy."""
    return job.spec.node_class, job.spec.zone, job.spec.ranks_per_node


def placement_history(job: JobState) -> PlacementHistory:
    """Placement history of the job."""
    history = job.status.history
    return PlacementHistory(
        tuple((node.name, node.zone) for node in history.previous), frozenset(history.avoid)
    )


def placement_options(
    cycle: CycleState, job: JobState, zones: Iterable[str], *, same_zone_layout: bool
) -> list[list[PlacementOption]]:
    """Placement options by kind, the best first; only the previous layout if requested."""
    zone_names = set(zones)
    crossing = cycle.may_cross(job)
    history = placement_history(job)
    like_before: list[PlacementOption] = []
    if sum(history.zone_layout) == job.spec.nodes:
        like_before = [
            same_zone_layout_option
            for same_zone_layout_option in same_zone_layout_options(history, zone_names)
            if crossing or not same_zone_layout_option.crosses
        ]
    if same_zone_layout:
        return [like_before]
    single = single_zone_options(job.spec.nodes, zone_names)
    cross = cross_zone_options(job.spec.nodes, zone_names) if crossing else []
    return [kind for kind in (like_before, single, cross) if kind]


def zone_layout_deadline(cycle: CycleState, job: JobState) -> float | None:
    """Until when the job accepts only the zone layout of its checkpoint; None: any layout."""
    history = job.status.history
    if job.status.checkpoint is None or sum(placement_history(job).zone_layout) != job.spec.nodes:
        return None
    since = history.queued_at if history.queued_at is not None else cycle.now
    until = quantize(since + cycle.settings.same_zone_layout_seconds)
    return until if until > cycle.now else None


def needs_of(cycle: CycleState, job: JobState) -> tuple[object, ...]:
    """All requirements of a job on its nodes, except their number and its placement history."""
    spec = job.spec
    return (
        cycle.level(job), *node_requirements(job), spec.cross_zone, spec.active_deadline,
        cycle.terms(job), is_crash_looping(cycle, job),
    )  # fmt: skip


def single_zone_options(nodes: int, zones: Collection[str]) -> list[PlacementOption]:
    """One option per zone."""
    return [PlacementOption((zone,), nodes, (nodes,)) for zone in sorted(zones)]


def cross_zone_options(nodes: int, zones: Collection[str]) -> list[PlacementOption]:
    """One option per pair of zones, with the distribution undecided."""
    ordered = sorted(zones)
    if nodes < 2:
        return []
    return [
        PlacementOption((first, second), nodes)
        for index, first in enumerate(ordered)
        for second in ordered[index + 1 :]
    ]


def same_zone_layout_options(
    history: PlacementHistory, zones: Collection[str]
) -> list[PlacementOption]:
    """Options with the previous number of nodes per zone, the previous zones first."""
    counts = history.zone_layout
    if not counts or len(counts) > 2:
        return []
    orders = sorted(
        permutations(sorted(zones), len(counts)), key=lambda order: order != history.zones
    )
    return [PlacementOption(order, sum(counts), counts) for order in orders]


def best(
    options: Sequence[PlacementOption],
    available: Mapping[str, Sequence[Node]],
    history: PlacementHistory,
) -> tuple[PlacementOption, tuple[Node, ...]] | None:
    """The option with the fewest avoided nodes, then the tightest one.

    Tightest: fewest nodes left in its zones, then fewest leaves.
    """
    candidates: list[tuple[tuple[int, int, int, int], PlacementOption, tuple[Node, ...]]] = []
    for index, option in enumerate(options):
        selection = choose(option, available, history)
        if selection is None:
            continue
        remaining = sum(len(available.get(zone, ())) for zone in option.zones) - option.nodes
        leaves = len({(node.zone, node.leaf) for node in selection})
        same_layout = option.zones == history.zones
        avoided = sum(node.name in history.avoid for node in selection)
        candidates.append(
            ((avoided, -1 if same_layout else remaining, leaves, index), option, selection)
        )
    if not candidates:
        return None
    _, option, selection = min(candidates, key=lambda candidate: candidate[0])
    return option, selection


def by_zone(nodes: Sequence[Node]) -> dict[str, list[Node]]:
    """The nodes as one list per zone."""
    groups: dict[str, list[Node]] = {}
    for node in nodes:
        groups.setdefault(node.zone, []).append(node)
    return groups


def choose(
    option: PlacementOption, available: Mapping[str, Sequence[Node]], history: PlacementHistory
) -> tuple[Node, ...] | None:
    """The nodes in rank order, or None when the option does not fit."""
    free = [len(available.get(zone, ())) for zone in option.zones]
    counts = option.counts or _zone_layout(option.nodes, free)
    if counts is None or any(want > have for want, have in zip(counts, free, strict=True)):
        return None
    selection: list[Node] = []
    for zone, count in zip(option.zones, counts, strict=True):
        before = history.previous[len(selection) : len(selection) + count]
        selection.extend(_in_zone(available[zone], count, before, history.avoid))
    return tuple(selection)


def _zone_layout(nodes: int, free: Sequence[int]) -> tuple[int, ...] | None:
    """Take from the fuller zone, so that both zones keep spare nodes as evenly as possible."""
    if sum(free) < nodes or min(free) == 0:
        return None
    remaining = list(free)
    # Take from the zone with more nodes each time, and at least one node from each zone.
    for _ in range(nodes):
        fullest = max(range(len(remaining)), key=lambda index: (remaining[index], -index))
        remaining[fullest] -= 1
    used_counts = [have - rest for have, rest in zip(free, remaining, strict=True)]
    if min(used_counts) == 0:
        empty, other = used_counts.index(0), used_counts.index(max(used_counts))
        used_counts[empty], used_counts[other] = 1, used_counts[other] - 1
    return tuple(used_counts)


def _in_zone(
    nodes: Sequence[Node], count: int, before: Sequence[tuple[str, str]], avoid: frozenset[str]
) -> list[Node]:
    """`count` nodes of a zone: previous ones at their places, the others from few leaves."""
    by_name = {node.name: node for node in nodes}
    places: list[Node | None] = [
        by_name[name] if name in by_name and name not in avoid else None for name, _ in before
    ]
    places += [None] * (count - len(places))
    reused = [node for node in places if node is not None]
    reused_names = {node.name for node in reused}
    other_nodes = [node for node in nodes if node.name not in reused_names]
    preferred = [node for node in other_nodes if node.name not in avoid]
    missing = count - len(reused)
    fill = list(
        _fewest_leaves(preferred, min(missing, len(preferred)), {node.leaf for node in reused})
    )
    if len(fill) < missing:
        avoided = [node for node in other_nodes if node.name in avoid]
        fill += list(_fewest_leaves(avoided, missing - len(fill), {node.leaf for node in fill}))
    fillers = iter(fill)
    return [node if node is not None else next(fillers) for node in places]


def _fewest_leaves(nodes: Sequence[Node], count: int, near: Collection[str]) -> Iterator[Node]:
    """`count` nodes from as few leaves as possible, first from the leaves `near`."""
    leaves: dict[str, list[Node]] = {}
    for node in sorted(nodes, key=lambda node: natural_order(node.name)):
        leaves.setdefault(node.leaf, []).append(node)
    while count > 0:
        fitting = [leaf for leaf in leaves if len(leaves[leaf]) >= count]
        close = [leaf for leaf in leaves if leaf in near]
        if close:
            leaf = max(close, key=lambda name: (len(leaves[name]), name))
        elif fitting:
            leaf = min(fitting, key=lambda name: (len(leaves[name]), natural_order(name)))
        else:
            leaf = max(leaves, key=lambda name: (len(leaves[name]), name))
        leaf_nodes = leaves.pop(leaf)[:count]
        yield from leaf_nodes
        count -= len(leaf_nodes)


__all__ = [
    "PlacementHistory",
    "PlacementOption",
    "best",
    "by_zone",
    "choose",
    "cross_zone_options",
    "needs_of",
    "node_requirements",
    "placement_history",
    "placement_options",
    "same_zone_layout_options",
    "single_zone_options",
    "zone_layout_deadline",
]
