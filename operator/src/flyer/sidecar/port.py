"""A port for the ranks' rendezvous, free now and kept free until a rank listens on it.

Bound, without listening, by a socket that lets a second one bind: whoever sets SO_REUSEADDR, as
torch's store and every usual server do, gets it; anybody else's bind, and the kernel's own choice
for outgoing connections, does not.
"""

from __future__ import annotations

import random
import socket
from typing import Final

__all__ = ["hold_port"]

# Below the range from which the kernel takes ports of outgoing connections.
PORTS: Final = range(18000, 32000)
PORT_TRIES: Final = 200


def hold_port() -> socket.socket:
    """A socket that holds the port until it is closed."""
    for port in random.sample(PORTS, PORT_TRIES):
        holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            # First without: it must be nobody else's, not even another holder's.
            holder.bind(("", port))
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        except OSError:
            holder.close()
            continue
        return holder
    raise OSError(
        f"none of {PORT_TRIES} ports tried from {PORTS.start} to {PORTS.stop - 1} is free"
    )
