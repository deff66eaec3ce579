"""The launcher's side of the sidecar: one socket in the pod's shared folder.

The newest connection that identifies as the launcher is used. Every process of the pod may connect
and send anything, which affects only its own job, never this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from flyer.job.container import LAUNCHER_SOCKET
from flyer.job.failure import TRACEBACK_CHARACTERS_MAX
from flyer.job.fields import LINE_BYTES_MAX, Fields, ProtocolError, parse_object
from flyer.job.limits import TRACEBACK_CHARS_MAX
from flyer.sidecar.wire import End, LauncherState

if TYPE_CHECKING:
    from pathlib import Path

    from flyer.sidecar.state import SidecarState

__all__ = ["LauncherServer"]

CONNECTIONS_MAX: Final = 8
WRITE_SECONDS_MAX: Final = 5.0
_ORDER = list(LauncherState)

log = logging.getLogger(__name__)


class LauncherServer:
    """Serves the socket until closed."""

    def __init__(self, state: SidecarState, folder: Path) -> None:
        self._state = state
        self._path = folder / LAUNCHER_SOCKET
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writer: asyncio.StreamWriter | None = None

    async def start(self) -> None:
        """Bind and serve; replaces the socket of an earlier process."""
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()
        self._server = await asyncio.start_unix_server(
            self._accept, path=str(self._path), limit=LINE_BYTES_MAX
        )
        self._path.chmod(0o666)

    async def close(self) -> None:
        """Close the socket and its connections."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def push(self) -> None:
        """Send the launcher all orders so far; it accepts repeated ones."""
        start = self._state.start
        if self._writer is None or self._writer.is_closing():
            return
        if start is not None and self._state.report.launcher is LauncherState.WAITING:
            namespace, _, name = start.job.partition("/")
            pod = {
                "job": name,
                "namespace": namespace,
                "chain": start.chain,
                "attempt": start.attempt,
                "node": start.node,
                "zone": start.zone,
                "node_rank": start.node_rank,
                "nodes": start.nodes,
                "ranks_per_node": start.ranks_per_node,
                "master_addr": start.master_addr,
                "master_port": start.master_port,
                "stop_grace_seconds": start.stop_grace_seconds,
            }
            order = {"kind": "start", "pod": pod, "output_seconds": start.output_seconds}
            self._send({**order, "key": start.key})
        if self._state.terminate:
            self._send({"kind": "terminate"})
        if self._state.kill:
            self._send({"kind": "kill"})

    def _send(self, message: dict[str, Any]) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(json.dumps(message).encode() + b"\n")

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None or len(self._tasks) >= CONNECTIONS_MAX:
            writer.close()
            return
        self._tasks.add(task)
        try:
            while line := await reader.readuntil(b"\n"):
                self._take(parse_object(line), writer)
                async with asyncio.timeout(WRITE_SECONDS_MAX):
                    await writer.drain()
        except (ConnectionError, TimeoutError, asyncio.IncompleteReadError) as error:
            log.debug("a launcher's connection ended: %r", error)
        except (ProtocolError, asyncio.LimitOverrunError) as error:
            log.warning("the launcher's socket: %s", error)
        except asyncio.CancelledError:
            pass  # closing; nothing awaits this task
        finally:
            self._tasks.discard(task)
            if self._writer is writer:
                self._writer = None
            writer.close()

    def _take(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        fields = Fields("launcher", body)
        match body.get("op"):
            case "launcher":
                state = fields.text("state")
                if state not in _ORDER:
                    raise ProtocolError("bad_field", f"launcher: `state` is {state!r:.40}")
                self._writer = writer
                self._advance(LauncherState(state))
                self.push()
            case "output":
                self._state.update(output=self._state.report.output + 1)
            case "ended":
                end = _end(fields)
                if self._state.report.end is None:
                    own = None if end.rank is None else self._state.own_rank(end.rank)
                    self._state.update(end=replace(end, rank=own), launcher=LauncherState.ENDED)
                writer.write(b'{"kind": "done"}\n')
            case unknown:
                raise ProtocolError("bad_operation", f"launcher: unknown operation {unknown!r:.80}")

    def _advance(self, state: LauncherState) -> None:
        if _ORDER.index(state) > _ORDER.index(self._state.report.launcher):
            self._state.update(launcher=state)


def _end(fields: Fields) -> End:
    code = fields.integer("code", -128, 255)
    failure = fields.object_or_none("failure")
    if failure is None:
        return End(code)
    traceback = failure.words_or_none("traceback", TRACEBACK_CHARACTERS_MAX)
    return End(
        code=code,
        rank=failure.integer("rank"),
        time=failure.number("time", 0.0),
        peer_lost=failure.boolean("peer_lost", default=False),
        rank_status=failure.integer_or_none("exit_status"),
        rank_signal=failure.integer_or_none("signal"),
        error_type=failure.words_or_none("error_type"),
        traceback=traceback[-TRACEBACK_CHARS_MAX:] if traceback else None,
    )
