"""Checks of a cluster: functions from the documents of `threefs status` and `scrub` to findings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from threefs.doctor.finding import Finding, Severity
from threefs.nodes import node_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["check_scrubs", "check_status"]

FULL_WARNING, FULL_PROBLEM = 0.85, 0.95
"""Used part of a node's capacity; the alert ThreeFSFillingUp has the lower one."""

SCRUB_LATE_SECONDS = 21 * 86_400
"""Delay of a weekly scrub; the alert ThreeFSScrubLate is sent after the same time."""

LISTED_MAX = 8


def check_status(status: dict[str, Any]) -> Iterator[Finding]:
    """All checks of a document of `Client.status`."""
    yield _services("mgmtd", status["mgmtds"])
    yield _services("meta", status["metas"])
    yield _single_services(status)
    yield _nodes(status["cluster"])
    yield _chains(status)
    yield from _capacity(status["cluster"]["nodes"])
    yield from _foreign_stores(status["cluster"])
    if status.get("domains") is not None:
        yield _domains(status["domains"])
    if status.get("moves") is not None:
        yield from _stalled_moves(status["moves"])


def _services(kind: str, services: Sequence[dict[str, Any]]) -> Finding:
    down = [service for service in services if service["state"] not in ("serving", "standby")]
    if not down:
        states = ", ".join(sorted(service["state"] for service in services))
        return Finding(f"{kind} services", Severity.OK, states)
    usable = any(service["state"] == "serving" for service in services)
    detail = _listed(
        f"{service['address']} is {service['state']} ({service['detail'] or 'no reason known'})"
        for service in down
    )
    remedy = f"read the log of this {kind}; " + (
        "the others serve meanwhile" if usable else "no other one serves"
    )
    return Finding(
        f"{kind} services", Severity.WARNING if usable else Severity.PROBLEM, detail, remedy
    )


def _single_services(status: dict[str, Any]) -> Finding:
    """Only clusters of several machines need a second mgmtd and metadata service."""
    name = "redundancy"
    hosts = {node["address"].rpartition(":")[0] for node in status["cluster"]["nodes"]}
    single = [kind for kind in ("mgmtd", "meta") if len(status[f"{kind}s"]) == 1]
    if single and len(hosts) > 1:
        return Finding(
            name,
            Severity.WARNING,
            f"one {' and one '.join(single)} only: while it restarts, calls wait",
            "keep the metadata in etcd and run two of each, see `threefs serve --help` and the "
            "chart's value threefs.etcd",
        )
    replicas = [len(chain["targets"]) for chain in status["routing"]["chains"].values()]
    if replicas and min(replicas) == 1:
        detail = f"{replicas.count(1)} chains have one replica: its disk is the only copy"
        return Finding(name, Severity.WARNING, detail, "create the cluster with --replicas 3")
    detail = f"{min(replicas)} replicas of every chain" if replicas else "no chains yet"
    return Finding(name, Severity.OK, detail)


def _nodes(cluster: dict[str, Any]) -> Finding:
    name, nodes = "storage nodes", cluster["nodes"]
    dead = [node for node in nodes if not node["alive"]]
    if dead:
        return Finding(
            name,
            Severity.PROBLEM,
            _listed(f"{node_name(node['node'])} at {node['address']} is dead" for node in dead),
            "start its service again, return or replace its disk, or remove it: `threefs drain "
            "NODE --apply`",
        )
    if not nodes:
        return Finding(
            name,
            Severity.PROBLEM,
            "none has registered",
            "start storage services with this cluster's key and the addresses of its mgmtd",
        )
    return Finding(name, Severity.OK, f"{len(nodes)} of {len(nodes)} alive")


def _chains(status: dict[str, Any]) -> Finding:
    name, cluster = "chains", status["cluster"]
    total, whole, down = cluster["chains"], cluster["chains_whole"], cluster["chains_down"]
    incomplete = [
        f"chain-{chain['id']} ({', '.join(place['state'] for place in chain['targets'])})"
        for chain in status["routing"]["chains"].values()
        if any(place["state"] != "SERVING" for place in chain["targets"])
    ]
    if down:
        return Finding(
            name,
            Severity.PROBLEM,
            f"{down} of {total} serve nothing: {_listed(incomplete)}",
            "start the storage nodes that served last (LASTSRV); if their disks are lost, see "
            "`threefs promote --help`",
        )
    if whole < total:
        return Finding(
            name,
            Severity.WARNING,
            f"{total - whole} of {total} lack a replica: {_listed(incomplete)}",
            "wait for the resync of SYNCING targets; start the nodes of OFFLINE ones",
        )
    return Finding(name, Severity.OK, f"{whole} of {total} whole")


def _capacity(nodes: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    name = "capacity"
    known = [node for node in nodes if node["capacity_bytes"]]
    used = {node["node"]: node["used_bytes"] / node["capacity_bytes"] for node in known}
    full = [node for node, part in used.items() if part >= FULL_WARNING]
    if full:
        most = max(used.values())
        yield Finding(
            name,
            Severity.PROBLEM if most >= FULL_PROBLEM else Severity.WARNING,
            _listed(f"{node_name(node)} is {used[node]:.0%} full" for node in full),
            "remove files, purge trashes (`threefs trash`), or add storage nodes",
        )
    elif known:
        yield Finding(name, Severity.OK, f"the fullest node is {max(used.values()):.0%} full")
    if unknown := [node for node in nodes if not node["capacity_bytes"]]:
        yield Finding(
            name,
            Severity.WARNING,
            _listed(f"the capacity of {node_name(node['node'])} is unknown" for node in unknown),
            "nothing is balanced until these nodes have run once",
        )


def _foreign_stores(cluster: dict[str, Any]) -> Iterator[Finding]:
    if foreign := cluster["foreign_stores"]:
        yield Finding(
            "disks",
            Severity.PROBLEM,
            _listed(
                f"target-{store['target']} ({node_name(store['node'])}) has a different disk than "
                f"when it served chain-{store['chain']}"
                for store in foreign
            ),
            "restore that disk; if it is lost, see `threefs promote --help`",
        )


def _domains(domains: dict[str, Any]) -> Finding:
    name = "failure domains"
    if total := domains["violations_total"]:
        return Finding(
            name,
            Severity.WARNING,
            f"{total} chains have more replicas in a zone, rack or host than necessary",
            "`threefs rebalance` shows the moves that change it, --apply starts them",
        )
    if domains["reasons"]:
        return Finding(
            name,
            Severity.WARNING,
            _listed(domains["reasons"]),
            "set the zone, rack and host of every storage service",
        )
    level = domains["level"] or "service"
    return Finding(name, Severity.OK, f"replicas of a chain are on different {level}s")


def _stalled_moves(moves: dict[str, Any]) -> Iterator[Finding]:
    if stalled := [move for move in moves["under_way"] if move["stalled"] is not None]:
        yield Finding(
            "moves",
            Severity.WARNING,
            _listed(
                f"chain-{move['chain']} from {node_name(move['from'])} to {node_name(move['to'])}"
                for move in stalled
            ),
            "`threefs status` shows why each of them makes no progress",
        )


def check_scrubs(scrubs: Sequence[dict[str, Any]], now_unix_s: float) -> Iterator[Finding]:
    """All checks of a document of `Client.scrub`."""
    name = "scrub"
    silent = [scrub for scrub in scrubs if scrub["scrub"] is None]
    if silent:
        yield Finding(
            name,
            Severity.WARNING,
            _listed(f"target-{scrub['target']}: {scrub['trouble']}" for scrub in silent),
            "see the storage nodes above; services of earlier releases have no scrub",
        )
    answers = [scrub for scrub in scrubs if scrub["scrub"] is not None]
    bad = [
        scrub
        for scrub in answers
        if scrub["scrub"]["damaged"] > 0 or scrub["scrub"]["different"] > 0
    ]
    if bad:
        yield Finding(
            name,
            Severity.PROBLEM,
            _listed(
                f"target-{scrub['target']}: {scrub['scrub']['damaged']} chunks damaged on all "
                f"replicas, {scrub['scrub']['different']} newer than on the previous replica"
                for scrub in bad
            ),
            "`threefs scrub` lists the chunks; restore their files from another copy",
        )
    late = [
        scrub
        for scrub in answers
        if (scrub["scrub"]["due_unix_s"] or now_unix_s) < now_unix_s - SCRUB_LATE_SECONDS
    ]
    if late:
        yield Finding(
            name,
            Severity.WARNING,
            _listed(f"target-{scrub['target']} is overdue" for scrub in late),
            "raise the scrub's rate, or see why the disk is too busy",
        )
    if answers and not bad and not late:
        yield Finding(name, Severity.OK, f"{len(answers)} targets without damage")


def _listed(items: Iterator[str] | Sequence[str]) -> str:
    texts = list(items)
    more = f"; and {len(texts) - LISTED_MAX} more" if len(texts) > LISTED_MAX else ""
    return "; ".join(texts[:LISTED_MAX]) + more
