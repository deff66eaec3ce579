"""Memory of TLS connections: its size, and its release without the garbage collector."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import ssl
import weakref
from datetime import UTC, datetime

import pytest
from flyer.kube.gateway import certificates_of, renewed
from flyer.kube.gateway.listener import Listener
from flyer.kube.gateway.metrics import GatewayMetrics
from flyer.kube.gateway.settings import GatewaySettings
from flyer.kube.servers import tls
from flyer.kube.servers.tls import BUFFER_BYTES, TlsProtocol, accept_tls
from flyer.kube.servers.web import WebServer, WebSettings
from prometheus_client import CollectorRegistry

CLIENTS = 5


@pytest.fixture(scope="module")
def context(tmp_path_factory):
    folder = tmp_path_factory.mktemp("certificates")
    certs = certificates_of(renewed(None, ["localhost"], datetime.now(UTC)))
    (folder / "tls.crt").write_text(certs.certificate)
    (folder / "tls.key").write_text(certs.key)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    return tls


@pytest.fixture
def living(monkeypatch):
    """The TLS connections in memory, which only reference counting removes."""
    protocols: weakref.WeakSet[TlsProtocol] = weakref.WeakSet()

    class Watched(TlsProtocol):
        def __init__(self, *arguments, **keywords):
            super().__init__(*arguments, **keywords)
            protocols.add(self)

    monkeypatch.setattr(tls, "TlsProtocol", Watched)
    gc.collect()
    gc.disable()
    yield protocols
    gc.enable()


def gateway(context):
    async def serve(connection):
        await connection.stream.hello()

    settings = GatewaySettings(host="127.0.0.1", port=0, hello_seconds=0.3)
    listener = Listener(
        settings, context, GatewayMetrics(CollectorRegistry()), serve, lambda _: False
    )
    listener.open()
    return listener


def webhook(context):
    async def answer(_):
        raise AssertionError("no request is complete")

    door = WebServer(answer, WebSettings(head_seconds=0.3), context=context)
    door.open("127.0.0.1", 0)
    return door


async def silent(port):
    return await asyncio.open_connection("127.0.0.1", port)


async def garbage(port):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET / HTTP/1.1\r\n\r\n")
    return reader, writer


async def cut(port):
    """A handshake interrupted in its first message."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"\x16\x03\x01\x02\x00\x01")
    await writer.drain()
    writer.transport.abort()
    return reader, writer


async def authenticated_by_nothing(port):
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    return await asyncio.open_connection("127.0.0.1", port, ssl=client)


@pytest.mark.parametrize("serving", [gateway, webhook])
@pytest.mark.parametrize("client", [silent, garbage, cut, authenticated_by_nothing])
async def test_a_connection_that_ended_leaves_no_buffers(context, living, until, serving, client):
    server = serving(context)
    task = asyncio.create_task(server.run())
    clients = await asyncio.gather(*(client(server.port) for _ in range(CLIENTS)))
    for reader, writer in clients:
        with contextlib.suppress(OSError):
            await reader.read()  # the server closes it
        writer.transport.abort()
    await until(lambda: not living)
    task.cancel()


async def test_a_connection_takes_a_small_buffer(context, living):
    client_end, server_end = socket.socketpair()
    server_end.setblocking(False)
    protocol = asyncio.StreamReaderProtocol(asyncio.StreamReader())
    seconds = 0.1
    task = asyncio.create_task(accept_tls(server_end, context, protocol, handshake_seconds=seconds))
    while not living:
        await asyncio.sleep(0)
    (connection,) = living
    assert len(connection.get_buffer(-1)) == BUFFER_BYTES
    with pytest.raises(OSError, match="handshake"):
        await task
    client_end.close()
