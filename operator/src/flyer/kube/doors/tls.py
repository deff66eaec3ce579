"""TLS on an accepted connection: small buffers, and memory that is free as soon as it has ended.

asyncio's own `ssl=` takes a buffer of 256 KiB for each connection, and a handshake that fails
leaves a reference cycle (frames of the exception's traceback hold the exception) that keeps this
buffer until the garbage collector's oldest generation is next collected. Clients that break off
handshakes would so take hundreds of megabytes.
"""

from __future__ import annotations

import asyncio
import traceback
from asyncio import sslproto
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import socket
    import ssl

__all__ = ["BUFFER_BYTES", "TlsProtocol", "accept_tls"]

BUFFER_BYTES: Final = 32 << 10
"""Two records of TLS: what is read from a socket at once."""


class TlsProtocol(sslproto.SSLProtocol):
    """asyncio's, with a smaller buffer."""

    max_size = BUFFER_BYTES


async def accept_tls(
    connection: socket.socket,
    context: ssl.SSLContext,
    protocol: asyncio.Protocol,
    *,
    handshake_seconds: float,
    shutdown_seconds: float = 1.0,
) -> None:
    """Returns after the handshake, when `protocol.connection_made` was called.

    OSError: the handshake failed, or took longer; the connection is closed then.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    tls = TlsProtocol(
        loop,
        protocol,
        context,
        done,
        server_side=True,
        # asyncio's own calls pass floats; typeshed says int.
        ssl_handshake_timeout=handshake_seconds,  # type: ignore[arg-type]
        ssl_shutdown_timeout=shutdown_seconds,
    )
    transport, _ = await loop.connect_accepted_socket(lambda: tls, connection)
    try:
        await done
    except BaseException as error:
        transport.abort()
        traceback.clear_frames(error.__traceback__)
        del done  # it holds the exception, whose traceback holds this frame
        raise
