"""Mounts that only one node may have: written behind, and served only while the claim is held."""

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


def volume_of(held: HeldMount) -> str:
    return os.path.dirname(held.root)


def test_what_was_written_behind_is_durable_after_a_close(
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
def test_a_file_written_behind_is_as_on_a_local_file_system(
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


def test_another_nodes_claim_ends_the_service_with_an_error(
    claimed: HeldMount, client: threefs.Client
) -> None:
    path = claimed.target / "file"
    path.write_bytes(b"mine")
    volume = volume_of(claimed)
    claim = client.claim_of(volume)
    assert claim is not None
    assert claim[0] == "node-a"
    # Stopped, it cannot renew; another node watches the claim stand still and takes it.
    claimed.signal(signal.SIGSTOP)
    deadline = time.monotonic() + PATIENCE_SECONDS
    taken = ("", 0)
    while taken[0] != "node-b":
        assert time.monotonic() < deadline
        taken = client.claim(volume, "node-b", client.claim_of(volume))
    time.sleep(CLAIM_SECONDS)
    claimed.signal(signal.SIGCONT)
    with pytest.raises(OSError, match="Input/output error") as caught:
        os.stat(claimed.target / "other")
    assert caught.value.errno == errno.EIO
    assert client.read_file(f"{claimed.root}/file") == b"mine"
    # Its successor finds the other's name too, and does not let programs wait.
    claimed.respawn()
    with pytest.raises(OSError, match="Input/output error"):
        os.stat(claimed.target / "another")


def test_a_claim_that_another_node_had_meanwhile_is_not_taken_back(
    claimed: HeldMount, client: threefs.Client
) -> None:
    """What that node has written must not be overwritten by what was written behind before."""
    volume = volume_of(claimed)
    claimed.signal(signal.SIGSTOP)
    deadline = time.monotonic() + PATIENCE_SECONDS
    taken = ("", 0)
    while taken[0] != "node-b":
        assert time.monotonic() < deadline
        taken = client.claim(volume, "node-b", client.claim_of(volume))
    client.unclaim(volume, "node-b")
    claimed.signal(signal.SIGCONT)
    number = 0
    with pytest.raises(OSError, match="Input/output error"):
        # Until the daemon finds that out, its last renewal is trusted.
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


def take_for_another(held: HeldMount, client: threefs.Client) -> str:
    """Have node-b take the claim of a mount whose daemon is stopped; gives the volume."""
    volume = volume_of(held)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while client.claim(volume, "node-b", client.claim_of(volume))[0] != "node-b":
        assert time.monotonic() < deadline
    return volume


def test_a_length_that_was_not_told_while_the_claim_was_held_is_never_told(
    mount: Callable[..., HeldMount], client: threefs.Client
) -> None:
    """It would bring back what the next node has cut off."""
    held = mount(claim_for="node-a", claim_seconds=CLAIM_SECONDS)
    path, there = held.target / "file", f"{held.root}/file"
    file = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.write(file, b"told")
    os.write(file, b"not told yet")
    held.signal(signal.SIGSTOP)
    take_for_another(held, client)
    # Whoever takes a claim waits for longer than its former holder trusts a renewal.
    time.sleep(CLAIM_SECONDS)
    with client.open_raw(there, "r+b") as same:
        same.truncate(3)
    held.signal(signal.SIGCONT)
    with pytest.raises(OSError, match="Input/output error"):
        os.stat(held.target / "other")
    # Closing it and the end of the daemon tell what is left to tell.
    with pytest.raises(OSError, match="Input/output error"):
        os.close(file)
    held.close()
    assert client.read_file(there) == b"tol"


def test_a_length_that_a_close_could_not_tell_is_told_at_the_end(
    mount: Callable[..., HeldMount], cluster: Any, client: threefs.Client
) -> None:
    held = mount(timeout_seconds=2.0)
    file = os.open(held.target / "file", os.O_WRONLY | os.O_CREAT)
    pid = cluster.kill("meta", signal.SIGSTOP)
    try:
        os.write(file, b"all of it")  # goes to storage alone
        with pytest.raises(OSError, match=r"timed out|Input/output"):
            os.close(file)
        time.sleep(6.0)  # as long as the daemon tries: nobody can see when it gives up
    finally:
        os.kill(pid, signal.SIGCONT)
    held.close()
    assert client.read_file(f"{held.root}/file") == b"all of it"


def test_writes_outlast_an_outage_of_storage_while_the_claim_is_renewed(
    mount: Callable[..., HeldMount], cluster: Any, client: threefs.Client
) -> None:
    """Longer than one renewal is trusted, with what an operation under it once had beyond that."""
    held = mount(claim_for="node-a", claim_seconds=1.0, write_back=True)
    path, data = held.target / "file", os.urandom(3 << 20)
    path.write_bytes(b"before")
    stopped = [cluster.kill(f"storage-{node}", signal.SIGSTOP) for node in (1, 2, 3)]

    def go_on() -> None:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)

    timer = threading.Timer(7.0, go_on)
    timer.start()
    try:
        with path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    finally:
        timer.cancel()
        timer.join()
        go_on()
        cluster.wait_whole()
    assert client.read_file(f"{held.root}/file") == data


@pytest.mark.parametrize("former", [False, True])
def test_a_daemon_says_at_its_end_whether_something_may_still_be_begun(
    mount: Callable[..., HeldMount], former: bool
) -> None:
    """What a killed one had sent, services begin until its renewal has ended: 20 s."""
    held = mount(claim_for="node-a", claim_seconds=20.0)
    (held.target / "file").write_bytes(b"all of it")
    if former:
        held.respawn()
        (held.target / "file").read_bytes()
    subprocess.run(["umount", str(held.target)], check=True, timeout=PATIENCE_SECONDS)
    # Another mount namespace, made just before, may keep the mount alive.
    held.signal(signal.SIGTERM)
    assert (held.wait() == 0) is not former


def test_what_is_not_written_yet_is_no_hole(claimed: HeldMount) -> None:
    """Copying programs ask for holes, and leave out what they are told is one."""
    with (claimed.target / "file").open("wb", buffering=0) as file:
        file.write(b"x" * 100_000)
        assert os.lseek(file.fileno(), 0, os.SEEK_DATA) == 0
        assert os.lseek(file.fileno(), 50_000, os.SEEK_DATA) == 50_000
        assert os.lseek(file.fileno(), 0, os.SEEK_HOLE) == 100_000


def test_a_mount_of_what_another_node_has_is_refused(
    mount: Callable[..., HeldMount], client: threefs.Client
) -> None:
    first = mount("one")
    client.claim(volume_of(first), "node-b")
    with pytest.raises(AssertionError):
        mount("one", claim_for="node-a", claim_seconds=CLAIM_SECONDS)


def test_renewals_go_on(claimed: HeldMount, client: threefs.Client) -> None:
    volume = volume_of(claimed)
    first = client.claim_of(volume)
    assert first is not None
    deadline = time.monotonic() + PATIENCE_SECONDS
    beat: Any = first[1]
    while beat < first[1] + 3:
        assert time.monotonic() < deadline
        found = client.claim_of(volume)
        assert found is not None
        beat = found[1]
        time.sleep(0.05)
    (claimed.target / "file").write_bytes(b"served")
