"""Proxy in front of a real API server: counts calls, injects faults and kills clients.

Clients use plain HTTP, or TLS if the proxy has a certificate. The proxy adds its own credentials,
if any, injects `faults` into calls and `faults.watches` into watches, and asks `reaper` whether a
write kills its client.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Self

import aiohttp
from aiohttp import web
from flyer.kube.apiserver.access import Connections
from flyer.kube.apiserver.responses import iter_lines

from fakekube.apiserver import paths
from fakekube.apiserver.faults import Call, Faults
from fakekube.errors import ApiRefusal

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator

    from flyer.kube.apiserver import Access

    from fakekube.apiserver.faults import Fault
    from fakekube.real_server.reaper import Key, Reaper

__all__ = ["Proxy"]

_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
HANG_SECONDS = 3600.0
_HOP_BY_HOP = frozenset({"connection", "content-length", "host", "transfer-encoding"})


class Proxy:
    """Serves at `url` while it is entered."""

    def __init__(
        self, access: Access, host: str = "127.0.0.1", context: ssl.SSLContext | None = None
    ) -> None:
        self.faults = Faults()
        self.reaper: Reaper | None = None
        self.url = ""
        self._access = access
        self._host, self._context = host, context
        self._runner: web.AppRunner | None = None
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=30)
        connector = aiohttp.TCPConnector(limit=0, ssl=Connections(self._access).ssl_context)
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=timeout, auto_decompress=False
        )
        app = web.Application(client_max_size=64 * 2**20)
        app.router.add_route("*", "/{path:.*}", self._serve)
        # A client that disconnects ends its watch, so that dead clients leave nothing.
        self._runner = web.AppRunner(
            app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, self._host, 0, ssl_context=self._context).start()
        scheme = "https" if self._context is not None else "http"
        self.url = f"{scheme}://{self._host}:{self.port}"
        return self

    @property
    def port(self) -> int:
        """The URL at which it listens."""
        assert self._runner is not None, "not entered"
        return int(self._runner.addresses[0][1])

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None, "not entered"
        assert self._session is not None, "not entered"
        await self._runner.cleanup()
        await self._session.close()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        call = _call_of(request)
        if call.agent in self.faults.dead:
            return _cut(request)
        fault = self.faults.take(call)
        # Watches are not counted.
        death = None if call.verb == "watch" else self.faults.dies(call)
        if death is not None and not death.performed:
            death.then()
            return _cut(request)
        if fault is not None and fault.do != "lose":
            refused = await _committed(fault, request)
            if refused is not None:
                return refused
        cut = fault is not None and fault.do == "lose"
        try:
            return await self._reaped(request, call, cut=cut or death is not None)
        finally:
            if death is not None:
                death.then()

    async def _reaped(self, request: web.Request, call: Call, *, cut: bool) -> web.StreamResponse:
        reaper, key = self.reaper, None
        if reaper is not None and request.query.get("dryRun") != "All":  # which stores nothing
            key = reaper.key(call, await request.read())
        if reaper is None or key is None:
            return await self._forward(request, call, cut=cut)
        async with reaper.turn(call.agent):
            if call.agent in self.faults.dead:
                return _cut(request)
            return await self._forward(request, call, cut=cut, key=key)

    async def _kills(self, call: Call, key: Key | None) -> bool:
        if self.reaper is None or key is None or not self.reaper.dies(call, key):
            return False
        self.faults.dead.add(call.agent)
        # A dead client disconnects, which cancels this handler.
        await asyncio.shield(asyncio.create_task(self.reaper.kill(call.agent)))
        return True

    async def _watched(self, answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        faults, count = self.faults.watches, 0
        async for line in iter_lines(answer.content):
            if faults.delay_seconds:
                await asyncio.sleep(faults.delay_seconds)
                faults.delayed += 1
            yield line + b"\n"
            if faults.double:
                yield line + b"\n"
                faults.doubled += 1
            count += 1
            if count == faults.cut_after:
                faults.cut += 1
                return

    async def _forward(
        self, request: web.Request, call: Call, *, cut: bool, key: Key | None = None
    ) -> web.StreamResponse:
        assert self._session is not None, "not entered"
        forwarded = {k: v for k, v in request.headers.items() if k.lower() not in _HOP_BY_HOP}
        async with self._session.request(
            request.method,
            f"{self._access.host}{request.raw_path}",
            headers=forwarded | await self._access.headers(),
            data=await request.read(),
        ) as answer:
            watches = answer.ok and call.verb == "watch"
            if cut or (answer.ok and await self._kills(call, key)):
                if not watches:  # an endless response
                    await answer.read()
                return _cut(request)
            headers = {k: v for k, v in answer.headers.items() if k.lower() not in _HOP_BY_HOP}
            response = web.StreamResponse(status=answer.status, headers=headers)
            with contextlib.suppress(ConnectionError, aiohttp.ClientError):
                await response.prepare(request)
                chunks = self._watched(answer) if watches else answer.content.iter_any()
                async for chunk in chunks:
                    if call.agent in self.faults.dead:
                        return _cut(request)
                    await response.write(chunk)
                if watches and self.faults.watches.cut_after:
                    return _cut(request)
                await response.write_eof()
            return response


async def _committed(fault: Fault, request: web.Request) -> web.Response | None:
    """The injected response; None: the request is forwarded, possibly after a delay."""
    match fault.do:
        case "delay":
            await asyncio.sleep(fault.seconds)
            return None
        case "hang":
            await asyncio.sleep(HANG_SECONDS)
        case "refuse":
            status = {
                "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": fault.code,
                "reason": fault.reason, "message": "a fault of the proxy",
            }  # fmt: skip
            wait = fault.retry_after_seconds
            headers = {} if wait is None else {"Retry-After": str(wait)}
            return web.json_response(status, status=fault.code, headers=headers)
    return _cut(request)


def _call_of(request: web.Request) -> Call:
    agent = request.headers.get("User-Agent", "")
    try:
        target = paths.parse(request.path)
    except ApiRefusal:
        return Call(agent, "get", request.path, "", "")
    verb = _VERBS.get(request.method) or ("get" if target.name else "list")
    if "watch" in request.query:
        verb = "watch"
    return Call(agent, verb, target.resource, target.namespace, target.name)


def _cut(request: web.Request) -> web.Response:
    if request.transport is not None:
        request.transport.abort()
    return web.Response(status=503)
