"""Reservation of a port for the ranks' rendezvous, until a rank listens on it.

The port is bound, without listening, by a socket with SO_REUSEADDR. A server that sets
SO_REUSEADDR, as torch's store and most servers do, can bind it; other binds, and the kernel's
choice of ports for outgoing connections, cannot.
"""

from __future__ import annotations

import random
import socket
from typing import Final

__all__ = ["reserve_port"]

# Below the kernel's range of ephemeral ports.
PORTS: Final = range(18000, 32000)
PORT_TRIES: Final = 200


def reserve_port() -> socket.socket:
    """A socket that holds the port until it is closed."""
    for port in random.sample(PORTS, PORT_TRIES):
        holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            # First without SO_REUSEADDR: fails if another process uses the port.
            holder.bind(("", port))
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        except OSError:
            holder.close()
            continue
        return holder
    raise OSError(
        f"none of {PORT_TRIES} ports tried from {PORTS.start} to {PORTS.stop - 1} is free"
    )
