"""Descriptor store: a process that keeps a second copy of the descriptor of each mount.

When the mount manager is killed without a successor, the kernel keeps the mounts, because the store
has their descriptors. The next mount manager fetches them and continues. The store does nothing
else, so that little can fail in it: no threads, no children, one request and one reply a
connection.

Requests, a JSON line each, over a UNIX stream that only root may use::

    put {mount}    then a descriptor -> ok      replaces the descriptor stored for the target
    delete target                    -> ok
    list                             -> mounts
    list then send                   -> mounts, then a descriptor for each

An invalid or slow request costs its sender the connection, and has no other effect.
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

from .protocol import (
    Refused,
    connect,
    listen,
    receive,
    receive_descriptors,
    send,
    send_descriptors,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .mount_table import ManagedMount

__all__ = ["FdStoreClient", "main"]

CALL_SECONDS = 10.0
"""Requests are local and tiny: a slower client, even on a busy machine, is disconnected so that
other clients are served."""
DELETE_SECONDS = 1.0
"""An unmount may take a few seconds in all; a failed delete is repeated by `Handover.reconcile`."""
MOUNTS_MAX = 4096


class FdStore:
    """The stored descriptors by target."""

    def __init__(self) -> None:
        self._stored: dict[str, tuple[dict[str, Any], int]] = {}

    def serve(self, listener: socket.socket) -> None:
        """Serve until the listener is closed."""
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(CALL_SECONDS)
                try:
                    # A probe sends no request.
                    if connection.recv(1, socket.MSG_PEEK):
                        self._serve_request(connection)
                except Exception as error:  # noqa: BLE001 -- the store must survive any request
                    _log(f"request failed: {error!r}")

    def _serve_request(self, connection: socket.socket) -> None:
        request = receive(connection)
        operation = request.get("op")
        if operation == "put":
            # One after the other: a line read together with a descriptor's message would lose it.
            send(connection, {"ok": True})
            (descriptor,) = receive_descriptors(connection, 1)
            self._put(request, descriptor)
            send(connection, {"ok": True})
        elif operation == "delete":
            self._delete(str(request.get("target")))
            send(connection, {"ok": True})
        elif operation == "list":
            stored = list(self._stored.values())
            send(connection, {"ok": True, "mounts": [mount for mount, _ in stored]})
            if stored and request.get("then") == "send" and receive(connection).get("op") == "send":
                send_descriptors(connection, [descriptor for _, descriptor in stored])
        else:
            send(connection, {"ok": False, "message": f"unknown op {str(operation)[:40]!r}"})

    def _put(self, request: dict[str, Any], descriptor: int) -> None:
        mount = request.get("mount")
        target = mount.get("target") if isinstance(mount, dict) else None
        if not isinstance(mount, dict) or not isinstance(target, str):
            os.close(descriptor)
            raise Refused("invalid", f"put {str(target)[:80]!r}: the target must be a path")
        self._delete(target)
        if len(self._stored) >= MOUNTS_MAX:
            os.close(descriptor)
            raise Refused("failed", f"the store is full: at most {MOUNTS_MAX} mounts")
        self._stored[target] = (mount, descriptor)

    def _delete(self, target: str) -> None:
        stored = self._stored.pop(target, None)
        if stored is not None:
            os.close(stored[1])


class FdStoreClient:
    """The mount manager's side. Without a store, mounts do not survive the manager's death."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def put(self, mount: ManagedMount) -> None:
        """Store a copy of a mount's descriptor."""
        fields = asdict(mount)
        del fields["descriptor"]
        with self._connected() as connection:
            if connection is not None:
                send(connection, {"op": "put", "mount": fields})
                receive(connection)
                send_descriptors(connection, [mount.descriptor])
                receive(connection)

    def delete(self, target: str) -> None:
        """Delete the descriptor of a mount that has ended."""
        with self._connected(DELETE_SECONDS) as connection:
            if connection is not None:
                send(connection, {"op": "delete", "target": target})
                receive(connection)

    def devices(self) -> dict[str, str] | None:
        """Return the device of each stored mount by target; None if the store does not answer."""
        with self._connected() as connection:
            if connection is not None:
                send(connection, {"op": "list"})
                mounts = receive(connection)["mounts"]
                return {str(mount["target"]): str(mount["device"]) for mount in mounts}
        return None

    def fetch(self) -> list[ManagedMount]:
        """Return the stored mounts, each with a new copy of its descriptor.

        Mounts of a store of another version that cannot be parsed stay in the store.
        """
        from .mount_table import ManagedMount  # the store process itself does not need it

        fetched: list[ManagedMount] = []
        with self._connected() as connection:
            if connection is not None:
                send(connection, {"op": "list", "then": "send"})
                mounts: list[dict[str, Any]] = receive(connection)["mounts"]
                if mounts:
                    send(connection, {"op": "send"})
                    descriptors = receive_descriptors(connection, len(mounts))
                    for mount, descriptor in zip(mounts, descriptors, strict=True):
                        try:
                            fetched.append(ManagedMount(**{**mount, "descriptor": descriptor}))
                        except TypeError as error:
                            os.close(descriptor)
                            _log(f"the descriptor store has another version: {error}")
        return fetched

    @contextlib.contextmanager
    def _connected(self, seconds: float = CALL_SECONDS) -> Iterator[socket.socket | None]:
        if self._path is None:
            yield None
            return
        try:
            connection = connect(self._path, seconds)
        except OSError as error:
            _log(
                f"no descriptor store at {self._path} ({error}): mounts end if the mount manager "
                "is killed"
            )
            yield None
            return
        with connection:
            try:
                yield connection
            except (OSError, Refused, KeyError) as error:
                _log(f"request to the descriptor store at {self._path} failed: {error}")


def main(arguments: list[str] | None = None) -> int:
    """Run until SIGTERM."""
    parser = argparse.ArgumentParser(
        prog="threefs-csi fd-store",
        description="Keep copies of the mounts' descriptors, so that mounts survive the death of "
        "the mount manager.",
    )
    default = os.environ.get("THREEFS_FD_STORE", "/run/threefs-mount-manager/fd-store.sock")
    parser.add_argument("--socket", type=Path, default=default)
    path: Path = parser.parse_args(arguments).socket
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    path.parent.mkdir(parents=True, exist_ok=True)
    listener = listen(path, 16)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: sys.exit(0))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    FdStore().serve(listener)
    return 0


def _log(line: str) -> None:
    sys.stderr.write(f"threefs-fd-store: {line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
