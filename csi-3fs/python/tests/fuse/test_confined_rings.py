"""Rings of a daemon without privileges: each owner of memory grants it access."""

from __future__ import annotations

import json
import os
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf3fs_fuse.io import deregister_fd, make_ioring, make_iovec, register_fd
from holding import start_mount
from rings import shared_memory
from threefs.cli.credential import issue

if TYPE_CHECKING:
    import threefs

USER = 0x7000_0002
SIZE = 1 << 20


def test_a_confined_daemon_reads_and_writes_through_rings(
    cluster: Any, client: threefs.Client, folder: str, tmp_path: Path
) -> None:
    for path in (
        tmp_path,
        *(parent for parent in tmp_path.parents if parent.name.startswith(("pytest", "popen"))),
    ):
        path.chmod(path.stat().st_mode | 0o011)
    client.make_directory(f"{folder}/mine", 0o777)
    client.set_quota(f"{folder}/mine", bytes_max=1 << 30)
    ticket, file, state = (tmp_path / name for name in ("ticket", "cluster.json", "state-0"))
    issue(cluster.file, f"{folder}/mine", read_only=False, expires="1h", node="", to=ticket)
    file.write_text(json.dumps(json.loads(cluster.file.read_text()) | {"key_file": str(ticket)}))
    state.touch(0o600)
    os.chown(state, USER, USER)
    os.chown(ticket, 0, USER)
    ticket.chmod(0o640)
    mount = start_mount(file, "/", tmp_path, 0, user=USER)
    memory = SharedMemory(create=True, size=SIZE)
    try:
        iov = make_iovec(memory, str(mount.target))
        # The daemon's user has access, others still have none.
        assert memory._mode == 0o600  # type: ignore[attr-defined]
        assert Path(f"/dev/shm/{memory.name}").stat().st_mode & 0o007 == 0
        content = os.urandom(SIZE)
        fd = os.open(mount.target / "file", os.O_CREAT | os.O_RDWR)
        register_fd(fd)
        writes, reads = (make_ioring(str(mount.target), 4, for_read=read) for read in (False, True))
        for round_ in range(2):
            memory.buf[:] = content
            for ring, read in ((writes, False), (reads, True)):
                [done] = ring.prepare(iov, read, fd, round_ * SIZE).submit().wait(min_results=1)
                assert done.result == SIZE
                memory.buf[:] = memory.buf if read else bytes(SIZE)
            assert bytes(memory.buf) == content
            names = shared_memory(mount.pid)
            assert len(names) == 3
            mount.respawn()
        deregister_fd(fd)
        os.close(fd)
        del iov, writes, reads, ring, done
        assert not [name for name in names if name.exists()]
    finally:
        mount.close()
        memory.close()
        memory.unlink()
