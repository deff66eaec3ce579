"""The keeper: a process beside the holder that keeps a second copy of each mount's descriptor.

When the holder is killed without a successor, the kernel still has the mounts, because the keeper
has their descriptors: the next holder gets them back and goes on. It does nothing else, so that
there is nothing in it to fail: no threads, no children, one request and one answer a connection.

Requests, a JSON line each, over a UNIX stream that only root may use::

    keep {line}   then a descriptor -> ok     replaces what was kept for that target
    drop target                     -> ok
    lines                           -> lines
    lines then give                 -> lines, then a descriptor for each

A request that makes no sense, or takes too long, costs its sender the connection and nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import signal
import socket
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .protocol import Refused, receive, receive_descriptors, send, send_descriptors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .held import Held

__all__ = ["KeeperClient", "main"]

CALL_SECONDS = 10.0
"""Local and tiny: whoever takes longer, even on a busy machine, is cut off, so that the others are
served."""
DROP_SECONDS = 1.0
"""Undoing a mount has a few seconds in all; what is not dropped then is dropped by a reminder."""
MOUNTS_MAX = 4096


class Keeper:
    """What is kept, by target."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[dict[str, Any], int]] = {}

    def serve(self, listener: socket.socket) -> None:
        """Answer until the listener is closed."""
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(CALL_SECONDS)
                try:
                    # A probe asks nothing.
                    if connection.recv(1, socket.MSG_PEEK):
                        self._answer(connection)
                except Exception as error:  # noqa: BLE001 -- what is kept must outlive any request
                    _say(f"a request was not answered: {error!r}")

    def _answer(self, connection: socket.socket) -> None:
        request = receive(connection)
        operation = request.get("op")
        if operation == "keep":
            # In turns: a line that is read together with a descriptor's message would lose it.
            send(connection, {"ok": True})
            (descriptor,) = receive_descriptors(connection, 1)
            self._keep(request, descriptor)
            send(connection, {"ok": True})
        elif operation == "drop":
            self._drop(str(request.get("target")))
            send(connection, {"ok": True})
        elif operation == "lines":
            kept = list(self._kept.values())
            send(connection, {"ok": True, "lines": [line for line, _ in kept]})
            if kept and request.get("then") == "give" and receive(connection).get("op") == "give":
                send_descriptors(connection, [descriptor for _, descriptor in kept])
        else:
            send(connection, {"ok": False, "message": f"op {str(operation)[:40]!r} is not known"})

    def _keep(self, request: dict[str, Any], descriptor: int) -> None:
        line = request.get("line")
        target = line.get("target") if isinstance(line, dict) else None
        if not isinstance(line, dict) or not isinstance(target, str):
            os.close(descriptor)
            raise Refused("invalid", f"keep {str(target)[:80]!r}: the target must be a path")
        self._drop(target)
        if len(self._kept) >= MOUNTS_MAX:
            os.close(descriptor)
            raise Refused("failed", f"{MOUNTS_MAX} mounts are kept; more are too many")
        self._kept[target] = (line, descriptor)

    def _drop(self, target: str) -> None:
        kept = self._kept.pop(target, None)
        if kept is not None:
            os.close(kept[1])


class KeeperClient:
    """The holder's side. Without a keeper everything works but surviving the holder's death."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def keep(self, held: Held) -> None:
        """Keep a copy of a descriptor."""
        line = asdict(held)
        del line["descriptor"]
        with self._connected() as connection:
            if connection is not None:
                send(connection, {"op": "keep", "line": line})
                receive(connection)
                send_descriptors(connection, [held.descriptor])
                receive(connection)

    def drop(self, target: str) -> None:
        """The mount has ended."""
        with self._connected(DROP_SECONDS) as connection:
            if connection is not None:
                send(connection, {"op": "drop", "target": target})
                receive(connection)

    def known(self) -> dict[str, str] | None:
        """The device of what is kept, by target; none if the keeper does not answer."""
        with self._connected() as connection:
            if connection is not None:
                send(connection, {"op": "lines"})
                lines = receive(connection)["lines"]
                return {str(line["target"]): str(line["device"]) for line in lines}
        return None

    def kept(self) -> list[Held]:
        """What is kept, each with a descriptor that is this process's own.

        What a keeper of another version has and we cannot read stays with it.
        """
        from .held import Held  # the keeper itself has no use for it

        found: list[Held] = []
        with self._connected() as connection:
            if connection is not None:
                send(connection, {"op": "lines", "then": "give"})
                lines: list[dict[str, Any]] = receive(connection)["lines"]
                if lines:
                    send(connection, {"op": "give"})
                    descriptors = receive_descriptors(connection, len(lines))
                    for line, descriptor in zip(lines, descriptors, strict=True):
                        try:
                            found.append(Held(**{**line, "descriptor": descriptor}))
                        except TypeError as error:
                            os.close(descriptor)
                            _say(f"a keeper of another version: {error}")
        return found

    @contextlib.contextmanager
    def _connected(self, seconds: float = CALL_SECONDS) -> Iterator[socket.socket | None]:
        if self._path is None:
            yield None
            return
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(seconds)
        with connection:
            try:
                connection.connect(str(self._path))
            except OSError as error:
                _say(f"no keeper at {self._path} ({error}): mounts end if this holder is killed")
                yield None
                return
            try:
                yield connection
            except (OSError, Refused, KeyError) as error:
                _say(f"the keeper at {self._path} did not do as asked: {error}")


def main(arguments: list[str] | None = None) -> int:
    """Run until SIGTERM."""
    parser = argparse.ArgumentParser(
        prog="threefs-csi keeper",
        description="Keep copies of mounts' descriptors over the death of their holder.",
    )
    default = os.environ.get("THREEFS_KEEPER", "/run/threefs-holder/keeper.sock")
    parser.add_argument("--socket", type=Path, default=default)
    path: Path = parser.parse_args(arguments).socket
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    path.parent.mkdir(parents=True, exist_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    path.unlink(missing_ok=True)
    before = os.umask(0o177)
    listener.bind(str(path))
    os.umask(before)
    listener.listen(16)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: sys.exit(0))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    Keeper().serve(listener)
    return 0


def _say(line: str) -> None:
    sys.stderr.write(f"threefs-keeper: {line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
