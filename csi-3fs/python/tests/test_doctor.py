"""`threefs doctor`: its checks on prepared documents and folders, and all of them on a cluster."""

from __future__ import annotations

import copy
import json
import os
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
from threefs.cli.credential import issue
from threefs.cluster import ClusterFile
from threefs.doctor.cluster import check_scrubs, check_status
from threefs.doctor.connections import check_credential, check_services, unreachable
from threefs.doctor.finding import Finding, Severity
from threefs.doctor.machine import check_machine, mounts_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    import threefs

OK, WARNING, PROBLEM = Severity.OK, Severity.WARNING, Severity.PROBLEM

STATUS: dict[str, Any] = {
    "cluster": {
        "nodes": [
            {
                "node": node,
                "address": f"10.0.0.{node}:7000",
                "alive": True,
                "used_bytes": 10,
                "capacity_bytes": 100,
            }
            for node in (1, 2, 3)
        ],
        "chains": 1,
        "chains_whole": 1,
        "chains_down": 0,
        "foreign_stores": [],
    },
    "routing": {
        "chains": {
            "1": {
                "id": 1,
                "targets": [
                    {"target": node, "node": node, "state": "SERVING"} for node in (1, 2, 3)
                ],
            }
        }
    },
    "domains": {"level": "host", "reasons": [], "violations_total": 0},
    "moves": {"under_way": []},
    "mgmtds": [
        {"address": "10.0.0.1:1", "state": "serving", "detail": None},
        {"address": "10.0.0.2:1", "state": "standby", "detail": None},
    ],
    "metas": [
        {"address": "10.0.0.1:2", "state": "serving", "detail": None},
        {"address": "10.0.0.2:2", "state": "serving", "detail": None},
    ],
}


def of(findings: Iterable[Finding]) -> dict[str, Finding]:
    """The last finding of each name; every warning and problem has a remedy."""
    by_name = {finding.name: finding for finding in findings}
    for finding in by_name.values():
        assert finding.severity is OK or finding.remedy, finding
    return by_name


def status_with(change: Callable[[dict[str, Any]], object]) -> dict[str, Finding]:
    status = copy.deepcopy(STATUS)
    change(status)
    return of(check_status(status))


def test_a_sound_cluster_has_no_finding() -> None:
    assert {finding.severity for finding in check_status(STATUS)} == {OK}


@pytest.mark.parametrize(
    ("change", "name", "severity", "words"),
    [
        (
            lambda it: it["mgmtds"][1].update(state="unreachable", detail="refused"),
            "mgmtd services", WARNING, "10.0.0.2:1 is unreachable (refused)",
        ),
        (
            lambda it: [meta.update(state="starting") for meta in it["metas"]],
            "meta services", PROBLEM, "10.0.0.1:2 is starting",
        ),
        (lambda it: it["metas"].pop(), "redundancy", WARNING, "one meta only"),
        (
            lambda it: it["routing"]["chains"]["1"].update(
                targets=it["routing"]["chains"]["1"]["targets"][:1]
            ),
            "redundancy", WARNING, "one replica",
        ),
        (
            lambda it: it["cluster"]["nodes"][2].update(alive=False),
            "storage nodes", PROBLEM, "node-3 at 10.0.0.3:7000 is dead",
        ),
        (
            lambda it: it["cluster"]["nodes"].clear(),
            "storage nodes", PROBLEM, "none has registered",
        ),
        (
            lambda it: (
                it["cluster"].update(chains_whole=0),
                it["routing"]["chains"]["1"]["targets"][2].update(state="SYNCING"),
            ),
            "chains", WARNING, "chain-1 (SERVING, SERVING, SYNCING)",
        ),
        (
            lambda it: (
                it["cluster"].update(chains_whole=0, chains_down=1),
                it["routing"]["chains"]["1"]["targets"][0].update(state="LASTSRV"),
            ),
            "chains", PROBLEM, "1 of 1 serve nothing: chain-1 (LASTSRV",
        ),
        (
            lambda it: it["cluster"]["nodes"][0].update(used_bytes=86),
            "capacity", WARNING, "node-1 is 86% full",
        ),
        (
            lambda it: it["cluster"]["nodes"][0].update(used_bytes=97),
            "capacity", PROBLEM, "node-1 is 97% full",
        ),
        (
            lambda it: it["cluster"]["nodes"][1].update(capacity_bytes=0),
            "capacity", WARNING, "the capacity of node-2 is unknown",
        ),
        (
            lambda it: it["cluster"]["foreign_stores"].append({"target": 7, "node": 2, "chain": 1}),
            "disks", PROBLEM, "target-7 (node-2) has a different disk",
        ),
        (
            lambda it: it["domains"].update(violations_total=4),
            "failure domains", WARNING, "4 chains",
        ),
        (
            lambda it: it["moves"]["under_way"].append(
                {"chain": 1, "from": 2, "to": 3, "stalled": "node-3 is full"}
            ),
            "moves", WARNING, "chain-1 from node-2 to node-3",
        ),
    ],
)  # fmt: skip
def test_a_fault_of_the_cluster_is_named_with_a_remedy(
    change: Callable[[dict[str, Any]], object], name: str, severity: Severity, words: str
) -> None:
    finding = status_with(change)[name]
    assert (finding.severity, words in finding.detail) == (severity, True), finding


def test_a_status_for_a_ticket_has_no_domains_and_no_moves() -> None:
    findings = status_with(lambda it: it.update(domains=None, moves=None))
    assert "failure domains" not in findings


def test_many_faults_are_counted_and_not_all_listed() -> None:
    status = copy.deepcopy(STATUS)
    node = status["cluster"]["nodes"][0] | {"alive": False}
    status["cluster"]["nodes"] = [node | {"node": number} for number in range(100)]
    detail = of(check_status(status))["storage nodes"].detail
    assert detail.endswith("; and 92 more")


def scrub(target: int, **values: Any) -> dict[str, Any]:
    status = {"damaged": 0, "different": 0, "due_unix_s": 1_000_000_000} | values
    return {"target": target, "scrub": status, "trouble": None}


def test_findings_of_scrubs() -> None:
    now = 1_000_000_000.0
    assert of(check_scrubs([scrub(1)], now))["scrub"].severity is OK
    damaged = of(check_scrubs([scrub(1), scrub(2, damaged=3)], now))["scrub"]
    assert damaged.severity is PROBLEM
    assert "target-2: 3 chunks damaged" in damaged.detail
    late = of(check_scrubs([scrub(1, due_unix_s=now - 22 * 86_400)], now))["scrub"]
    assert (late.severity, late.detail) == (WARNING, "target-1 is overdue")
    silent = {"target": 1, "scrub": None, "trouble": "no reply"}
    assert of(check_scrubs([silent], now))["scrub"].detail == "target-1: no reply"


def machine(root: Path, release: str = "6.12.1", mountinfo: str = "") -> Path:
    """A root folder with the files that the checks read."""
    for path, content in {
        "proc/sys/kernel/osrelease": f"{release}\n",
        "proc/sys/kernel/io_uring_disabled": "0\n",
        "proc/self/mountinfo": mountinfo,
    }.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(content)
    return root


MOUNTINFO = (
    "21 1 0:5 / /proc rw - proc proc rw\n"
    "80 21 0:44 / /mnt/with\\040space rw,nosuid shared:1 - fuse.hf3fs 3fs rw\n"
    "81 21 0:45 / /mnt/other rw - fuse.sshfs host rw\n"
    "82 21 0:46 / /mnt/second rw - fuse.hf3fs 3fs rw\n"
)


def test_mounts_are_those_of_3fs() -> None:
    assert mounts_of(MOUNTINFO) == ["/mnt/with space", "/mnt/second"]
    assert mounts_of("garbage\n\n - \n") == []


def test_findings_of_a_machine(tmp_path: Path) -> None:
    root = machine(tmp_path, mountinfo=MOUNTINFO)
    findings = list(check_machine(root, lambda _points: {"/mnt/second"}))
    by_name = of(findings)
    assert by_name["kernel"].severity is OK
    assert by_name["FUSE"].detail == "no device /dev/fuse"
    silent = next(finding for finding in findings if finding.severity is PROBLEM)
    assert silent.detail.startswith("/mnt/with space did not reply")
    assert by_name["mounts"].detail == "1 of 2 reply"

    (root / "proc/sys/kernel/io_uring_disabled").write_text("2\n")
    machine(tmp_path, release="6.8.0-generic")
    (root / "proc/sys/kernel/io_uring_disabled").write_text("2\n")
    by_name = of(check_machine(root, lambda _points: set()))
    assert by_name["kernel"].severity is WARNING
    assert by_name["io_uring"].severity is WARNING
    assert (
        of(check_machine(tmp_path / "empty", lambda _points: set()))["kernel"].severity is WARNING
    )


def test_addresses_that_refuse_are_named_with_the_reason() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound, and does not listen
        listening = f"127.0.0.1:{listener.getsockname()[1]}"
        refusing = f"127.0.0.1:{closed.getsockname()[1]}"
        known = [listening, refusing, "no port"]
        refusals = unreachable(known)
    assert set(refusals) == {refusing, "no port"}
    assert check_services("meta", [listening], refusals).severity is OK
    finding = check_services("meta", known, refusals)
    assert finding.severity is PROBLEM
    assert f"2 of 3 are not reachable from this machine: {refusing}: " in finding.detail


def test_findings_of_credentials(
    cluster: Any, client: threefs.Client, folder: str, tmp_path: Path
) -> None:
    now = time.time()
    key = ClusterFile.read(cluster.file)
    assert check_credential(key, now).severity is OK

    def of_file(path: Path, at: float = now) -> Finding:
        return check_credential(ClusterFile(key.mgmtd, key.meta, str(path)), at)

    client.set_quota(folder, bytes_max=1 << 30)
    ticket = tmp_path / "ticket"
    issue(cluster.file, folder, read_only=False, expires="1h", node="n", to=ticket)
    assert of_file(ticket).severity is OK
    assert of_file(ticket, now + 3500).severity is WARNING
    expired = of_file(ticket, now + 3700)
    assert (expired.severity, "expired" in expired.detail) == (PROBLEM, True)
    ticket.chmod(0o644)
    assert "other users" in of_file(ticket).detail
    assert of_file(tmp_path / "missing").severity is PROBLEM


def doctor(*arguments: str) -> tuple[int, dict[str, Any]]:
    result = subprocess.run(
        [sys.executable, "-m", "threefs", "doctor", "-o", "json", *arguments],
        capture_output=True,
        timeout=120,
        check=False,
        env={key: value for key, value in os.environ.items() if key != "THREEFS_CLUSTER"},
    )
    document: dict[str, Any] = json.loads(result.stdout)
    return result.returncode, document


def problems(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Those of the cluster: the machine may have mounts of other clusters."""
    return [
        it for it in document["findings"] if it["severity"] == "problem" and it["name"] != "mounts"
    ]


def test_a_running_cluster_and_then_a_stopped_service(start_cluster: Callable[..., Any]) -> None:
    cluster = start_cluster()
    cluster.wait_whole()
    _, document = doctor("--cluster", str(cluster.file))
    assert problems(document) == [], "the cluster is sound"
    of_cluster = {it["name"]: it for it in document["findings"]}
    assert of_cluster["storage connections"]["detail"] == "3 of 3 accept connections"

    cluster.kill("storage-2", signal.SIGSTOP)
    cluster.wait_for(
        lambda: any(not node["alive"] for node in cluster.status()["cluster"]["nodes"]),
        60,
        "dead node",
    )
    status, document = doctor("--cluster", str(cluster.file))
    details = [it["detail"] for it in problems(document)]
    assert status == 1
    assert any("node-2" in detail and "dead" in detail for detail in details), details
    cluster.kill("storage-2", signal.SIGCONT)


def test_without_a_cluster_only_the_machine_is_checked(tmp_path: Path) -> None:
    _, document = doctor()
    assert {"kernel", "FUSE", "mounts"} <= {it["name"] for it in document["findings"]}
    status, document = doctor("--cluster", str(tmp_path / "missing.json"))
    assert status == 1
    assert document["findings"][-1]["name"] == "cluster file"
