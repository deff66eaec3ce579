"""`threefs fsck --chunks`: all chunks against the metadata of a running cluster."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import typer

from threefs.cli.output import (
    Output,
    describe_bytes,
    print_json,
    printable,
    stderr_console,
    stdout_console,
)
from threefs.cli.store import progress
from threefs.client import connect
from threefs.exit_status import EXIT_FAILED

if TYPE_CHECKING:
    from pathlib import Path

    from threefs._native import ChunkAudit
    from threefs.client import Client

__all__ = ["check_chunks"]

LISTED_MAX = 20
"""Inodes of each kind that the table lists; JSON has at most 1000."""


def check_chunks(
    cluster: Path | None, output: Output, *, repair: bool, grace_seconds: float
) -> None:
    """Print what is leaked and missing, and with `repair` remove it; exit 1 if any stays."""
    with connect(cluster) as client:
        audit = client.audit()
        _compare(client, audit)
        _find_paths(audit)
        report = _report(audit)
        if repair and (leaked := report["leaked"]["inodes"]):
            _remove(audit, leaked, grace_seconds)
            report = _report(audit)
    if output is Output.JSON:
        print_json(report)
    else:
        _show(report, repair=repair)
    if is_bad(report):
        raise typer.Exit(EXIT_FAILED)


def is_bad(report: dict[str, Any]) -> bool:
    """Whether something is wrong that was not repaired, or not everything was read."""
    stays = report["leaked"]["inodes"] > report["removed"]["inodes"]
    missing = report["missing_chunks"] + report["unconfirmed_chunks"]
    return bool(stays or missing or report["not_read"])


def _report(audit: ChunkAudit) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(audit.report())
    return report


def _compare(client: Client, audit: ChunkAudit) -> None:
    total = _stored_bytes(client)
    with progress("compare") as show:
        while audit.step():
            done, _ = audit.progress()
            show(done, max(total, done))


def _stored_bytes(client: Client) -> int:
    """About the bytes of all chunks, which count once for all replicas."""
    status = json.loads(client.status())
    used = sum(node["used_bytes"] for node in status["cluster"]["nodes"])
    chains = list(status["routing"]["chains"].values())
    targets = sum(len(chain["targets"]) for chain in chains)
    return int(used * len(chains) / max(targets, 1))


def _find_paths(audit: ChunkAudit) -> None:
    if _report(audit)["missing"]:
        with progress("search names"):
            while audit.find_paths():
                pass


def _remove(audit: ChunkAudit, total: int, grace_seconds: float) -> None:
    stderr_console().print(f"looking {total} leaked inodes up again in {grace_seconds:g} s")
    time.sleep(grace_seconds)
    with progress("remove") as show:
        while audit.remove_leaked():
            _, removed = audit.progress()
            show(removed, total)


def _show(report: dict[str, Any], *, repair: bool) -> None:
    from rich.table import Table

    table = Table("CHECK", "INODES", "CHUNKS", "BYTES", box=None)
    leaked, removed = report["leaked"], report["removed"]
    rows = (
        ("compared", report["inodes"], report["chunks"], describe_bytes(report["bytes"])),
        ("leaked", leaked["inodes"], leaked["chunks"], describe_bytes(leaked["bytes"])),
        ("removed", removed["inodes"], removed["chunks"], describe_bytes(removed["bytes"])),
        ("missing", report["missing_files"], report["missing_chunks"], ""),
    )
    for name, *cells in rows:
        table.add_row(name, *map(str, cells))
    console = stdout_console()
    console.print(table)
    for line in _findings(report):
        console.print(line, markup=False, soft_wrap=True)
    if leaked["inodes"] > removed["inodes"] and not repair:
        console.print("remove leaked chunks with `threefs fsck --chunks --repair`")


def _name(file: dict[str, Any]) -> str:
    path, snapshot = file["path"], file["snapshot"]
    name = f"inode {file['inode']}" + (f" `{printable(path)}`" if path else "")
    return name + (f" of snapshot `{printable(snapshot)}`" if snapshot else "")


def _findings(report: dict[str, Any]) -> list[str]:
    lines = [
        f"leaked: inode {leak['inode']} does not exist and has {leak['chunks']} chunks, "
        f"{describe_bytes(leak['bytes'])}"
        for leak in report["leaks"][:LISTED_MAX]
    ]
    for file in report["missing"][:LISTED_MAX]:
        indexes = ", ".join(map(str, file["indexes"]))
        lines.append(
            f"missing: {_name(file)} lacks {file['chunks']} chunks of "
            f"{describe_bytes(file['chunk_bytes'])}: {indexes}"
            + (" …" if file["chunks"] > len(file["indexes"]) else "")
        )
    if count := report["unconfirmed_chunks"]:
        lines.append(f"missing: about {count} further chunks, which were not asked for again")
    for chain, reason in report["not_read"].items():
        lines.append(f"not read to its end: chain-{chain}: {reason}")
    return lines
