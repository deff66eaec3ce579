"""Findings of `threefs doctor`: runs all checks, and shows their results."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from threefs.cli.output import Output, print_json, stdout_console
from threefs.client import connect
from threefs.cluster import ClusterFile
from threefs.doctor.cluster import check_scrubs, check_status
from threefs.doctor.connections import check_credential, check_services, unreachable
from threefs.doctor.finding import Finding, Severity
from threefs.doctor.machine import check_machine
from threefs.errors import ThreeFSError
from threefs.exit_status import EXIT_FAILED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from threefs.client import Client

__all__ = ["show_findings"]

STYLES = {Severity.OK: "green", Severity.WARNING: "yellow", Severity.PROBLEM: "red"}


def show_findings(cluster: Path | None, output: Output, timeout_seconds: float) -> None:
    """Print the findings; exit 1 if one is a problem."""
    findings = list(check_machine(Path("/")))
    if cluster is not None:
        findings += _check_cluster(cluster, timeout_seconds)
    worst = max((finding.severity for finding in findings), key=list(Severity).index)
    if output is Output.JSON:
        print_json({"severity": worst, "findings": [asdict(finding) for finding in findings]})
    else:
        _show(findings)
        if cluster is None:
            stdout_console().print("no cluster given: pass --cluster FILE or set THREEFS_CLUSTER")
    if worst is Severity.PROBLEM:
        raise typer.Exit(EXIT_FAILED)


def _check_cluster(path: Path, timeout_seconds: float) -> Iterator[Finding]:
    try:
        file = ClusterFile.read(path)
    except ThreeFSError as error:
        remedy = "pass the cluster.json that `threefs serve` or the chart has written"
        yield Finding("cluster file", Severity.PROBLEM, str(error), remedy)
        return
    yield check_credential(file, time.time())
    refusals = unreachable([*file.mgmtd, *file.meta])
    yield check_services("mgmtd", file.mgmtd, refusals)
    yield check_services("meta", file.meta, refusals)
    try:
        with connect(path, timeout_seconds=timeout_seconds) as client:
            yield from _check_services_of(client)
    except (ThreeFSError, OSError) as error:
        remedy = "see the checks above, then the logs of mgmtd"
        yield Finding("status", Severity.PROBLEM, str(error), remedy)


def _check_services_of(client: Client) -> Iterator[Finding]:
    status: dict[str, Any] = json.loads(client.status())
    nodes = [node["address"] for node in status["cluster"]["nodes"] if node["alive"]]
    if nodes:
        yield check_services("storage", nodes, unreachable(nodes))
    yield from check_status(status)
    try:
        scrubs: list[dict[str, Any]] = json.loads(client.scrub())
    except ThreeFSError as error:
        remedy = "run it with the cluster's key: scrubs are not shown to holders of a ticket"
        yield Finding("scrub", Severity.WARNING, str(error), remedy)
    else:
        yield from check_scrubs(scrubs, time.time())


def _show(findings: list[Finding]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table("RESULT", "CHECK", "DETAIL", box=None)
    for finding in findings:
        detail = Text(finding.detail)
        if finding.remedy:
            detail.append(f"\n→ {finding.remedy}", style="dim")
        result = Text(finding.severity, style=STYLES[finding.severity])
        table.add_row(result, finding.name, detail)
    console = stdout_console()
    console.print(table)
    counts = dict.fromkeys(reversed(Severity), 0)
    for finding in findings:
        counts[finding.severity] += 1
    parts = (f"{count} {severity}" for severity, count in counts.items() if count)
    console.print(", ".join(parts))
