"""A mount whose daemon holds a ticket and not the cluster's key."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest
from holding import held
from threefs.cli.credential import issue

if TYPE_CHECKING:
    from pathlib import Path

    import threefs


def test_a_mount_with_a_ticket_is_its_directory(
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
    mount = held(file, "/data", tmp_path, 0, claim_for="node-1")
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
