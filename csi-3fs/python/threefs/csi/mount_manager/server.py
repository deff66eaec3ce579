"""Mount manager process: its socket, one thread per connection, and takeover from an older one.

``threefs-csi mount-manager --socket PATH --clusters DIR --kubelet-dir DIR``. A mount manager that
finds another one at its socket requests its descriptors before it opens its own socket. A new
version of this program thus takes the mounts over, and pods notice only a pause; the older process
then waits to be terminated. A manager that is killed leaves its mounts to the descriptor store, if
there is one (`--fd-store`), and the next manager fetches them from there. Without a store its
mounts end with it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from . import cgroups, fuse_connections, mountinfo
from .fd_store import FdStoreClient
from .mount_table import ManagedMount
from .protocol import (
    PROTOCOL,
    Refused,
    connect,
    listen,
    receive,
    receive_descriptors,
    send,
    send_descriptors,
)
from .service import MountService
from .unmount import WRITEBACK_TIMEOUT_SECONDS

__all__ = ["Server", "main", "take_over"]

CALL_SECONDS = 30.0
"""Idle timeout of a connection."""
HANDOVER_SECONDS = 40.0
CONNECTIONS_MAX = 64
RECONCILE_SECONDS = 30.0
"""Interval at which the descriptor store, which may have restarted, is reconciled."""
PATHS_BYTES_MAX = 4096


class Server:
    """The socket of a mount manager."""

    def __init__(self, path: Path, service: MountService) -> None:
        self._path = path
        self._service = service
        self._slots = threading.BoundedSemaphore(CONNECTIONS_MAX)
        self._socket: socket.socket | None = None

    def open(self) -> None:
        """Listen at the path, in place of any process that listened there before."""
        self._socket = listen(self._path, CONNECTIONS_MAX)
        self._socket.setblocking(False)

    def serve(self, signals: socket.socket) -> None:
        """Serve until `close`.

        `signals` becomes readable with each signal: one that arrives just before a blocking call
        does not interrupt it, and its handler would run only after the next connection.
        """
        assert self._socket is not None
        while True:
            try:
                readable, _, _ = select.select([self._socket, signals], [], [])
                if signals in readable:
                    signals.recv(PATHS_BYTES_MAX)
                connection, _ = self._socket.accept()
            except BlockingIOError:
                continue
            except (OSError, ValueError):
                # Closed, during a call or before it.
                return
            if not self._slots.acquire(timeout=1.0):
                connection.close()
                continue
            threading.Thread(target=self._connection, args=(connection,), daemon=True).start()

    def close(self) -> None:
        """Stop serving."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()

    def _connection(self, connection: socket.socket) -> None:
        try:
            with connection, contextlib.suppress(OSError):
                connection.settimeout(CALL_SECONDS)
                self._serve_request(connection)
        finally:
            self._slots.release()

    def _serve_request(self, connection: socket.socket) -> None:
        try:
            _check_peer(connection)
            request = receive(connection)
            if request.get("op") == "handover":
                self._hand_over(connection)
                return
            reply = {"ok": True, **self._reply(request)}
        except Refused as refused:
            reply = {"ok": False, "kind": refused.kind, "message": refused.message}
        except OSError as error:
            reply = {"ok": False, "kind": "failed", "message": str(error)}
        send(connection, reply)

    def _reply(self, request: dict[str, Any]) -> dict[str, Any]:
        operation = request.get("op")
        text, service = _Fields(request), self._service
        if operation == "hello":
            state = {"mounts": service.count(), "draining": service.draining}
            return {"protocol": PROTOCOL, "pid": os.getpid(), **state}
        if operation == "mount":
            return service.mount(
                text("volume"),
                text("cluster"),
                text("root"),
                text("target"),
                read_only=request.get("read_only") is True,
                node=text("node") if request.get("node") else "",
            )
        if operation == "bind":
            flags = request.get("flags", [])
            if not isinstance(flags, list) or not all(isinstance(flag, str) for flag in flags):
                raise Refused("invalid", "flags must be a list of names")
            read_only = request.get("read_only") is True
            return service.bind(text("source"), text("target"), read_only=read_only, flags=flags)
        if operation == "unmount":
            return service.unmount(text("target"))
        if operation == "list":
            return service.state()
        raise Refused("invalid", f"unknown op {str(operation)[:40]!r}")

    def _hand_over(self, connection: socket.socket) -> None:
        connection.settimeout(HANDOVER_SECONDS)
        handover = self._service.handover
        mounts = handover.prepare()
        try:
            send(connection, {"ok": True, "mounts": [asdict(mount) for mount in mounts]})
            # One after the other: a line read together with a descriptor's message would lose it.
            requested = receive(connection).get("op") == "send"
            if requested:
                send_descriptors(connection, [mount.descriptor for mount in mounts])
            received = requested and receive(connection).get("op") == "received"
        except (OSError, Refused) as error:
            handover.rollback()
            _log(f"handover failed, keeping the mounts: {error}")
            return
        if not received:
            handover.rollback()
            return
        handover.commit()
        _log(f"handed over {len(mounts)} mounts; waiting to be terminated")


class _Fields:
    """Text fields of a request, checked."""

    def __init__(self, request: dict[str, Any]) -> None:
        self._request = request

    def __call__(self, name: str) -> str:
        value = self._request.get(name)
        if not isinstance(value, str) or not 0 < len(value) <= PATHS_BYTES_MAX:
            raise Refused("invalid", f"{name} is {str(value)[:40]!r}; it must be a string")
        if "\0" in value:
            raise Refused("invalid", f"{name} contains a null byte")
        return value


def take_over(path: Path) -> list[ManagedMount] | None:
    """Take the mounts of the manager at a socket; None when no manager listens there."""
    try:
        connection = connect(path, HANDOVER_SECONDS)
    except (FileNotFoundError, ConnectionRefusedError):
        return None
    with connection:
        send(connection, {"op": "handover"})
        reply = receive(connection)
        if reply.get("ok") is not True:
            raise Refused(str(reply.get("kind", "failed")), str(reply.get("message")))
        mounts = reply["mounts"]
        send(connection, {"op": "send"})
        descriptors = receive_descriptors(connection, len(mounts))
        managed = [
            ManagedMount(**{**mount, "descriptor": descriptor})
            for mount, descriptor in zip(mounts, descriptors, strict=True)
        ]
        send(connection, {"op": "received"})
        return managed


def recover(fd_store: FdStoreClient) -> list[ManagedMount]:
    """Fetch the mounts of a killed manager that still exist from the descriptor store."""
    existing = {(entry.target, entry.device) for entry in mountinfo.read()}
    recovered = []
    for mount in fd_store.fetch():
        if (mount.target, mount.device) in existing:
            recovered.append(mount)
        else:
            os.close(mount.descriptor)
            fd_store.delete(mount.target)
    if recovered:
        _log(f"recovered {len(recovered)} mounts of a killed mount manager")
    return recovered


def main(arguments: list[str] | None = None) -> int:
    """Run until SIGTERM."""
    args = _parser().parse_args(arguments)
    # The command may be followed by its own arguments, so it comes last on the command line.
    command = args.daemon or [sys.executable, "-P", "-m", "threefs", "fuse"]
    args.socket.parent.mkdir(parents=True, exist_ok=True)
    if not fuse_connections.mount_fusectl():
        _log(
            f"{fuse_connections.CONNECTIONS} is missing and fusectl cannot be mounted there: "
            "unmounts of write-back volumes cannot be verified; run the mount manager privileged"
        )
    fd_store = FdStoreClient(args.fd_store)
    service = MountService(
        args.kubelet_dir,
        args.clusters,
        args.socket.parent,
        command,
        fd_store,
        args.writeback_timeout,
        _divide_cgroup() if args.daemon_cgroups else None,
    )
    server = Server(args.socket, service)
    mounts = take_over(args.socket)
    if mounts is None:
        mounts = recover(fd_store)
    server.open()
    service.handover.adopt(mounts)
    service.handover.reconcile()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: server.close())
    signals, wakeup = socket.socketpair()
    wakeup.setblocking(False)
    signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_reconcile, args=(service,), daemon=True).start()
    _log(f"managing {service.count()} mounts, listening at {args.socket}")
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    server.serve(signals)
    service.handover.stop()
    return 0


def _divide_cgroup() -> cgroups.Cgroups | None:
    try:
        return cgroups.divide(cgroups.own_group())
    except cgroups.CgroupError as error:
        _log(f"FUSE daemons have no control groups and share the container's memory: {error}")
        return None


def _reconcile(service: MountService) -> None:
    while True:
        time.sleep(RECONCILE_SECONDS)
        try:
            service.handover.reconcile()
        except Exception as error:  # noqa: BLE001 -- retried at the next interval
            _log(
                "reconciling the descriptor store failed, next try in "
                f"{RECONCILE_SECONDS:g} s: {error!r}"
            )


def _parser() -> argparse.ArgumentParser:
    def setting(name: str, default: str) -> Path:
        return Path(os.environ.get(name, default))

    parser = argparse.ArgumentParser(
        prog="threefs-csi mount-manager",
        description="Manage the FUSE mounts of this node and replace daemons that die.",
    )
    parser.add_argument(
        "--socket",
        type=Path,
        default=setting("THREEFS_MOUNT_MANAGER", "/run/threefs-mount-manager/mount-manager.sock"),
        help="socket to listen at; %(default)s",
    )
    parser.add_argument(
        "--clusters",
        type=Path,
        default=setting("THREEFS_CLUSTERS", "/etc/threefs/clusters"),
        help="folder with one folder per cluster; %(default)s",
    )
    parser.add_argument(
        "--kubelet-dir",
        type=Path,
        default=setting("THREEFS_KUBELET_DIR", "/var/lib/kubelet"),
        help="folder below which volumes are mounted; %(default)s",
    )
    parser.add_argument(
        "--fd-store",
        type=Path,
        default=os.environ.get("THREEFS_FD_STORE"),
        help="socket of the descriptor store; none by default",
    )
    parser.add_argument(
        "--writeback-timeout",
        type=float,
        default=os.environ.get("THREEFS_WRITEBACK_TIMEOUT", WRITEBACK_TIMEOUT_SECONDS),
        help="seconds after which a mount whose dirty data cannot be written is detached; "
        "%(default)s",
    )
    parser.add_argument(
        "--daemon-cgroups",
        action=argparse.BooleanOptionalAction,
        default=os.environ.get("THREEFS_DAEMON_CGROUPS", "false") == "true",
        help="divide the container's control group, so that each volume's daemons have a memory "
        "limit; %(default)s",
    )
    parser.add_argument(
        "--daemon",
        nargs=argparse.REMAINDER,
        help="command line of the FUSE daemon; `threefs fuse` by default",
    )
    return parser


def _check_peer(connection: socket.socket) -> None:
    credentials = connection.getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
    )
    _, uid, _ = struct.unpack("3i", credentials)
    if uid not in (0, os.getuid()):
        raise Refused("invalid", "only root may send requests to the mount manager")


def _log(line: str) -> None:
    sys.stderr.write(f"threefs-mount-manager: {line}\n")
    sys.stderr.flush()
