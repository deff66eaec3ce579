"""The engine without torch: two endpoints in one process, and unknown clients at their ports."""

import contextlib
import re
import socket
import threading
import time
from pathlib import Path

import pytest

np = pytest.importorskip("numpy")

from hfreduce import CollectiveError, _native  # noqa: E402

PLACEMENT = [("a", "A"), ("b", "B")]
KEY = b"k" * 32


def listening_ports() -> set[int]:
    """TCP ports that this process listens on."""
    inodes = set()
    for link in Path("/proc/self/fd").iterdir():
        try:
            match = re.fullmatch(r"socket:\[(\d+)\]", str(link.readlink()))
        except FileNotFoundError:
            continue
        if match:
            inodes.add(match[1])
    ports = set()
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                ports.add(int(fields[1].rsplit(":", 1)[1], 16))
    return ports


def endpoints(keys=(KEY, KEY)):
    return [
        _native.Endpoint(rank, 2, PLACEMENT, keys[rank], liveness_timeout_seconds=30.0)
        for rank in range(2)
    ]


def connect(ends, timeout_seconds=60.0):
    """Connects both concurrently; a list of communicators or errors."""
    infos = [end.info() for end in ends]
    results = [None, None]

    def join(rank):
        try:
            results[rank] = ends[rank].connect(infos, timeout_seconds)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_seconds + 10)
        assert not thread.is_alive(), "connect outlived its deadline"
    return results


def allreduce(communicators, numel=1000):
    arrays = [np.full(numel, rank + 1, np.float32) for rank in range(2)]
    works = [
        communicator.allreduce(array.ctypes.data, numel, _native.FLOAT32, _native.SUM, 60.0)
        for communicator, array in zip(communicators, arrays, strict=True)
    ]
    for work in works:
        work.wait(70.0)
    assert all((array == 3).all() for array in arrays)


def test_two_endpoints_reduce():
    communicators = connect(endpoints())
    allreduce(communicators)
    assert communicators[0].plan()["crossings"] == [1, 1]
    for communicator in communicators:
        communicator.close(1.0)


@pytest.mark.parametrize(
    "garbage",
    [b"GET / HTTP/1.0\r\n\r\n", b"\xff" * 100_000, b"\x00", b""],
    ids=["http", "oversized", "zero", "nothing"],
)
def test_unknown_clients_at_the_port_do_not_affect_the_group(garbage):
    before = listening_ports()
    ends = endpoints()
    ports = listening_ports() - before
    assert ports
    clients = []
    for port in ports:
        client = socket.create_connection(("127.0.0.1", port), timeout=60)
        clients.append(client)
        with contextlib.suppress(OSError):  # the endpoint may close the connection
            client.sendall(garbage)
    communicators = connect(ends)
    assert not [each for each in communicators if isinstance(each, Exception)], communicators
    allreduce(communicators)
    for each in (*clients, *communicators):
        each.close()


def test_a_different_key_is_refused_by_both_in_time():
    results = connect(endpoints((KEY, b"x" * 32)), timeout_seconds=8.0)
    for rank, error in enumerate(results):
        assert isinstance(error, CollectiveError), results
        # The dialing rank detects another key; the other rank reports a refused connection.
        assert error.peer == 1 - rank, results
        assert "another key" in str(error), results


def test_the_address_that_others_use_is_selected_and_reported():
    ends = [
        _native.Endpoint(rank, 2, PLACEMENT, KEY, address="lo,!::1", towards="localhost")
        for rank in range(2)
    ]
    communicators = connect(ends)
    allreduce(communicators)
    for each in communicators:
        assert each.stats()["reached_at"] == "lo 127.0.0.1" == each.flight()["reached_at"]
        each.close()
    with pytest.raises(ValueError, match=r"HFREDUCE_ADDRESS.*`nic9`.*available:.*127\.0\.0\.1"):
        _native.Endpoint(0, 2, PLACEMENT, KEY, address="nic9")
    with pytest.raises(ValueError, match=r"HFREDUCE_ADDRESS.*10\.0\.0/8"):
        _native.reached_at("10.0.0/8")
    assert _native.reached_at("127.0.0.3") == ["lo 127.0.0.3"]


@pytest.mark.parametrize(("streams", "expected"), [(None, 2), (1, 1), (4, 4)])
def test_neighbors_have_the_configured_number_of_streams(streams, expected):
    ends = [_native.Endpoint(rank, 2, PLACEMENT, KEY, streams=streams) for rank in range(2)]
    communicators = connect(ends)
    allreduce(communicators)
    for rank, each in enumerate(communicators):
        assert each.stats()["streams"] == expected
        until = time.monotonic() + 60
        while not (peers := [p for p in each.flight()["peers"] if p["link"]]):
            assert time.monotonic() < until
        assert [(peer["rank"], peer["streams"]) for peer in peers] == [(1 - rank, expected)]
        each.close()


def test_ranks_with_different_numbers_of_streams_are_named():
    ends = [_native.Endpoint(rank, 2, PLACEMENT, KEY, streams=rank + 1) for rank in range(2)]
    for rank, error in enumerate(connect(ends)):
        assert isinstance(error, CollectiveError), error
        assert error.peer == 1 - rank
        assert "streams 1" in str(error)
        assert "streams 2" in str(error)
    with pytest.raises(ValueError, match="HFREDUCE_STREAMS"):
        _native.Endpoint(0, 2, PLACEMENT, KEY, streams=17)


@pytest.mark.parametrize("info", [b"", b"\x00" * 64, b"{}"])
def test_a_garbled_info_is_refused(info):
    end = endpoints()[0]
    with pytest.raises((CollectiveError, ValueError)):
        end.connect([end.info(), info], 1.0)


def test_bad_arguments_are_refused():
    for arguments in (
        (2, 2, PLACEMENT, KEY),
        (0, 0, [], KEY),
        (0, 2, PLACEMENT[:1], KEY),
        (0, 2, [("", "A"), ("b", "B")], KEY),
        (0, 2, PLACEMENT, b""),
    ):
        with pytest.raises((ValueError, CollectiveError)):
            _native.Endpoint(*arguments)
