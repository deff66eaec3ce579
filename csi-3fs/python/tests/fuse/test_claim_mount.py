"""Mounts for one node: cached writes, and service only while the claim is held."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from test_fsx import Pair

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import threefs
    from holding import HeldMount

PATIENCE_SECONDS = 60.0
CLAIM_SECONDS = 2.0


@pytest.fixture
def claimed(mount: Callable[..., HeldMount]) -> HeldMount:
    return mount(claim_for="node-a", claim_seconds=CLAIM_SECONDS, write_back=True)


def volume_of(mount: HeldMount) -> str:
    return os.path.dirname(mount.root)


def test_cached_writes_are_durable_after_a_close(
    claimed: HeldMount, client: threefs.Client
) -> None:
    data = os.urandom(5 << 20)
    path = claimed.target / "file"
    path.write_bytes(data)
    assert client.read_file(f"{claimed.root}/file") == data
    with path.open("ab") as file:
        file.write(b"more")
        file.flush()
        os.fsync(file.fileno())
        assert client.read_file(f"{claimed.root}/file") == data + b"more"
    os.truncate(path, 1000)
    assert client.read_file(f"{claimed.root}/file") == data[:1000]
    os.utime(path, ns=(1_000_000_001, 2_000_000_003))
    assert path.stat().st_mtime_ns == 2_000_000_003


@pytest.mark.parametrize("kills", [False, True])
def test_a_file_with_cached_writes_behaves_as_on_a_local_file_system(
    claimed: HeldMount, tmp_path: Path, kills: bool
) -> None:
    seed = int(os.environ.get("THREEFS_FSX_SEED", "11"))
    pair = Pair(claimed.target / "file", tmp_path / "file", seed)
    for number in range(200):
        pair.step()
        if kills and number % 50 == 25:
            claimed.respawn()
    pair.do_reopen()
    pair.do_size()
    for file in pair.files:
        os.close(file)
    assert (claimed.target / "file").read_bytes() == (tmp_path / "file").read_bytes()


def test_a_claim_of_another_node_makes_all_operations_fail(
    claimed: HeldMount, client: threefs.Client
) -> None:
    path = claimed.target / "file"
    path.write_bytes(b"mine")
    volume = volume_of(claimed)
    claim = client.claim_of(volume)
    assert claim is not None
    assert claim[0] == "node-a"
    # A stopped daemon cannot renew; another node observes the unchanged claim and takes it.
    claimed.signal(signal.SIGSTOP)
    deadline = time.monotonic() + PATIENCE_SECONDS
    new_claim = ("", 0)
    while new_claim[0] != "node-b":
        assert time.monotonic() < deadline
        new_claim = client.claim(volume, "node-b", client.claim_of(volume))
    time.sleep(CLAIM_SECONDS)
    claimed.signal(signal.SIGCONT)
    with pytest.raises(OSError, match="Input/output error") as excinfo:
        os.stat(claimed.target / "other")
    assert excinfo.value.errno == errno.EIO
    assert client.read_file(f"{claimed.root}/file") == b"mine"
    # The next daemon reads the other node's name, too, and fails operations immediately.
    claimed.respawn()
    with pytest.raises(OSError, match="Input/output error"):
        os.stat(claimed.target / "another")


def test_a_claim_that_another_node_had_meanwhile_is_not_retaken(
    claimed: HeldMount, client: threefs.Client
) -> None:
    """Earlier cached writes must not overwrite the data of that node."""
    volume = volume_of(claimed)
    claimed.signal(signal.SIGSTOP)
    deadline = time.monotonic() + PATIENCE_SECONDS
    claim = ("", 0)
    while claim[0] != "node-b":
        assert time.monotonic() < deadline
        claim = client.claim(volume, "node-b", client.claim_of(volume))
    client.unclaim(volume, "node-b")
    claimed.signal(signal.SIGCONT)
    number = 0
    with pytest.raises(OSError, match="Input/output error"):
        # Until the daemon detects that, its last renewal is valid.
        while time.monotonic() < deadline:
            number += 1
            with suppress(FileNotFoundError):
                os.stat(claimed.target / f"other-{number}")
            time.sleep(0.05)
    assert client.claim_of(volume) is None
    claimed.respawn()
    with pytest.raises(OSError, match="Input/output error"):
        os.stat(claimed.target / "another")
    assert client.claim_of(volume) is None


def take_for_another(mount: HeldMount, client: threefs.Client) -> str:
    """Let node-b take the claim of a mount whose daemon is stopped; returns the volume."""
    volume = volume_of(mount)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while client.claim(volume, "node-b", client.claim_of(volume))[0] != "node-b":
        assert time.monotonic() < deadline
    return volume


def test_a_length_that_was_not_reported_under_the_claim_is_never_reported(
    mount: Callable[..., HeldMount], client: threefs.Client
) -> None:
    """It would undo a truncation of the next node."""
    mounted = mount(claim_for="node-a", claim_seconds=CLAIM_SECONDS)
    path, remote = mounted.target / "file", f"{mounted.root}/file"
    file = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.write(file, b"reported")
    os.write(file, b"not reported yet")
    mounted.signal(signal.SIGSTOP)
    take_for_another(mounted, client)
    # A node takes a claim only after a renewal of the former holder has expired.
    time.sleep(CLAIM_SECONDS)
    with client.open_raw(remote, "r+b") as same:
        same.truncate(3)
    mounted.signal(signal.SIGCONT)
    with pytest.raises(OSError, match="Input/output error"):
        os.stat(mounted.target / "other")
    # The close and the end of the daemon report the remaining lengths.
    with pytest.raises(OSError, match="Input/output error"):
        os.close(file)
    mounted.close()
    assert client.read_file(remote) == b"rep"


def test_a_length_that_a_close_could_not_report_is_reported_at_the_end(
    mount: Callable[..., HeldMount], cluster: Any, client: threefs.Client
) -> None:
    mounted = mount(timeout_seconds=2.0)
    file = os.open(mounted.target / "file", os.O_WRONLY | os.O_CREAT)
    pid = cluster.kill("meta", signal.SIGSTOP)
    try:
        os.write(file, b"all of it")  # needs only storage
        with pytest.raises(OSError, match=r"timed out|Input/output"):
            os.close(file)
        time.sleep(6.0)  # the duration of the daemon's retries, whose end is not visible
    finally:
        os.kill(pid, signal.SIGCONT)
    mounted.close()
    assert client.read_file(f"{mounted.root}/file") == b"all of it"


def test_writes_survive_an_outage_of_storage_while_the_claim_is_renewed(
    mount: Callable[..., HeldMount], cluster: Any, client: threefs.Client
) -> None:
    """Longer than one renewal is valid, plus the former extension for running operations."""
    mounted = mount(claim_for="node-a", claim_seconds=1.0, write_back=True)
    path, data = mounted.target / "file", os.urandom(3 << 20)
    path.write_bytes(b"before")
    stopped = [cluster.kill(f"storage-{node}", signal.SIGSTOP) for node in (1, 2, 3)]

    def resume() -> None:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)

    timer = threading.Timer(7.0, resume)
    timer.start()
    try:
        with path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    finally:
        timer.cancel()
        timer.join()
        resume()
        cluster.wait_whole()
    assert client.read_file(f"{mounted.root}/file") == data


@pytest.mark.parametrize("former", [False, True])
def test_the_exit_status_of_a_daemon_shows_whether_operations_may_be_pending(
    mount: Callable[..., HeldMount], former: bool
) -> None:
    """Services may start requests of a killed daemon until its renewal expires: 20 s."""
    mounted = mount(claim_for="node-a", claim_seconds=20.0)
    (mounted.target / "file").write_bytes(b"all of it")
    if former:
        mounted.respawn()
        (mounted.target / "file").read_bytes()
    subprocess.run(["umount", str(mounted.target)], check=True, timeout=PATIENCE_SECONDS)
    # Another mount namespace that was just created may keep the mount alive.
    mounted.signal(signal.SIGTERM)
    assert (mounted.wait() == 0) is not former


def test_data_that_is_not_written_yet_is_not_a_hole(claimed: HeldMount) -> None:
    """Copying programs query holes and skip them."""
    with (claimed.target / "file").open("wb", buffering=0) as file:
        file.write(b"x" * 100_000)
        assert os.lseek(file.fileno(), 0, os.SEEK_DATA) == 0
        assert os.lseek(file.fileno(), 50_000, os.SEEK_DATA) == 50_000
        assert os.lseek(file.fileno(), 0, os.SEEK_HOLE) == 100_000


def test_a_mount_of_a_directory_claimed_by_another_node_is_refused(
    mount: Callable[..., HeldMount], client: threefs.Client
) -> None:
    first = mount("one")
    client.claim(volume_of(first), "node-b")
    with pytest.raises(AssertionError):
        mount("one", claim_for="node-a", claim_seconds=CLAIM_SECONDS)


def test_renewals_continue(claimed: HeldMount, client: threefs.Client) -> None:
    volume = volume_of(claimed)
    first = client.claim_of(volume)
    assert first is not None
    deadline = time.monotonic() + PATIENCE_SECONDS
    renewal: Any = first[1]
    while renewal < first[1] + 3:
        assert time.monotonic() < deadline
        claim = client.claim_of(volume)
        assert claim is not None
        renewal = claim[1]
        time.sleep(0.05)
    (claimed.target / "file").write_bytes(b"served")
