"""TLS on an accepted connection, with small buffers that are freed as soon as it ends.

asyncio's `ssl=` allocates a buffer of 256 KiB per connection, and a failed handshake leaves a
reference cycle (frames of the exception's traceback refer to the exception), which keeps this
buffer until the garbage collector's oldest generation is collected. Clients that abort handshakes
could thus consume hundreds of megabytes.
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
"""Size of one socket read: two TLS records."""


class TlsProtocol(sslproto.SSLProtocol):
    """asyncio's protocol with a smaller buffer."""

    max_size = BUFFER_BYTES


async def accept_tls(
    connection: socket.socket,
    context: ssl.SSLContext,
    protocol: asyncio.Protocol,
    *,
    handshake_seconds: float,
    shutdown_seconds: float = 1.0,
) -> None:
    """Perform the handshake; returns once `protocol.connection_made` has been called.

    OSError: the handshake failed or timed out; the connection is closed.
    """
    loop = asyncio.get_running_loop()
    accepted: asyncio.Future[None] = loop.create_future()
    tls = TlsProtocol(
        loop,
        protocol,
        context,
        accepted,
        server_side=True,
        # asyncio itself passes floats; typeshed declares int.
        ssl_handshake_timeout=handshake_seconds,  # type: ignore[arg-type]
        ssl_shutdown_timeout=shutdown_seconds,
    )
    transport, _ = await loop.connect_accepted_socket(lambda: tls, connection)
    try:
        await accepted
    except BaseException as error:
        transport.abort()
        traceback.clear_frames(error.__traceback__)
        del accepted  # it refers to the exception, whose traceback refers to this frame
        raise
