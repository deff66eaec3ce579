"""Tickets and key rotation against a running cluster: what a volume's credential can reach."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import stat
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import threefs
from threefs import errors
from threefs.cli.credential import issue, show
from threefs.cli.output import Output
from threefs.durations import seconds_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def ticket_cluster(cluster: Any, ticket: Path) -> Path:
    """A cluster.json with a ticket instead of the key."""
    data = json.loads(cluster.file.read_text()) | {"key_file": str(ticket)}
    file = ticket.with_suffix(".json")
    file.write_text(json.dumps(data))
    return file


@contextlib.contextmanager
def holder(cluster: Any, folder: str, tmp_path: Path, **options: Any) -> Iterator[threefs.Client]:
    ticket = tmp_path / f"ticket-{secrets.token_hex(4)}"
    arguments: Any = {"read_only": False, "expires": "1h", "node": "node-1"} | options
    issue(cluster.file, folder, to=ticket, **arguments)
    assert stat.S_IMODE(ticket.stat().st_mode) == 0o600
    with threefs.connect(ticket_cluster(cluster, ticket), timeout_seconds=20) as files:
        yield files


def test_the_holder_of_a_ticket_sees_only_its_directory(
    cluster: Any, client: threefs.Client, folder: str, tmp_path: Path
) -> None:
    for name in ("mine", "theirs"):
        client.mkdir(f"{folder}/{name}")
        client.set_quota(f"{folder}/{name}", bytes_max=1 << 30)
    client.batch_write([(f"{folder}/theirs/secret", 0, b"not yours")], create=True)
    content = os.urandom(3_000_000)
    with holder(cluster, f"{folder}/mine", tmp_path) as files:
        files.batch_write([("/data", 0, content)], create=True)
        assert files.batch_read([("/data", 0, None)]) == [content]
        assert client.batch_read([(f"{folder}/mine/data", 0, None)]) == [content]
        assert files.listdir("/") == ["data"]
        for path in (f"{folder}/theirs/secret", "/../theirs/secret", "/../../theirs/secret"):
            with pytest.raises(errors.NotFound):
                files.batch_read([(path, 0, None)])
        files.symlink("../theirs/secret", "/out")
        with pytest.raises(PermissionError):
            files.batch_read([("/out", 0, None)])
        with pytest.raises(PermissionError):
            files.set_quota("/", bytes_max=None)
        with pytest.raises(PermissionError):
            files.setxattr("/", "user.threefs.volume", b"{}")
        assert files.statfs("/").bytes_total == 1 << 30
        files.rename("/data", "/renamed")
        files.remove("/renamed")


def test_a_read_only_ticket_changes_nothing(
    cluster: Any, client: threefs.Client, folder: str, tmp_path: Path
) -> None:
    client.set_quota(folder)
    client.batch_write([(f"{folder}/file", 0, b"as it was")], create=True)
    with holder(cluster, folder, tmp_path, read_only=True) as files:
        assert files.batch_read([("/file", 0, None)]) == [b"as it was"]
        with pytest.raises(PermissionError):
            files.mkdir("/more")
        with pytest.raises(PermissionError):
            files.remove("/file")
        with pytest.raises(PermissionError):
            files.batch_write([("/file", 0, b"else")], create=False)
    assert client.batch_read([(f"{folder}/file", 0, None)]) == [b"as it was"]


def test_issuing_and_showing(
    cluster: Any, client: threefs.Client, folder: str, tmp_path: Path, capsys: Any
) -> None:
    client.mkdir(f"{folder}/plain")
    to = tmp_path / "ticket"
    arguments: Any = {"read_only": True, "expires": "90s", "node": "", "to": to}
    with pytest.raises(errors.InvalidArgument, match="set_quota"):
        issue(cluster.file, f"{folder}/plain", **arguments)
    client.set_quota(f"{folder}/plain")
    issue(cluster.file, f"{folder}/plain", **arguments)
    show(to, Output.JSON)
    text = capsys.readouterr().out
    ticket_fields = json.loads(text)
    assert ticket_fields["path"] == f"{folder}/plain"
    assert ticket_fields["readOnly"] is True
    assert to.read_text().strip().rsplit(":", 1)[1] not in text
    # Services do not start with a ticket instead of the key, and it cannot issue tickets.
    with pytest.raises(errors.InvalidArgument, match="ticket"):
        issue(ticket_cluster(cluster, to), "/", **arguments)


@pytest.mark.parametrize("text", ["", "1", "h", "0h", "-1h", "1.5h", "367d", "9" * 30 + "s", "1h "])
def test_a_wrong_duration_is_named(text: str) -> None:
    with pytest.raises(errors.InvalidArgument, match="--expires"):
        seconds_of("--expires", text)


def test_durations() -> None:
    assert [seconds_of("--expires", text) for text in ("90s", "2m", "1h", "7d")] == [
        90,
        120,
        3600,
        604_800,
    ]


def test_keys_are_rotated_under_load(start_cluster: Any) -> None:
    """All services and a client read one key file, which is replaced three times."""
    cluster = start_cluster("rotated")
    key_file = cluster.folder / "key"
    old, new = f"0:{key_file.read_text().strip()}", f"1:{secrets.token_hex(32)}"
    stop, failed, count = threading.Event(), [], [0]

    def write() -> None:
        with cluster.client() as files:
            while not stop.is_set():
                try:
                    files.batch_write([(f"/{count[0] % 7}", 0, os.urandom(4096))], create=True)
                    # New connections, too.
                    with cluster.client() as fresh:
                        fresh.listdir("/")
                except threefs.ThreeFSError as error:
                    failed.append(error)
                    return
                count[0] += 1

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for content in (f"{old}\n{new}\n", f"{new}\n{old}\n", f"{new}\n"):
            temporary = key_file.with_suffix(".new")
            temporary.write_text(content)
            temporary.rename(key_file)
            # Key files are reloaded at most a second after their last use.
            before, until = count[0], time.monotonic() + 3
            while time.monotonic() < until or count[0] < before + 3:
                assert writer.is_alive(), failed
                time.sleep(0.05)
    finally:
        stop.set()
        writer.join()
    assert not failed
    log = "".join(path.read_text() for path in (cluster.folder / "logs").glob("*"))
    # A client that is closed early aborts its handshakes; refusals of a key have other messages.
    for refusal in ("holds another key", "uses key", "invalid ticket"):
        assert refusal not in log
