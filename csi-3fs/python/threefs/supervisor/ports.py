"""Free ports, and the processes that use occupied ones."""

import random
import socket
from pathlib import Path

from threefs.errors import Unavailable

__all__ = ["choose_ports", "is_free", "reserve", "who_listens"]

FIRST_PORT, LAST_PORT = 20_000, 32_000
"""Below the range that the system gives to outgoing connections, so that nothing takes the port
of a service while it restarts."""

_reservations: list[socket.socket] = []


def choose_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Return `count` different ports on which no process listens now, reserved for this process."""
    candidates = list(range(FIRST_PORT, LAST_PORT))
    random.shuffle(candidates)
    ports: list[int] = []
    for port in candidates:
        if is_free(port, host) and reserve(port):
            ports.append(port)
        if len(ports) == count:
            return ports
    raise Unavailable(
        f"fewer than {count} free ports from {FIRST_PORT} to {LAST_PORT} on {host}; "
        "stop what listens there (`ss -ltn` lists it)"
    )


def reserve(port: int) -> bool:
    """Reserve a port for this process until it ends, while nothing listens there.

    False if another process has reserved it. The name of the socket is in the kernel's memory and
    belongs to the network namespace, as the port does.
    """
    reservation = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        reservation.bind(f"\0threefs-port-{port}")
    except OSError:
        reservation.close()
        return False
    _reservations.append(reservation)
    return True


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """True when a service could listen there now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError:
            return False
    return True


def who_listens(port: int) -> str:
    """A description of the process that listens on a port, as far as this user may see it."""
    inodes = {inode for table in ("tcp", "tcp6") for inode in _listening(table, port)}
    for pid in sorted(int(path.name) for path in Path("/proc").glob("[0-9]*")):
        if any(_holds(pid, inode) for inode in inodes):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").strip()
            return f"process {pid} ({command.decode(errors='replace')[:120]})"
    return "a process of another user" if inodes else "no listening process"


def _listening(table: str, port: int) -> list[str]:
    listening = "0A"
    try:
        lines = Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    except OSError:
        return []
    rows = [line.split() for line in lines]
    return [
        row[9] for row in rows if row[3] == listening and int(row[1].rsplit(":", 1)[1], 16) == port
    ]


def _holds(pid: int, inode: str) -> bool:
    link = f"socket:[{inode}]"
    try:
        descriptors = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False
    for descriptor in descriptors:
        try:
            if str(descriptor.readlink()) == link:
                return True
        except OSError:
            continue
    return False
