"""Job socket server and clients: suspension, many ranks, invalid messages."""

import asyncio
import socket
import threading

import pytest
from flyer.job.client import JobClient, JobSocketError
from flyer.job.protocol import LINE_BYTES_MAX, SuspendCode, Welcome
from flyer.job.server import JobServer


class Notebook:
    """A handler that records its requests and fails on demand."""

    def __init__(self):
        self.calls = []
        self.broken = False

    def __getattr__(self, name):
        async def note(*arguments):
            if self.broken:
                raise RuntimeError("the operator is unavailable")
            self.calls.append((name, *arguments))

        return note


@pytest.fixture
def notebook():
    return Notebook()


@pytest.fixture
async def server(tmp_path, notebook):
    path = tmp_path / "job.sock"
    started = JobServer(path, Welcome("default/gpt", "c1", 2, 7, 40, "/ckpt/step-40"), notebook)
    started.path = str(path)
    await started.start()
    yield started
    await started.close()


async def connect(server, rank=0):
    return await asyncio.to_thread(JobClient, server.path, rank)


async def test_every_request_of_a_rank_reaches_the_handler(server, notebook):
    client = await connect(server, 3)
    assert client.welcome == Welcome("default/gpt", "c1", 2, 7, 40, "/ckpt/step-40")

    def talk():
        client.progress(41, {"loss": 2.0})
        client.checkpoint(41, "/ckpt/step-41", durable=True)
        client.user_state(9)
        client.release(41)
        client.fail("enough")
        client.close()

    await asyncio.to_thread(talk)
    assert notebook.calls == [
        ("progress", 3, 41, {"loss": 2.0}),
        ("checkpoint", 3, 41, "/ckpt/step-41", True),
        ("user_state", 3, 9),
        ("release", 3, 41),
        ("fail", 3, "enough"),
    ]
    assert server.ranks_seen == {3}
    again = await connect(server, 0)
    assert again.welcome.user_state == 9
    again.close()


async def test_a_suspension_goes_sent_received_may_suspend_and_never_back(server):
    watchers = [await connect(server, rank) for rank in range(4)]
    talker = await connect(server)
    before = [await asyncio.to_thread(watcher.watch, 0, 0) for watcher in watchers]
    assert {change.suspend_code for change in before} == {SuspendCode.NONE}

    waits = [
        asyncio.create_task(asyncio.to_thread(watcher.watch, before[0].revision, 30))
        for watcher in watchers
    ]
    server.signal(20, "preempted by default/b")
    for change in await asyncio.gather(*waits):
        assert change.suspend_code is SuspendCode.SENT
        assert 19 < change.seconds_left <= 20
        assert change.reason == "preempted by default/b"
        revision = change.revision
    await asyncio.to_thread(talker.received)
    change = await asyncio.to_thread(watchers[0].watch, revision, 30)
    assert change.suspend_code is SuspendCode.RECEIVED
    server.signal(50, "preempted by default/b")  # a progress report extends the grace
    change = await asyncio.to_thread(watchers[0].watch, change.revision, 30)
    assert (change.suspend_code, change.seconds_left > 40) == (SuspendCode.RECEIVED, True)
    await asyncio.to_thread(talker.release)
    change = await asyncio.to_thread(watchers[0].watch, change.revision, 30)
    assert change.suspend_code is SuspendCode.MAY_SUSPEND
    for client in [*watchers, talker]:
        client.close()


async def test_received_before_any_signal_changes_nothing(server):
    client = await connect(server)
    await asyncio.to_thread(client.received)
    assert server.suspend_code is SuspendCode.NONE
    client.close()


async def test_a_watch_ends_at_its_deadline_without_changes(server):
    client = await connect(server)
    first = await asyncio.to_thread(client.watch, 0, 0)
    assert await asyncio.to_thread(client.watch, first.revision, 0.05) == first
    client.close()


async def raw(server, *lines):
    reader, writer = await asyncio.open_unix_connection(server.path)
    writer.write(b"".join(lines))
    answer = await asyncio.wait_for(reader.read(), 60)
    writer.close()
    return answer


HELLO = b'{"op": "hello", "rank": 9, "version": 1}\n'


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        ((b"\x00\x01garbage\n",), b"bad_line"),
        ((HELLO, b"GET / HTTP/1.1\n"), b"bad_line"),
        ((HELLO, b'{"op": "dance"}\n'), b"bad_operation"),
        ((b'{"op": "progress", "step": 1}\n',), b"bad_handshake"),
        ((b'{"op": "hello", "rank": 0, "version": 2}\n',), b"bad_version"),
        ((HELLO, b'{"op": "fail", "reason": "' + b"x" * 2 * LINE_BYTES_MAX), b"bad_line"),
    ],
)
async def test_a_connection_with_garbage_is_closed_without_effect_on_others(
    server, notebook, lines, code
):
    other = await connect(server, 1)
    waiting = asyncio.create_task(asyncio.to_thread(other.watch, 1, 30))
    assert code in (await raw(server, *lines)).splitlines()[-1]
    server.signal(5, "still here")
    assert (await waiting).reason == "still here"
    await asyncio.to_thread(other.progress, 1)
    assert notebook.calls == [("progress", 1, 1, {})]
    other.close()


async def test_an_incomplete_line_is_garbage(server, notebook):
    reader, writer = await asyncio.open_unix_connection(server.path)
    writer.write(HELLO + b'{"op": "release"')
    writer.write_eof()
    assert b"bad_line" in await asyncio.wait_for(reader.read(), 60)
    writer.close()
    assert notebook.calls == []


async def test_a_failing_handler_is_reported_and_the_connection_stays(server, notebook):
    client = await connect(server)
    notebook.broken = True
    with pytest.raises(JobSocketError, match="internal") as excinfo:
        await asyncio.to_thread(client.release)
    assert not excinfo.value.final
    assert server.suspend_code is SuspendCode.NONE
    notebook.broken = False
    await asyncio.to_thread(client.release)
    assert notebook.calls == [("release", 0, None)]
    client.close()


async def test_a_socket_file_of_a_dead_server_is_replaced(tmp_path, notebook):
    path = tmp_path / "job.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    server = JobServer(path, Welcome("j", "c", 1), notebook)
    await server.start()
    (await asyncio.to_thread(JobClient, str(path), 0)).close()
    await server.close()
    assert not path.exists()


async def test_a_path_too_long_for_a_socket_is_reported_before_binding(tmp_path, notebook):
    server = JobServer(tmp_path / ("x" * 120), Welcome("j", "c", 1), notebook)
    with pytest.raises(ValueError, match="107 bytes"):
        await server.start()


def test_the_error_without_a_server_names_the_socket(tmp_path):
    with pytest.raises(JobSocketError, match=r"missing\.sock"):
        JobClient(str(tmp_path / "missing.sock"), 0)


def test_a_silent_server_causes_a_timeout(tmp_path):
    path = str(tmp_path / "mute.sock")
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(path)
        mute.listen()
        with pytest.raises(JobSocketError, match="hello"):
            JobClient(path, 0, timeout_seconds=0.05)


def test_an_invalid_reply_closes_the_connection(tmp_path):
    path = str(tmp_path / "mad.sock")
    with socket.socket(socket.AF_UNIX) as mad:
        mad.bind(path)
        mad.listen()

        def babble():
            connection, _ = mad.accept()
            with connection:
                connection.recv(100)
                connection.sendall(b"x" * 3 * LINE_BYTES_MAX)
                connection.recv(100)

        thread = threading.Thread(target=babble, daemon=True)
        thread.start()
        with pytest.raises(JobSocketError):
            JobClient(path, 0, timeout_seconds=5)
        thread.join(5)
