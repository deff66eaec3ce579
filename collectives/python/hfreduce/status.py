"""State of a job's groups, and the ranks that block them, from the recorders of its ranks.

Pure functions from recorders to ranks and one line of conclusion for each group. Ranks of other
machines are known from messages to their tree neighbors on this machine, and are marked as such.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hfreduce.flight import Recorder

__all__ = ["BAD", "Group", "Rank", "groups", "table"]

BAD = ("broken", "dead", "stopped", "mismatch", "stuck")
"""The verdicts that need attention."""

HERE = "its recorder"


@dataclass(slots=True)
class Rank:
    """State of one rank, as known from flight records."""

    rank: int
    node: str
    host: str
    reached_at: str
    """Interface and address that other nodes try first; empty where that is not known."""
    pid: int | None
    life: str
    """running, stopped, dead, silent or unknown (on another machine)."""
    seen: str
    """its recorder, or the rank that last received a message from it."""
    state: str = ""
    operation: str = ""
    """The oldest operation under way, or empty."""
    sequence: int | None = None
    fingerprint: str = ""
    phase: str = ""
    since_seconds: float = 0.0
    """In this operation, or without one."""
    waits_for: int | None = None
    entered: int | None = None
    """The last operation that it is known to have called."""
    chunks: tuple[int, int] | None = None
    """Delivered, of all."""
    heard_seconds: float | None = None
    """Since its last sign of life."""
    cause: dict[str, Any] | None = None
    streams: int = 0
    """TCP streams to a tree neighbor; 0 where there are none, or they are not known."""


@dataclass(slots=True)
class Group:
    """One communicator."""

    group: str
    job: str
    epoch: int
    world_size: int
    verdict: str = "idle"
    conclusion: str = ""
    culprits: list[int] = field(default_factory=list)
    ranks: list[Rank] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """The group as JSON."""
        return asdict(self)


def groups(
    recorders: Iterable[Recorder], stuck_after_seconds: float, *, ended: bool = False
) -> list[Group]:
    """Every group with at least one rank that has not ended; with `ended` the others too.

    `stuck_after_seconds`: time that a rank may spend in one operation before it counts as stuck.
    """
    by_group: dict[str, list[Recorder]] = {}
    for recorder in recorders:
        by_group.setdefault(recorder.data["group"], []).append(recorder)
    result = []
    for name, members in sorted(by_group.items()):
        if not ended and all(member.life == "dead" for member in members):
            continue
        data = members[0].data
        group = Group(name, data["job"], data["epoch"], data["world_size"])
        group.ranks = _ranks(members)
        _conclude(group, stuck_after_seconds)
        result.append(group)
    return sorted(result, key=lambda group: (group.verdict not in BAD, group.job, group.group))


def _ranks(recorders: Sequence[Recorder]) -> list[Rank]:
    ranks = {recorder.data["rank"]: _own(recorder) for recorder in recorders}
    for recorder in recorders:
        if recorder.life == "dead":
            continue
        for peer in recorder.data["peers"]:
            peer_rank = _peer_rank(recorder, peer)
            previous = ranks.get(peer_rank.rank)
            if previous is None or (
                previous.seen != HERE
                and (previous.heard_seconds or 0) > (peer_rank.heard_seconds or 0)
            ):
                ranks[peer_rank.rank] = peer_rank
    return [ranks[rank] for rank in sorted(ranks)]


def _own(recorder: Recorder) -> Rank:
    data = recorder.data
    now = data["read_ns"]
    waiting = data["waiting"] or {}
    entries = data["entries"]
    rank = Rank(
        data["rank"], data["node"], data["host"], data["reached_at"], recorder.pid, recorder.life,
        HERE, state=data["state"], heard_seconds=recorder.beat_age_seconds, cause=data["cause"],
    )  # fmt: skip
    rank.streams = max((peer.get("streams", 0) for peer in data["peers"]), default=0)
    collectives = [e["sequence"] for e in entries if e["kind"] not in ("send", "recv")]
    rank.entered = max(collectives, default=None)
    active = next((entry for entry in entries if entry["state"] == "started"), None)
    if active is not None:
        rank.operation, rank.sequence = active["operation"], active["sequence"]
        rank.fingerprint = active["fingerprint"]
        rank.since_seconds = max(now - active["called_ns"], 0) / 1e9
        rank.chunks = (active["chunks_delivered"], active["chunks"])
        # Sampled ten times a second: the peer of an earlier operation does not apply to this one.
        if waiting.get("sequence") == active["sequence"]:
            rank.phase, rank.waits_for = waiting["phase"], waiting["rank"]
    elif data["state"] == "connecting":
        rank.since_seconds = max(now - data["created_ns"], 0) / 1e9
        rank.phase, rank.waits_for = waiting.get("phase", ""), waiting.get("rank")
    else:
        last = max((entry["finished_ns"] for entry in entries), default=data["created_ns"])
        rank.since_seconds = max(now - last, 0) / 1e9
    return rank


def _peer_rank(recorder: Recorder, peer: dict[str, Any]) -> Rank:
    seconds = max(recorder.data["read_ns"] - peer["heard_ns"], 0) / 1e9
    rank = Rank(
        peer["rank"],
        peer["node"],
        "",
        "",
        None,
        "unknown",
        f"heard by rank {recorder.data['rank']}",
    )
    rank.state = "left" if peer["left"] else "open"
    rank.entered, rank.heard_seconds = peer["sequence"], seconds
    if peer["link"]:
        rank.sequence, rank.waits_for = peer["sequence"], peer["waiting_for"]
        rank.phase = "" if peer["sequence"] is None else "under way there"
    return rank


def _conclude(group: Group, stuck_after: float) -> None:
    judges = (_broken, _ended, _disagreement, _absent, _together, _connecting)
    for judge in judges:
        verdict = judge(group, stuck_after)
        if verdict is not None:
            group.verdict, group.culprits, group.conclusion = verdict
            return
    local_ranks = [rank for rank in group.ranks if rank.seen == HERE]
    active = [rank for rank in local_ranks if rank.sequence is not None]
    if active:
        oldest = min(active, key=lambda rank: rank.sequence or 0)
        group.verdict = "moving"
        group.conclusion = (
            f"{len(active)} of {len(local_ranks)} ranks here are in {oldest.operation} "
            f"#{oldest.sequence}, for {_seconds(oldest.since_seconds)}"
        )
    else:
        last = max((rank.entered for rank in local_ranks if rank.entered is not None), default=None)
        since = min((rank.since_seconds for rank in local_ranks), default=0.0)
        after = "" if last is None else f", after operation #{last}"
        group.conclusion = f"no operation is under way for {_seconds(since)}{after}"


Finding = tuple[str, list[int], str]


def _broken(group: Group, _stuck_after: float) -> Finding | None:
    cause = next((rank.cause for rank in group.ranks if rank.cause), None)
    if cause is None:
        return None
    peer = cause["peer"]
    culprit = "the group" if peer is None else f"rank {peer} on node {cause['peer_node']}"
    where = f" in {cause['operation']} #{cause['sequence']}" if cause["sequence"] >= 0 else ""
    informed = sum(1 for rank in group.ranks if rank.state == "broken")
    text = (
        f"broken: {culprit} ({cause['kind']}): {cause['detail']}; seen by rank "
        f"{cause['seen_by']}{where}; {_ranks_do(informed, 'knows', 'know')} of it"
    )
    return "broken", [] if peer is None else [peer], text


def _ended(group: Group, _stuck_after: float) -> Finding | None:
    """Processes that are dead or stopped, in this order."""
    for life, state in (("dead", "is dead"), ("stopped", "is stopped"), ("silent", "does not run")):
        bad = [rank for rank in group.ranks if rank.life == life]
        if bad:
            first = bad[0]
            others = f", and so {_are(len(bad) - 1)} others" if len(bad) > 1 else ""
            since = f" for {_seconds(first.heard_seconds or 0)}" if life != "dead" else ""
            waiting = [r for r in group.ranks if r.sequence is not None and r not in bad]
            waits = _ranks_do(len(waiting), "waits", "wait")
            text = f"{_name(first)} {state}{since}{others}; {waits}"
            verdict = "stopped" if life == "silent" else life
            return verdict, [rank.rank for rank in bad], text
    return None


def _disagreement(group: Group, _stuck_after: float) -> Finding | None:
    calls: dict[int, dict[str, list[Rank]]] = {}
    for rank in group.ranks:
        if rank.sequence is not None and rank.operation and not _between_two(rank.operation):
            same = calls.setdefault(rank.sequence, {})
            same.setdefault(rank.fingerprint, []).append(rank)
    for sequence, prints in sorted(calls.items()):
        if len(prints) > 1:
            few, *_, many = sorted(prints.values(), key=len)
            text = (
                f"as operation #{sequence} {_name(few[0])} called {few[0].operation} and "
                f"{_name(many[0])} called {many[0].operation}"
            )
            return "mismatch", [rank.rank for rank in few], text
    return None


def _late(group: Group, stuck_after: float) -> list[Rank]:
    """The ranks that are in the oldest operation under way, if that is under way for too long."""
    active = [rank for rank in group.ranks if rank.sequence is not None and rank.operation]
    if not active:
        return []
    oldest = min(rank.sequence or 0 for rank in active)
    late = [rank for rank in active if rank.sequence == oldest]
    return late if max(rank.since_seconds for rank in late) >= stuck_after else []


def _absent(group: Group, stuck_after: float) -> Finding | None:
    """Ranks that have not called what others are in."""
    late = _late(group, stuck_after)
    if not late:
        return None
    sequence, operation = late[0].sequence or 0, late[0].operation
    absent = [
        rank
        for rank in group.ranks
        if rank.seen == HERE and (rank.entered is None or rank.entered < sequence)
    ]
    if not absent or _between_two(operation):
        return None
    since = max(rank.since_seconds for rank in late)
    names = _name(absent[0]) if len(absent) == 1 else f"ranks {_list(absent)}"
    has = "has" if len(absent) == 1 else "have"
    text = (
        f"{names} {has} not entered {operation} #{sequence} for {_seconds(since)}; "
        f"{_ranks_do(len(late), 'waits', 'wait')} for {'it' if len(absent) == 1 else 'them'}"
    )
    return "stuck", [rank.rank for rank in absent], text


def _together(group: Group, stuck_after: float) -> Finding | None:
    """Every visible rank has called the operation: follows the waits to the ranks that block it."""
    late = _late(group, stuck_after)
    if not late:
        return None
    by_rank = {rank.rank: rank for rank in group.ranks}
    ends = Counter(_end_of_chain(rank, by_rank) for rank in late)
    ends.pop(None, None)
    since = max(rank.since_seconds for rank in late)
    operation = f"{late[0].operation} #{late[0].sequence} for {_seconds(since)}"
    if not ends:
        return "stuck", [], f"{_ranks_do(len(late), 'is', 'are')} in {operation}"
    culprit, count = ends.most_common(1)[0]
    assert culprit is not None
    culprit_rank = by_rank.get(culprit)
    subject = (
        f"rank {culprit} (not on this machine)" if culprit_rank is None else _name(culprit_rank)
    )
    age = ""
    if culprit_rank is not None and culprit_rank.seen != HERE:
        age = f", last heard {_seconds(culprit_rank.heard_seconds or 0)} ago ({culprit_rank.seen})"
    late_ranks = _ranks_do(len(late), "is", "are")
    text = f"{late_ranks} in {operation}; {count} of them wait for {subject}{age}"
    return "stuck", [culprit], text


def _end_of_chain(rank: Rank, by_rank: dict[int, Rank]) -> int | None:
    visited = {rank.rank}
    at = rank.waits_for
    while at is not None and at not in visited:
        visited.add(at)
        following = by_rank.get(at)
        if following is None or following.waits_for is None:
            return at
        at = following.waits_for
    return at


def _connecting(group: Group, stuck_after: float) -> Finding | None:
    late = [r for r in group.ranks if r.state == "connecting" and r.since_seconds >= stuck_after]
    if not late:
        return None
    waited = Counter(rank.waits_for for rank in late if rank.waits_for is not None)
    since = _seconds(max(rank.since_seconds for rank in late))
    text = f"{_ranks_do(len(late), 'connects', 'connect')} for {since}"
    if not waited:
        return "stuck", [], text
    culprit, count = waited.most_common(1)[0]
    return "stuck", [culprit], f"{text}; {_ranks_do(count, 'waits', 'wait')} for rank {culprit}"


def _between_two(operation: str) -> bool:
    """Sends and receives involve two ranks; the others are not expected."""
    return operation.startswith(("send(", "recv("))


def _name(rank: Rank) -> str:
    process = f", pid {rank.pid}" if rank.pid is not None else ""
    return f"rank {rank.rank} (node {rank.node}{process})"


def _list(ranks: Sequence[Rank]) -> str:
    names = [str(rank.rank) for rank in ranks[:8]]
    return ", ".join(names) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def _are(count: int) -> str:
    return f"{'is' if count == 1 else 'are'} {count}"


def _ranks_do(count: int, single: str, many: str) -> str:
    return f"{count} rank {single}" if count == 1 else f"{count} ranks {many}"


def _seconds(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


HEAD = ("RANK", "NODE", "HOST", "PID", "LIFE", "OPERATION", "PHASE", "SINCE", "WAITS FOR", "SEEN")


def table(group: Group) -> str:
    """The groups as a table."""
    rows = [HEAD, *(_row(rank) for rank in group.ranks)]
    widths = [max(len(row[at]) for row in rows) for at in range(len(HEAD))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    job = group.job or "(no name)"
    missing = group.world_size - len(group.ranks)
    title = f"job {job}, group {group.group}, epoch {group.epoch}, {group.world_size} ranks"
    if missing > 0:
        title += f" ({missing} on other machines, not heard here)"
    places = {rank.node: rank.reached_at for rank in group.ranks if rank.reached_at}
    if len({rank.node for rank in group.ranks}) > 1 and places:
        reached = ", ".join(f"{n} {at}" for n, at in sorted(places.items()))
        streams = max(rank.streams for rank in group.ranks)
        many = f"; {streams} TCP streams to each neighbor" if streams > 1 else ""
        lines.append(f"reached at: {reached}{many}")
    return "\n".join([title, *lines, f"{group.verdict}: {group.conclusion}"])


def _row(rank: Rank) -> tuple[str, ...]:
    operation = f"{rank.operation} #{rank.sequence}" if rank.operation else ""
    if not operation and rank.sequence is not None:
        operation = f"#{rank.sequence}"
    if not operation and rank.entered is not None:
        operation = f"none since #{rank.entered}"
    phase = rank.phase or {"connecting": "connecting", "broken": "broken", "left": "left"}.get(
        rank.state, ""
    )
    if rank.chunks is not None and rank.chunks[1] > 1:
        phase = f"{phase} ({rank.chunks[0]}/{rank.chunks[1]} chunks)".strip()
    since = (
        _seconds(rank.since_seconds)
        if rank.seen == HERE
        else f"heard {_seconds(rank.heard_seconds or 0)} ago"
    )
    return (
        str(rank.rank), rank.node, rank.host, "" if rank.pid is None else str(rank.pid), rank.life,
        operation, phase, since, "" if rank.waits_for is None else f"rank {rank.waits_for}",
        rank.seen,
    )  # fmt: skip
