"""Load of a real cluster: two clients of two volumes, services that stop and restart, tenants."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import threefs
from threefs import errors
from threefs.cli.credential import issue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

#: Far longer than a service takes to restart, or a measurement.
SECONDS = 120


def holder(cluster: Any, path: str, node: str, folder: Path) -> threefs.Client:
    """A client with a ticket for one directory."""
    ticket = folder / f"ticket-{node}"
    issue(cluster.file, path, to=ticket, read_only=False, expires="1h", node=node)
    data = json.loads(cluster.file.read_text()) | {"key_file": str(ticket)}
    file = ticket.with_suffix(".json")
    file.write_text(json.dumps(data))
    return threefs.connect(file, timeout_seconds=SECONDS)


@contextmanager
def repeated(work: Callable[[], object]) -> Iterator[None]:
    """Load, until the block ends."""
    ended = threading.Event()

    def run() -> None:
        while not ended.is_set():
            work()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def command(cluster: Any, *options: str) -> list[str]:
    return [sys.executable, "-m", "threefs", "top", "--cluster", str(cluster.file), *options]


def measured(cluster: Any) -> tuple[int, dict[str, Any]]:
    """One measurement of the command."""
    result = subprocess.run(
        command(cluster, "--once", "--interval", "0.5", "-o", "json"),
        stdout=subprocess.PIPE,
        timeout=SECONDS,
        check=False,
    )
    top: dict[str, Any] = json.loads(result.stdout)
    return result.returncode, top


def usage(client: threefs.Client) -> dict[str, dict[str, Any]]:
    return {f"{it['kind']} {it['name']}": it for it in json.loads(client.usage())}


def test_two_clients_of_two_volumes(
    cluster: Any, client: threefs.Client, folder: str, tmp_path: Path
) -> None:
    inodes = {}
    for name in ("reads", "writes"):
        client.mkdir(f"{folder}/{name}")
        client.set_quota(f"{folder}/{name}", bytes_max=1 << 30)
        inodes[name] = client.stat(f"{folder}/{name}").inode
    data = os.urandom(1_000_000)
    with ExitStack() as stack:
        reader = stack.enter_context(holder(cluster, f"{folder}/reads", "node-r", tmp_path))
        writer = stack.enter_context(holder(cluster, f"{folder}/writes", "node-w", tmp_path))
        reader.batch_write([("/file", 0, data)], create=True)
        stack.enter_context(repeated(lambda: reader.batch_read([("/file", 0, None)])))
        stack.enter_context(repeated(lambda: writer.batch_write([("/file", 0, data)], create=True)))

        def both() -> tuple[dict[str, Any], dict[str, Any]] | None:
            status, top = measured(cluster)
            assert status == 0
            rows = {(it["volume"], it["host"]): it for it in top["callers"]}
            read, written = (
                rows.get((inodes["reads"], "node-r")),
                rows.get((inodes["writes"], "node-w")),
            )
            if read is None or written is None:
                return None
            active = all(sum(row["storage"].values()) > 0 for row in (read, written))
            return (read, written) if active else None

        read, written = cluster.wait_for(both, SECONDS, "measurement with both clients")
    assert read["path"] == f"{folder}/reads"
    assert read["storage"]["read_bytes_per_second"] > 0
    assert read["storage"]["written_bytes_per_second"] == 0
    assert written["storage"]["written_bytes_per_second"] > 0
    assert written["storage"]["read_bytes_per_second"] == 0
    # The bytes are per second, and not those since the start of the services.
    with threefs.connect(cluster.file) as admin:
        usage(admin)
        for service in usage(admin).values():
            of_volumes = [it for it in service["callers"] if it["volume"] in inodes.values()]
            assert [it for it in of_volumes if it["written_bytes"] or it["read_bytes"]] == []


def test_services_that_do_not_reply_or_restart_are_named(start_cluster: Any) -> None:
    cluster = start_cluster()
    services = {"mgmtd", "meta", "storage node-1", "storage node-2", "storage node-3"}
    with threefs.connect(cluster.file) as client:

        def names(report: dict[str, Any]) -> set[str]:
            return {name if "storage" in name else name.split()[0] for name in report}

        assert names(usage(client)) == services
        report = usage(client)
        assert all(it["elapsed_ms"] is not None for it in report.values())

        cluster.kill("storage-3", signal.SIGSTOP)
        try:

            def silent() -> dict[str, Any] | None:
                report = usage(client)
                assert names(report) == services
                return report["storage node-3"] if report["storage node-3"]["trouble"] else None

            # The signal is delivered to the threads of the process one after the other.
            stopped = cluster.wait_for(silent, SECONDS, "a report without the stopped service")
            assert (stopped["elapsed_ms"], stopped["callers"]) == (None, [])
            status, top = measured(cluster)
            assert status == 1
            [unreached] = [it for it in top["services"] if it["trouble"]]
            assert unreached["name"] == "node-3"
        finally:
            cluster.kill("storage-3", signal.SIGCONT)

        cluster.kill("meta")
        cluster.kill("storage-1")
        seen: dict[str, list[bool]] = {"meta": [], "storage": []}

        def all_report() -> bool:
            report = usage(client)
            assert names(report) == services
            [meta] = [it for it in report.values() if it["kind"] == "meta"]
            for name, it in (("meta", meta), ("storage", report["storage node-1"])):
                if it["trouble"] is None:
                    seen[name].append(it["elapsed_ms"] is not None)
            return all(it["elapsed_ms"] is not None for it in report.values())

        cluster.wait_for(all_report, SECONDS, "rates of all services")
        # No rates from counters of two runs.
        assert [flags[0] for flags in seen.values()] == [False, False]


def test_a_tenant_sees_no_callers(
    cluster: Any, client: threefs.Client, folder: str, tmp_path: Path
) -> None:
    client.set_quota(folder)
    with (
        holder(cluster, folder, "node-1", tmp_path) as tenant,
        pytest.raises(errors.PermissionDenied, match="needs the cluster's key"),
    ):
        tenant.usage()


@pytest.mark.parametrize("output", ["table", "json"])
def test_ctrl_c_ends_the_lines_of_a_pipe_with_status_0(cluster: Any, output: str) -> None:
    with subprocess.Popen(
        command(cluster, "--interval", "0.1", "-o", output),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(4)]
        process.send_signal(signal.SIGINT)
        _, errors_of_process = process.communicate(timeout=SECONDS)
    assert (process.returncode, errors_of_process) == (0, b"")
    if output == "json":
        assert all(len(json.loads(line)["services"]) == 5 for line in lines)
    else:
        assert lines[0].startswith(b"1 mgmtd, 1 meta, 3 storage: ")


def test_ctrl_c_leaves_a_terminal_with_its_cursor(cluster: Any) -> None:
    terminal, end = pty.openpty()
    environment = os.environ | {"COLUMNS": "60", "LINES": "20", "TERM": "xterm"}
    process = subprocess.Popen(
        command(cluster, "--interval", "0.1"), stdout=end, stderr=end, env=environment
    )
    os.close(end)
    shown, deadline = b"", time.monotonic() + SECONDS
    while shown.count(b"VOLUME") < 3 and time.monotonic() < deadline:
        if select.select([terminal], [], [], 1)[0]:
            shown += os.read(terminal, 1 << 16)
    process.send_signal(signal.SIGINT)
    while True:
        try:
            read = os.read(terminal, 1 << 16)
        except OSError:  # the process has closed the terminal
            break
        shown += read
    os.close(terminal)
    assert process.wait(SECONDS) == 0
    assert b"Traceback" not in shown
    assert shown.rfind(b"\x1b[?25h") > shown.rfind(b"\x1b[?25l") >= 0
