"""A mount whose daemon has a ticket instead of the cluster's key."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from holding import start_mount
from threefs.cli.credential import issue
from threefs.confine import confine
from threefs.errors import InvalidArgument

if TYPE_CHECKING:
    import threefs

USER = 0x7000_0001
MIB = 1 << 20


def test_a_mount_with_a_ticket_shows_the_directory_of_the_ticket(
    cluster: Any, client: threefs.Client, folder: str, tmp_path: Path
) -> None:
    for name in ("mine", "theirs"):
        client.make_directory(f"{folder}/{name}", 0o755)
        client.set_quota(f"{folder}/{name}", bytes_max=1 << 30)
        client.make_directory(f"{folder}/{name}/data", 0o777)
    client.batch_write([(f"{folder}/theirs/data/secret", 0, b"not yours")], create=True)
    ticket = tmp_path / "ticket"
    issue(cluster.file, f"{folder}/mine", read_only=False, expires="1h", node="", to=ticket)
    file = tmp_path / "cluster.json"
    file.write_text(json.dumps(json.loads(cluster.file.read_text()) | {"key_file": str(ticket)}))
    mount = start_mount(file, "/data", tmp_path, 0, claim_for="node-1")
    try:
        top = mount.target
        content = os.urandom(2_500_000)
        (top / "deep").mkdir()
        (top / "deep" / "file").write_bytes(content)
        assert (top / "deep" / "file").read_bytes() == content
        os.rename(top / "deep" / "file", top / "moved")
        os.truncate(top / "moved", 1000)
        assert (top / "moved").read_bytes() == content[:1000]
        assert client.batch_read([(f"{folder}/mine/data/moved", 0, None)]) == [content[:1000]]
        assert os.statvfs(top).f_blocks * os.statvfs(top).f_frsize == 1 << 30
        (top / "out").symlink_to("../../theirs/data/secret")
        with pytest.raises(FileNotFoundError):
            (top / "out").read_bytes()
        with pytest.raises(PermissionError):
            os.setxattr(top, "user.threefs.volume", b"{}")
        claim = client.claim_of(f"{folder}/mine")
        assert claim is not None
        assert claim[0] == "node-1"
    finally:
        mount.close()


def test_a_range_truncated_by_another_client_is_reserved_again(
    cluster: Any, client: threefs.Client, folder: str, tmp_path: Path
) -> None:
    """The mount assumes a larger reservation than exists; its earlier capability has expired."""
    client.make_directory(f"{folder}/mine", 0o755)
    client.set_quota(f"{folder}/mine", bytes_max=1 << 30)
    ticket, file = tmp_path / "ticket", tmp_path / "cluster.json"
    issue(cluster.file, f"{folder}/mine", read_only=False, expires="45s", node="", to=ticket)
    expired = time.time() + 45
    file.write_text(json.dumps(json.loads(cluster.file.read_text()) | {"key_file": str(ticket)}))
    mount = start_mount(file, "/", tmp_path, 0)
    try:
        descriptor = os.open(mount.target / "file", os.O_WRONLY | os.O_CREAT)
        # With the second one it reserves in advance.
        for _ in range(2):
            os.write(descriptor, b"1" * MIB)
            os.fsync(descriptor)
        assert time.time() < expired, "a ticket of 45 s is too short here"
        issue(cluster.file, f"{folder}/mine", read_only=False, expires="1h", node="", to=ticket)
        with client.open(f"{folder}/mine/file", "r+b") as other:
            other.truncate(0)
        while time.time() < expired + 1:
            time.sleep(0.1)
        assert os.pwrite(descriptor, b"2" * 4096, 2 * MIB) == 4096
        os.close(descriptor)
        content = client.read_file(f"{folder}/mine/file")
        assert content == bytes(2 * MIB) + b"2" * 4096
    finally:
        mount.close()


def test_a_confined_daemon_serves_without_privileges(
    cluster: Any, client: threefs.Client, folder: str, tmp_path: Path
) -> None:
    """It runs as a user that owns its state and may read its ticket, and so do its replacements."""
    for path in (
        tmp_path,
        *(parent for parent in tmp_path.parents if parent.name.startswith(("pytest", "popen"))),
    ):
        path.chmod(path.stat().st_mode | 0o011)
    client.make_directory(f"{folder}/mine", 0o755)
    client.set_quota(f"{folder}/mine", bytes_max=1 << 30)
    client.make_directory(f"{folder}/mine/data", 0o777)
    ticket, file, state = (tmp_path / name for name in ("ticket", "cluster.json", "state-0"))
    issue(cluster.file, f"{folder}/mine", read_only=False, expires="1h", node="", to=ticket)
    file.write_text(json.dumps(json.loads(cluster.file.read_text()) | {"key_file": str(ticket)}))
    state.touch(0o600)
    os.chown(state, USER, USER)
    os.chown(ticket, 0, USER)
    ticket.chmod(0o640)
    mount = start_mount(file, "/data", tmp_path, 0, claim_for="node-1", write_back=True, user=USER)
    try:
        content = os.urandom(64 << 20)
        (mount.target / "file").write_bytes(content)
        assert _rights(mount.pid) == {
            "Uid": str(USER), "Gid": str(USER), "Groups": "", "NoNewPrivs": "1",
            "CapEff": "0", "CapPrm": "0", "CapAmb": "0",
            "Seccomp": "2",
        }  # fmt: skip
        limits = Path(f"/proc/{mount.pid}/limits").read_text().splitlines()
        [data] = [line.split()[3] for line in limits if line.startswith("Max data size")]
        assert int(data) == 1 << 30
        mount.respawn()
        assert _rights(mount.pid)["Uid"] == str(USER)
        assert (mount.target / "file").read_bytes() == content
        os.chown(mount.target / "file", 1000, 1000)
        os.setxattr(mount.target / "file", "user.x", b"1")
    finally:
        mount.close()


def _rights(pid: int) -> dict[str, str]:
    """Status fields of the process, which must be equal for each of its threads."""
    statuses = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            statuses.append((thread / "status").read_text())
    [rights] = {tuple(_rights_of(status).items()) for status in statuses}
    return dict(rights)


def _rights_of(status: str) -> dict[str, str]:
    rights = {}
    for line in status.splitlines():
        name, _, value = line.partition(":")
        if name in ("Uid", "Gid", "Groups", "NoNewPrivs", "Seccomp"):
            rights[name] = " ".join(sorted(set(value.split())))
        elif name in ("CapEff", "CapPrm", "CapAmb"):
            rights[name] = f"{int(value, 16):x}"
    return rights


def test_a_daemon_that_cannot_be_confined_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon never serves with more privileges than requested."""
    for user in (-1, 0):
        with pytest.raises(InvalidArgument, match="not root"):
            confine(user)
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    with pytest.raises(InvalidArgument, match="only root"):
        confine(USER)
