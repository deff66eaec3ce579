"""A group without torch: ranks that a launcher started, or that start each other.

The environment has torchrun's variables: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Rank 0
listens there (or at HFREDUCE_RENDEZVOUS) until all ranks have joined, and rejects peers that do not
hold the key in HFREDUCE_KEY_FILE::

    communicator = hfreduce.standalone.connect(os.environ)
    hfreduce.allreduce(array, communicator)
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from hfreduce import _native, bootstrap
from hfreduce.errors import RendezvousError, SettingError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Rendezvous", "connect", "membership"]

WORLD_SIZE_MAX = 65536


class Rendezvous:
    """The meeting of a group at one address."""

    def __init__(self, environment: Mapping[str, str], settings: _native.Settings) -> None:
        self.membership = membership(environment)
        self._host, port = _address(environment)
        key = settings.key()
        if key is None and self.membership.size > 1:
            expected = (
                "a file that only the ranks can read, with 16 bytes or more: "
                "`head -c 32 /dev/urandom | base64 > key` makes one"
            )
            raise SettingError("HFREDUCE_KEY_FILE", "", expected)
        self._key = key or bytes(bootstrap.KEY_BYTES)
        self._native = _native.Rendezvous(
            self.membership.rank,
            self.membership.size,
            self._host,
            port,
            self._key,
            job=settings.job,
        )

    @property
    def host(self) -> str:
        """Rank 0's."""
        return self._host

    @property
    def port(self) -> int:
        """Address at which rank 0 listens."""
        return self._native.port

    def exchange(self, phase: str, value: str, deadline: float) -> list[bytes]:
        """Returns the values of all ranks in rank order; `deadline` is one of `time.monotonic`."""
        remaining = max(deadline - time.monotonic(), 0.0)
        try:
            return self._native.exchange(phase, value.encode(), remaining)
        except RuntimeError as error:
            detail, absent = error.args
            rank = self.membership.rank
            raise RendezvousError(detail, rank=rank, phase=phase, absent=absent) from None

    def key(self, deadline: float) -> bytes:  # noqa: ARG002  (a meeting's signature)
        """The key; a single rank does not need one."""
        return self._key


def connect(environment: Mapping[str, str]) -> _native.Communicator:
    """Joins the group that the environment describes."""
    settings = _native.Settings.read(environment)
    meeting = Rendezvous(environment, settings)
    return bootstrap.join(meeting, meeting.membership, settings, settings.connect_seconds)


def membership(environment: Mapping[str, str]) -> bootstrap.Membership:
    """The membership from RANK and WORLD_SIZE."""
    size = _number(environment, "WORLD_SIZE", 1, WORLD_SIZE_MAX)
    rank = _number(environment, "RANK", 0, size - 1)
    return bootstrap.Membership(rank, tuple(range(size)), size)


def _address(environment: Mapping[str, str]) -> tuple[str, int]:
    """Where rank 0 listens."""
    own = environment.get("HFREDUCE_RENDEZVOUS")
    if own:
        host, _, port = own.rpartition(":")
        if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
            raise SettingError("HFREDUCE_RENDEZVOUS", own, "HOST:PORT, as 10.0.0.1:29500 is")
        return host.strip("[]"), int(port)
    host = environment.get("MASTER_ADDR", "")
    if not host:
        raise SettingError("MASTER_ADDR", host, "the host of rank 0, as launchers set it")
    return host, _number(environment, "MASTER_PORT", 1, 65535)


def _number(environment: Mapping[str, str], name: str, least: int, most: int) -> int:
    value = environment.get(name, "")
    number = int(value) if value.isascii() and value.isdigit() else -1
    if not least <= number <= most:
        raise SettingError(name, value, f"a whole number from {least} to {most}")
    return number
