"""The bytes that a mount reads are counted in its state file, over all its daemons."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from threefs.csi.mount_manager.read_bytes import read_bytes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import threefs
    from holding import HeldMount

SIZE = 1 << 20


def test_reads_are_counted_by_distance_and_continue_with_the_next_daemon(
    cluster: Any, client: threefs.Client, mount: Callable[..., HeldMount], tmp_path: Path
) -> None:
    mounted = mount()

    def counted() -> int:
        counters = read_bytes(tmp_path / "state-0")
        assert counters is not None
        # Neither this machine nor the storage services have a location.
        assert counters[:3] == [0, 0, 0]
        return counters[3]

    for number in (1, 2):
        client.write_file(f"{mounted.root}/{number}", os.urandom(SIZE))
        assert len((mounted.target / str(number)).read_bytes()) == SIZE
        cluster.wait_for(lambda n=number: counted() >= n * SIZE, 60, f"{number} files counted")
        mounted.respawn()
    assert counted() < 4 * SIZE
