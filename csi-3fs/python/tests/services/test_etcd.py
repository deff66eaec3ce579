"""mgmtd and meta keep their rows in three real etcd members, one of which is killed or stopped."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def test_files_outlive_members_services_and_the_cluster(
    start_cluster: Callable[..., Any], etcd: Any
) -> None:
    # Longer than an election, so that nodes stay alive during one.
    timers = ("--ready-timeout", "60", "--node-failure-ms", "5000")
    options = ("data", "--etcd-endpoints", ",".join(etcd.endpoints), *timers)
    cluster = start_cluster(*options)
    assert not (cluster.folder / "data" / "meta").exists(), "its rows are in etcd"
    with cluster.client(60.0) as client:
        written = {}
        for number in range(6):
            path, data = f"/file-{number}", bytes([number]) * 300_000
            client.write_file(path, data)
            written[path] = data
            if number == 1:
                etcd.members[0].send_signal(signal.SIGSTOP)
            elif number == 3:
                etcd.members[0].send_signal(signal.SIGCONT)
                etcd.restart(1)
        for service in ("meta", "mgmtd"):
            cluster.kill(service)
        for path, data in written.items():
            assert client.read_file(path) == data
        client.write_file("/after", b"after")
    cluster.stop()
    again = start_cluster(*options)
    with again.client(60.0) as client:
        assert client.read_file("/after") == b"after"
        assert client.read_file("/file-5") == written["/file-5"]
