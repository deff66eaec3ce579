"""The holder as a process: its socket, one thread a connection, and taking over from an older one.

``threefs-csi holder --socket PATH --clusters DIR --kubelet-dir DIR``. A holder that finds another
one at its socket asks it for its descriptors before it opens its own socket: so a new version of
this program takes the mounts over and no pod notices more than a pause. The older one then waits to
be ended. One that is killed leaves its mounts to the keeper, if there is one (`--keeper`): the next
holder gets them from there. Without a keeper it takes its mounts with it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import struct
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from . import connections, control_groups, mountinfo
from .held import Held
from .keeper import KeeperClient
from .mounts import Mounts
from .protocol import (
    PROTOCOL,
    Refused,
    receive,
    receive_descriptors,
    send,
    send_descriptors,
)
from .undoing import PATIENCE_SECONDS

__all__ = ["Server", "main", "take_over"]

CALL_SECONDS = 30.0
"""Longest silence on a connection."""
HANDOVER_SECONDS = 40.0
CONNECTIONS_MAX = 64
REMIND_SECONDS = 30.0
"""Between two times that the keeper, which may have begun anew, is told of all mounts."""
PATHS_BYTES_MAX = 4096


class Server:
    """The socket of a holder."""

    def __init__(self, path: Path, mounts: Mounts) -> None:
        self._path = path
        self._mounts = mounts
        self._slots = threading.BoundedSemaphore(CONNECTIONS_MAX)
        self._socket: socket.socket | None = None

    def open(self) -> None:
        """Listen at the path; whoever listened there is not found any more from now on."""
        beside = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        with contextlib.suppress(FileNotFoundError):
            beside.unlink()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # Nobody may connect before the mode is set.
        old = os.umask(0o177)
        try:
            listener.bind(str(beside))
        finally:
            os.umask(old)
        listener.listen(CONNECTIONS_MAX)
        beside.replace(self._path)
        self._socket = listener

    def serve(self) -> None:
        """Answer until `close`."""
        assert self._socket is not None
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            if not self._slots.acquire(timeout=1.0):
                connection.close()
                continue
            threading.Thread(target=self._connection, args=(connection,), daemon=True).start()

    def close(self) -> None:
        """Stop answering."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()

    def _connection(self, connection: socket.socket) -> None:
        try:
            with connection, contextlib.suppress(OSError):
                connection.settimeout(CALL_SECONDS)
                self._one(connection)
        finally:
            self._slots.release()

    def _one(self, connection: socket.socket) -> None:
        try:
            _check_peer(connection)
            request = receive(connection)
            if request.get("op") == "handover":
                self._hand_over(connection)
                return
            answer = {"ok": True, **self._answer(request)}
        except Refused as refused:
            answer = {"ok": False, "kind": refused.kind, "message": refused.message}
        except OSError as error:
            answer = {"ok": False, "kind": "failed", "message": str(error)}
        send(connection, answer)

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        operation = request.get("op")
        text, mounts = _Fields(request), self._mounts
        if operation == "hello":
            told = {"held": mounts.count(), "leaving": mounts.leaving}
            return {"protocol": PROTOCOL, "pid": os.getpid(), **told}
        if operation == "mount":
            return mounts.mount(
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
            return mounts.bind(text("source"), text("target"), read_only=read_only, flags=flags)
        if operation == "unmount":
            return mounts.unmount(text("target"))
        if operation == "list":
            return mounts.state()
        raise Refused("invalid", f"op {str(operation)[:40]!r} is not known")

    def _hand_over(self, connection: socket.socket) -> None:
        connection.settimeout(HANDOVER_SECONDS)
        given = self._mounts.handover.give_up()
        try:
            send(connection, {"ok": True, "held": [asdict(held) for held in given]})
            # In turns: a line that is read together with a descriptor's message would lose it.
            wanted = receive(connection).get("op") == "give"
            if wanted:
                send_descriptors(connection, [held.descriptor for held in given])
            taken = wanted and receive(connection).get("op") == "taken"
        except (OSError, Refused) as error:
            self._mounts.handover.take_back()
            _say(f"handing over failed, the mounts stay here: {error}")
            return
        if not taken:
            self._mounts.handover.take_back()
            return
        self._mounts.handover.gone()
        _say(f"{len(given)} mounts were handed over; waiting to be ended")


class _Fields:
    """Text fields of a request, checked."""

    def __init__(self, request: dict[str, Any]) -> None:
        self._request = request

    def __call__(self, name: str) -> str:
        value = self._request.get(name)
        if not isinstance(value, str) or not 0 < len(value) <= PATHS_BYTES_MAX:
            raise Refused("invalid", f"{name} is {str(value)[:40]!r}; it must be a text")
        if "\0" in value:
            raise Refused("invalid", f"{name} contains a zero byte")
        return value


def take_over(path: Path) -> list[Held] | None:
    """The mounts of the holder at a socket, now ours; None when nobody is there."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(HANDOVER_SECONDS)
    with connection:
        try:
            connection.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return None
        send(connection, {"op": "handover"})
        answer = receive(connection)
        if answer.get("ok") is not True:
            raise Refused(str(answer.get("kind", "failed")), str(answer.get("message")))
        lines = answer["held"]
        send(connection, {"op": "give"})
        descriptors = receive_descriptors(connection, len(lines))
        held = [
            Held(**{**line, "descriptor": descriptor})
            for line, descriptor in zip(lines, descriptors, strict=True)
        ]
        send(connection, {"op": "taken"})
        return held


def take_from(keeper: KeeperClient) -> list[Held]:
    """The mounts of a holder that was killed, as far as they are still there."""
    there = {(mount.target, mount.device) for mount in mountinfo.read()}
    taken = []
    for held in keeper.kept():
        if (held.target, held.device) in there:
            taken.append(held)
        else:
            os.close(held.descriptor)
            keeper.drop(held.target)
    if taken:
        _say(f"{len(taken)} mounts of a holder that was killed go on")
    return taken


def main(arguments: list[str] | None = None) -> int:
    """Run until SIGTERM."""
    options = _parser().parse_args(arguments)
    # The command may be followed by its own arguments, so it comes last on the command line.
    command = options.daemon or [sys.executable, "-P", "-m", "threefs", "fuse"]
    options.socket.parent.mkdir(parents=True, exist_ok=True)
    if not connections.make_visible():
        _say(
            f"{connections.CONNECTIONS} is not there and fusectl cannot be mounted at it: the end "
            "of a volume that is written behind cannot be watched; run the holder privileged"
        )
    keeper = KeeperClient(options.keeper)
    mounts = Mounts(
        options.kubelet_dir,
        options.clusters,
        options.socket.parent,
        command,
        keeper,
        options.write_patience,
        _control_groups() if options.daemon_groups else None,
    )
    server = Server(options.socket, mounts)
    taken = take_over(options.socket)
    if taken is None:
        taken = take_from(keeper)
    server.open()
    mounts.handover.adopt(taken)
    mounts.handover.remind()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: server.close())
    threading.Thread(target=_remind, args=(mounts,), daemon=True).start()
    _say(f"holds {mounts.count()} mounts, listens at {options.socket}")
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    server.serve()
    mounts.handover.stop()
    return 0


def _control_groups() -> control_groups.ControlGroups | None:
    try:
        return control_groups.divide(control_groups.own_group())
    except control_groups.IndivisibleError as why:
        _say(f"FUSE daemons have no control groups and share the container's memory: {why}")
        return None


def _remind(mounts: Mounts) -> None:
    while True:
        time.sleep(REMIND_SECONDS)
        try:
            mounts.handover.remind()
        except Exception as error:  # noqa: BLE001 -- one that fails must not be the last
            _say(f"the keeper was not reminded, next try in {REMIND_SECONDS:g} s: {error!r}")


def _parser() -> argparse.ArgumentParser:
    def setting(name: str, default: str) -> Path:
        return Path(os.environ.get(name, default))

    parser = argparse.ArgumentParser(
        prog="threefs-csi holder",
        description="Keep FUSE mounts of this node alive over deaths of their daemons.",
    )
    parser.add_argument(
        "--socket", type=Path, default=setting("THREEFS_HOLDER", "/run/threefs-holder/holder.sock")
    )
    parser.add_argument(
        "--clusters", type=Path, default=setting("THREEFS_CLUSTERS", "/etc/threefs/clusters")
    )
    parser.add_argument(
        "--kubelet-dir", type=Path, default=setting("THREEFS_KUBELET_DIR", "/var/lib/kubelet")
    )
    parser.add_argument("--keeper", type=Path, default=os.environ.get("THREEFS_KEEPER"))
    parser.add_argument(
        "--write-patience",
        type=float,
        default=os.environ.get("THREEFS_WRITE_PATIENCE", PATIENCE_SECONDS),
        help="seconds after which a mount is undone whose data cannot be written; %(default)s",
    )
    parser.add_argument(
        "--daemon-groups",
        action=argparse.BooleanOptionalAction,
        default=os.environ.get("THREEFS_DAEMON_GROUPS", "false") == "true",
        help="divide the container's control group, so that each volume's daemons have a limit; "
        "%(default)s",
    )
    parser.add_argument(
        "--daemon", nargs=argparse.REMAINDER, help="the daemon's command; threefs fuse by default"
    )
    return parser


def _check_peer(connection: socket.socket) -> None:
    credentials = connection.getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
    )
    _, uid, _ = struct.unpack("3i", credentials)
    if uid not in (0, os.getuid()):
        raise Refused("invalid", "only root may ask the holder")


def _say(line: str) -> None:
    sys.stderr.write(f"threefs-holder: {line}\n")
    sys.stderr.flush()
