"""The trash of volumes on a real cluster: commands, credentials, expiry."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import threefs
from threefs import errors
from threefs.cli.credential import issue

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: Expiry looks every 10 s.
EXPIRY_SECONDS = 90


def trash(cluster: Any, *options: str, status: int = 0) -> str:
    """Run `threefs trash`; return what it printed."""
    command = [sys.executable, "-m", "threefs", "trash", *options, "--cluster", str(cluster.file)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == status, result.stderr
    return result.stdout if status == 0 else result.stderr


@contextlib.contextmanager
def holder(cluster: Any, volume: str, folder: Path, **options: bool) -> Iterator[threefs.Client]:
    """A client with a credential for a volume."""
    ticket, file = folder / "ticket", folder / "cluster.json"
    arguments: Any = {"read_only": False, "expires": "1h", "node": ""} | options
    issue(cluster.file, volume, to=ticket, **arguments)
    file.write_text(json.dumps(json.loads(cluster.file.read_text()) | {"key_file": str(ticket)}))
    with threefs.connect(file, timeout_seconds=20) as client:
        yield client


def paths(client: threefs.Client, volume: str) -> list[str | None]:
    return sorted(entry.path or "" for entry in client.trash(volume).entries())


@pytest.fixture
def volume(cluster: Any, client: threefs.Client, folder: str) -> Iterator[str]:
    """A directory with a quota whose removed files are kept."""
    path = f"{folder}/volume"
    client.mkdir(path)
    client.set_quota(path, bytes_max=1 << 20)
    trash(cluster, "keep", path, "7d")
    yield path
    trash(cluster, "purge", path, "--all")


def test_a_removed_tree_is_listed_and_restored(
    cluster: Any, client: threefs.Client, volume: str
) -> None:
    client.mkdir(f"{volume}/run/deep", parents=True)
    client.write_file(f"{volume}/run/deep/model", b"model")
    client.write_file(f"{volume}/run/log", b"first")
    client.write_file(f"{volume}/run/log", b"second")
    for path in ("run/deep/model", "run/log"):
        client.remove(f"{volume}/{path}")
    for path in ("run/deep", "run"):
        client.rmdir(f"{volume}/{path}")
    listed = json.loads(trash(cluster, "list", volume, "-o", "json"))
    assert (listed["keep_seconds"], listed["more"]) == (7 * 86_400, False)
    files = [entry["path"] for entry in listed["entries"] if entry["kind"] == "file"]
    assert sorted(files) == ["run/deep/model", "run/log", "run/log"]
    table = trash(cluster, "list", volume, "run/deep").splitlines()
    assert [line.split()[-1] for line in table] == ["PATH", "run/deep/model", "run/deep"]
    assert max(map(len, table)) <= 80
    assert "restored" in trash(cluster, "restore", volume, "run")
    assert client.read_file(f"{volume}/run/deep/model") == b"model"
    assert client.read_file(f"{volume}/run/log") == b"second"
    older = json.loads(trash(cluster, "list", volume, "-o", "json"))["entries"]
    assert [entry["path"] for entry in older] == ["run/log"]
    # What exists is not replaced.
    refused = trash(cluster, "restore", volume, "run/log", status=1)
    assert "already exists" in refused
    trash(cluster, "restore", volume, "--id", older[0]["id"], "--to", f"{volume}/first")
    assert client.read_file(f"{volume}/first") == b"first"
    assert "no entry" in trash(cluster, "restore", volume, "run", status=102)


def test_a_full_volume_is_freed_by_a_purge(
    cluster: Any, client: threefs.Client, volume: str
) -> None:
    client.write_file(f"{volume}/big", b"x" * (1 << 20))
    client.remove(f"{volume}/big")
    with pytest.raises(errors.QuotaExceeded):
        client.write_file(f"{volume}/more", b"y")
    trash(cluster, "purge", volume, "--older-than", "1d")
    assert paths(client, volume) == ["big"]
    assert "purged 1 entries" in trash(cluster, "purge", volume, "big")
    client.write_file(f"{volume}/more", b"y")


def test_what_is_kept_expires_without_a_retention(
    cluster: Any, client: threefs.Client, volume: str
) -> None:
    client.write_file(f"{volume}/file", b"x")
    client.remove(f"{volume}/file")
    assert client.trash_count() >= 1
    trash(cluster, "keep", volume, "off")
    cluster.wait_for(lambda: not paths(client, volume), EXPIRY_SECONDS, "empty trash")
    quota = client.quota(volume)
    assert quota is not None
    assert (quota.bytes_used, quota.inodes_used) == (0, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["keep", "VOLUME", "1w"], "the retention is `1w`"),
        (["keep", "/", "1d"], "has no quota"),
        (["list", "/"], "has no quota"),
        (["restore", "VOLUME"], "pass paths"),
        (["restore", "VOLUME", "--id", "x"], "not the id of an entry"),
        (["restore", "VOLUME", "--id", "1-1"], "entry 1-1 of the trash"),
        (["restore", "VOLUME", "path", "--to", "/x"], "--to needs --id"),
        (["purge", "VOLUME"], "--all"),
        (["purge", "VOLUME", "path", "--all"], "--all"),
    ],
)
def test_a_wrong_option_is_refused_with_the_remedy(
    cluster: Any, volume: str, options: list[str], message: str
) -> None:
    arguments = [volume if option == "VOLUME" else option for option in options]
    command = [sys.executable, "-m", "threefs", "trash", *arguments, "-c", str(cluster.file)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode != 0
    assert message in result.stderr


def test_a_credential_uses_the_trash_of_its_volume(
    cluster: Any, client: threefs.Client, volume: str, tmp_path: Path
) -> None:
    client.write_file(f"{volume}/file", b"mine")
    with holder(cluster, volume, tmp_path) as files:
        files.remove("/file")
        (entry,) = files.trash("/").entries()
        assert entry.path == "file"
        with pytest.raises(errors.PermissionDenied):
            files.trash("/").keep(0)
        with pytest.raises(errors.PermissionDenied):
            files.trash_count()
        files.trash("/").restore(entry.id)
        assert files.read_file("/file") == b"mine"
    with holder(cluster, volume, tmp_path, read_only=True) as files:
        client.remove(f"{volume}/file")
        (entry,) = files.trash("/").entries()
        with pytest.raises(errors.PermissionDenied):
            files.trash("/").restore(entry.id)
        with pytest.raises(errors.PermissionDenied):
            files.trash("/").purge([entry.id])
