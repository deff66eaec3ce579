"""Control socket with untrusted clients: invalid and oversized lines, silent and slow clients."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time

import pytest
from flyer.client.channel import Channel
from flyer.errors import FlyerError
from flyer.local.control import REQUEST_BYTES_MAX, ControlServer, Subscription

SECONDS = 60


class Echo:
    """A handler that answers with its arguments."""

    def __init__(self):
        self.subscriptions = []

    async def call(self, op, arguments):
        if op == "missing":
            raise FlyerError.not_found("not found", "look elsewhere")
        if op == "broken":
            raise KeyError("job")
        return {"op": op, **arguments}

    def subscribe(self, arguments):
        subscription = Subscription()
        self.subscriptions.append(subscription)
        return subscription

    def unsubscribe(self, subscription):
        self.subscriptions.remove(subscription)


@pytest.fixture
def served(tmp_path):
    """A server in a separate thread, because the clients are blocking."""
    loop, handler = asyncio.new_event_loop(), Echo()
    server = ControlServer(tmp_path / "c.sock", handler)
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    asyncio.run_coroutine_threadsafe(server.start(), loop).result(SECONDS)
    yield str(tmp_path / "c.sock"), handler, loop
    asyncio.run_coroutine_threadsafe(server.close(), loop).result(SECONDS)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(SECONDS)


def raw(path, data):
    """The answer to some bytes, until the server closes the connection."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(SECONDS)
        client.connect(path)
        client.sendall(data)
        answer = b""
        while b"\n" not in answer:
            more = client.recv(65536)
            if not more:
                break
            answer += more
        closed = client.recv(1) == b""
    return json.loads(answer), closed


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"\x00\xff\xfe garbage\n", "not JSON"),
        (b"GET / HTTP/1.1\r\n\r\n", "not JSON"),
        (b"[1, 2]\n", "not an object with an `op`"),
        (b'{"version": 1}\n', "not an object with an `op`"),
        (b'{"op": "jobs"}\n', "version None"),
        (b'{"version": 99, "op": "jobs"}\n', "version 99"),
        (b"[" * 100_000 + b"\n", "not JSON"),
        (b"x" * (REQUEST_BYTES_MAX + 2) + b"\n", "longer than"),
    ],
)
def test_an_invalid_line_is_refused_without_effect_on_others(served, line, words):
    path, _, _ = served
    with Channel(path) as other:
        assert other.call("first") == {"op": "first"}
        answer, closed = raw(path, line)
        assert answer["ok"] is False
        assert words in answer["error"]["message"]
        assert closed
        assert other.call("second", number=2) == {"op": "second", "number": 2}


def test_errors_are_transmitted_with_their_status_and_hint(served):
    with Channel(served[0]) as channel:
        with pytest.raises(FlyerError) as excinfo:
            channel.call("missing")
        assert (excinfo.value.exit_status, excinfo.value.hint) == (102, "look elsewhere")
        with pytest.raises(FlyerError, match="bad argument"):
            channel.call("broken")


def test_a_request_that_is_too_large_is_refused_before_it_is_sent(served):
    with Channel(served[0]) as channel, pytest.raises(FlyerError, match="more than"):
        channel.call("run", manifest="x" * REQUEST_BYTES_MAX)


def test_a_silent_server_causes_a_timeout_and_a_dead_one_is_unreachable(tmp_path):
    path = str(tmp_path / "s.sock")
    with pytest.raises(FlyerError, match="no driver answers"):
        Channel(path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        with Channel(path, timeout_seconds=0.05) as channel:
            with pytest.raises(FlyerError) as excinfo:
                channel.call("jobs")
            assert excinfo.value.code == "Timeout"
            accepted, _ = listener.accept()
            accepted.close()
            with pytest.raises(FlyerError) as excinfo:
                channel.call("jobs")
            assert excinfo.value.code == "Unreachable"


def test_a_disconnected_watcher_is_removed(served):
    path, handler, _ = served
    with Channel(path) as channel:
        channel.send("watch")
        channel.answer()
        assert len(handler.subscriptions) == 1
    deadline = time.monotonic() + SECONDS
    while handler.subscriptions:
        assert time.monotonic() < deadline, "its subscription stays"
        time.sleep(0.01)


def test_a_watcher_that_does_not_read_is_disconnected_with_a_message(served):
    path, handler, loop = served
    with Channel(path) as channel:
        channel.send("watch")
        channel.answer()
        (subscription,) = handler.subscriptions

        def flood():
            for number in range(30_000):
                subscription.offer({"kind": "event", "number": number})

        loop.call_soon_threadsafe(flood)
        last = None
        while (item := channel.next(SECONDS)) is not None:
            last = item
            if item["kind"] == "lagged":
                break
        assert last == {"kind": "lagged"}
