"""The metrics endpoint with silent, slow and flooding connections."""

from __future__ import annotations

import socket
import threading
import time
import urllib.request
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.registry import Collector
from threefs.metrics_server import (
    CONNECTION_SECONDS,
    CONNECTIONS_MAX,
    CONNECTIONS_PER_SOURCE_MAX,
    HEALTH_PATH,
    MetricsServer,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

WAIT_SECONDS = 20.0


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class CountingCollector(Collector):
    def __init__(self) -> None:
        self.count = 0

    def collect(self) -> Iterator[object]:  # type: ignore[override]
        self.count += 1
        yield from ()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def collector() -> CountingCollector:
    return CountingCollector()


@pytest.fixture
def server(clock: Clock, collector: CountingCollector) -> Iterator[MetricsServer]:
    registry = CollectorRegistry()
    Gauge("answer", "An answer.", registry=registry).set(42)
    registry.register(collector)
    server = MetricsServer(registry, 0, "127.0.0.1", clock)
    server.start()
    yield server
    server.stop()


def scrape(server: MetricsServer, path: str = "/metrics") -> str:
    url = f"http://127.0.0.1:{server.port}{path}"
    with urllib.request.urlopen(url, timeout=WAIT_SECONDS) as answer:
        return answer.read().decode()


def silent(server: MetricsServer, source: str) -> socket.socket:
    return socket.create_connection(
        ("127.0.0.1", server.port), timeout=WAIT_SECONDS, source_address=(source, 0)
    )


def wait_for(condition: object) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_scrape_is_answered(server: MetricsServer) -> None:
    assert "answer 42.0" in scrape(server)
    with pytest.raises(urllib.error.HTTPError, match="404"):
        scrape(server, "/other")


def test_a_probe_is_answered_without_calling_the_collectors(
    server: MetricsServer, collector: CountingCollector
) -> None:
    before = collector.count
    assert scrape(server, HEALTH_PATH) == "ok\n"
    assert collector.count == before


def test_silent_connections_of_many_sources_do_not_block_a_scrape(
    server: MetricsServer,
) -> None:
    before = threading.active_count()
    with ExitStack() as stack:
        for number in range(160):
            stack.enter_context(silent(server, f"127.0.1.{number // 3 + 1}"))
        assert "answer 42.0" in scrape(server)
        assert server.connections() <= CONNECTIONS_MAX
        wait_for(lambda: threading.active_count() - before <= CONNECTIONS_MAX + 1)


def test_connections_per_source_are_limited(server: MetricsServer) -> None:
    with ExitStack() as stack:
        sockets = [stack.enter_context(silent(server, "127.0.1.1")) for _ in range(20)]
        closed = 0
        for connection in sockets[CONNECTIONS_PER_SOURCE_MAX:]:
            closed += connection.recv(1) == b""
        assert closed == 20 - CONNECTIONS_PER_SOURCE_MAX
        assert "answer 42.0" in scrape(server)


def test_a_slow_request_is_closed_at_its_deadline(server: MetricsServer, clock: Clock) -> None:
    with silent(server, "127.0.1.1") as connection:
        connection.sendall(b"GET /metrics HT")
        wait_for(lambda: server.connections() == 1)
        clock.now += CONNECTION_SECONDS
        assert connection.recv(1) == b""
        wait_for(lambda: server.connections() == 0)


def test_scrapes_within_one_second_share_a_result(
    server: MetricsServer, clock: Clock, collector: CountingCollector
) -> None:
    before = collector.count
    for _ in range(10):
        scrape(server)
    assert collector.count == before + 1
    clock.now += 1
    scrape(server)
    assert collector.count == before + 2
