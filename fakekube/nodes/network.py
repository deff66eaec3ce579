"""Loopback network of simulated pods: connections from the pod's address to service names.

A pod's tasks run in a context from `PodNetwork.of`. The network's services resolve the hosts of
their connections, which are bound to the pod's address in 127.0.0.0/8, so that a server sees the
address in the pod's status.

`cut` simulates a node that lost its network or power: its connections stay open and transfer no
more data.
"""

from __future__ import annotations

import asyncio
from contextvars import Context, ContextVar, copy_context
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakSet

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["PodNetwork"]

_SOURCE: ContextVar[tuple[PodNetwork, str] | None] = ContextVar("source", default=None)
_INSTALLED: Final = "_fakekube_pod_network"


class PodNetwork:
    """The services of one cluster."""

    def __init__(self) -> None:
        self.services: dict[str, Callable[[], int]] = {}
        """By host name: the port of 127.0.0.1 where the service's endpoint listens now. Raises
        ConnectionRefusedError where the service has no endpoint."""
        self._transports: dict[str, WeakSet[asyncio.Transport]] = {}
        self._cut: set[str] = set()

    def of(self, address: str) -> Context:
        """The context of a pod at this address, for the tasks that run in it."""
        _install(asyncio.get_running_loop())
        context = copy_context()
        context.run(_SOURCE.set, (self, address))
        return context

    def port(self, host: str) -> int:
        """The present port of a service."""
        if host not in self.services:
            raise ConnectionRefusedError(f"no service is named {host}")
        return self.services[host]()

    def cut(self, address: str) -> None:
        """Stop all traffic of this address."""
        self._cut.add(address)
        for transport in self._transports.get(address, ()):
            _silence(transport)

    async def connected(self, address: str, transport: asyncio.Transport) -> None:
        """Record a connection of this address. Waits until cancelled if the address is cut off."""
        self._transports.setdefault(address, WeakSet()).add(transport)
        if address in self._cut:
            transport.abort()
            await asyncio.Event().wait()


def _silence(transport: asyncio.Transport) -> None:
    if not transport.is_closing():
        transport.pause_reading()
        transport.write = lambda data: None  # type: ignore[method-assign]  # noqa: ARG005


def _install(loop: asyncio.AbstractEventLoop) -> None:
    """Patch the loop once; tasks outside pods connect as before."""
    if hasattr(loop, _INSTALLED):
        return
    connect = loop.create_connection

    async def create_connection(factory: Any, host: Any = None, port: Any = None, **kw: Any) -> Any:
        source = _SOURCE.get()
        if source is not None and host is not None:
            network, address = source
            kw.setdefault("server_hostname", host if kw.get("ssl") else None)
            transport, protocol = await connect(
                factory, "127.0.0.1", network.port(host), local_addr=(address, 0), **kw
            )
            await network.connected(address, transport)
            return transport, protocol
        return await connect(factory, host, port, **kw)

    setattr(loop, _INSTALLED, True)
    loop.create_connection = create_connection  # type: ignore[method-assign,assignment]
