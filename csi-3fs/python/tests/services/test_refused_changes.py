"""A change that was refused is not executed later by a metadata service that was stopped."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import threefs
from threefs.cluster import ClusterFile

if TYPE_CHECKING:
    from collections.abc import Callable

CLIENTS = 8
"""Each starts at one of two services by chance."""


@pytest.mark.timeout(400)
def test_a_stopped_service_does_not_execute_a_change_that_was_refused(
    start_cluster: Callable[..., Any], etcd: Any
) -> None:
    cluster = start_cluster(
        "data",
        *("--metas", "2", "--etcd-endpoints", ",".join(etcd.endpoints)),
        *("--ready-timeout", "90", "--node-failure-ms", "5000"),
    )
    file = ClusterFile.read(cluster.file)
    stopped, running = (
        threefs.Client(replace(file, meta=(file.services[name],)), timeout_seconds=90)
        for name in ("meta", "meta-2")
    )
    clients = [cluster.client(90) for _ in range(CLIENTS)]
    names = [f"/{number}" for number in range(CLIENTS)]
    for client, name in zip(clients, names, strict=True):
        running.write_file(name, b"")
        client.stat(name)  # Connects.

    def is_refused(number: int) -> bool:
        with pytest.raises(threefs.Exists):
            clients[number].open_raw(names[number], "x")
        return True

    cluster.kill("meta", signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(CLIENTS) as threads:
            assert all(threads.map(is_refused, range(CLIENTS)))
        for name in names:
            running.remove(name)
    finally:
        cluster.kill("meta", signal.SIGCONT)
    # The service has executed what was in its sockets, and later changes.
    for name in ("/later", "/later-moved"):
        stopped.mkdir(name)
    assert running.listdir("/") == ["later", "later-moved"]
    for client in (stopped, running, *clients):
        client.close()
