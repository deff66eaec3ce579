"""The launcher as a container's first process: `flyer-launch -- COMMAND …`.

It waits for the start order of the sidecar in the same pod, which names this pod's part of the
gang, and then runs the ordinary launcher. The ranks' output becomes the container's log. Launcher
and sidecar exchange messages over one socket, which the launcher reopens after a restart of either:

    launcher                                   sidecar
    {"op": "launcher", "state": "waiting"}  →
                                            ←  {"kind": "start", "pod": {…}, "output_seconds": 30,
                                                "key": "…" or null}
    {"op": "launcher", "state": "running"}  →
    {"op": "output"}                        →  a rank has written output
                                            ←  {"kind": "terminate"} or {"kind": "kill"}
    {"op": "ended", "code": 1, "failure": {…} or null}  →
                                            ←  {"kind": "done"}
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from flyer.job import launcher
from flyer.job.console import Console
from flyer.job.failure import Failure, traceback_in
from flyer.job.fields import LINE_BYTES_MAX
from flyer.job.key_file import KEY_FILE, KEY_FILE_VARIABLE, write_private
from flyer.job.launcher_context import LauncherContext
from flyer.job.pod import THREAD_COUNT_NAMES, PodSpec, PodSpecError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["LAUNCHER_SOCKET", "RUN_FOLDER", "main", "pod_of"]

RUN_FOLDER: Final = "/run/flyer"
LAUNCHER_SOCKET: Final = "launcher.sock"
TERMINATION_LOG: Final = "/dev/termination-log"
TERMINATION_BYTES_MAX: Final = 4096  # kubelet's limit
START_SECONDS: Final = 900.0
RECONNECT_SECONDS: Final = 0.2
DONE_SECONDS: Final = 3.0
DRAIN_SECONDS: Final = 10.0
OUTPUT_SECONDS: Final = 30.0
KILL_SECONDS: Final = 1.0  # between SIGTERM and SIGKILL
EXIT_NO_START: Final = 75  # as after a lost peer: another attempt may succeed


class _Link:
    """The connection to the sidecar, which may be unavailable at any time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._socket: socket.socket | None = None
        self._received = bytearray()
        self._again_at = 0.0
        self.state = "waiting"

    def descriptor(self) -> int | None:
        """The descriptor to poll, if connected."""
        return self._socket.fileno() if self._socket else None

    def connect(self) -> bool:
        """Connect, at intervals, and report the launcher's state."""
        if self._socket is not None:
            return True
        if time.monotonic() < self._again_at:
            return False
        self._again_at = time.monotonic() + RECONNECT_SECONDS
        probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            probe.connect(str(self._path))
        except OSError:
            probe.close()
            return False
        probe.setblocking(False)
        self._socket, self._received = probe, bytearray()
        self.send({"op": "launcher", "state": self.state})
        return self._socket is not None

    @property
    def again_at(self) -> float | None:
        """When to connect next, if not connected."""
        return None if self._socket else self._again_at

    def send(self, message: dict[str, Any]) -> None:
        """Send one line; a sidecar that does not accept it immediately counts as lost."""
        if self._socket is None:
            return
        try:
            line = json.dumps(message).encode() + b"\n"
            if self._socket.send(line) < len(line):
                self._hang_up()
        except OSError:
            self._hang_up()

    def read(self) -> list[dict[str, Any]]:
        """The messages received; malformed lines are skipped."""
        if self._socket is None:
            return []
        try:
            received = self._socket.recv(LINE_BYTES_MAX)
        except BlockingIOError:
            return []
        except OSError:
            received = b""
        if not received or len(self._received) > LINE_BYTES_MAX:
            self._hang_up()
            return []
        *lines, rest = bytes(self._received + received).split(b"\n")
        self._received[:] = rest
        messages = []
        for line in lines:
            with contextlib.suppress(ValueError, RecursionError):
                message = json.loads(line)
                if isinstance(message, dict):
                    messages.append(message)
        return messages

    def wait(self, seconds: float) -> list[dict[str, Any]]:
        """Wait for a message or the timeout, connected or not."""
        if not self.connect():
            time.sleep(min(seconds, 0.02))
            return []
        poll = select.poll()
        poll.register(self.descriptor() or 0, select.POLLIN)
        return self.read() if poll.poll(seconds * 1000) else []

    def _hang_up(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
            self._again_at = time.monotonic() + RECONNECT_SECONDS


class _Container(LauncherContext):
    """A container: output on one stream, reports to the sidecar."""

    def __init__(self, link: _Link, output_seconds: float) -> None:
        self._link = link
        self._console = Console()
        self._output_seconds = output_seconds
        self._output_reported_at = time.monotonic()
        self._output_reported = 0
        self._terminated = self._killed = False
        self._kill_at: float | None = None

    def output_for(self, rank: int) -> int | None:
        return self._console.open(rank)

    def events(self) -> dict[int, int]:
        descriptor = self._link.descriptor()
        link = {} if descriptor is None else {descriptor: select.POLLIN}
        return self._console.events() | link

    def due(self) -> float | None:
        times = (self._console.due(), self._link.again_at, self._output_due(), self._kill_at)
        return min((at for at in times if at is not None), default=None)

    def take(self, ready: dict[int, int]) -> list[int]:
        self._console.take(ready)
        self._link.connect()
        output_due = self._output_due()
        if output_due is not None and time.monotonic() >= output_due:
            self._output_reported, self._output_reported_at = (
                self._console.bytes_read,
                time.monotonic(),
            )
            self._link.send({"op": "output"})
        return self._signals({message.get("kind") for message in self._link.read()})

    def _signals(self, signal_names: set[Any]) -> list[int]:
        """The signals for the ranks; the sidecar repeats an order until it is obeyed."""
        signals = []
        if signal_names & {"terminate", "kill"} and not self._terminated:
            self._terminated = True
            signals.append(int(signal.SIGTERM))
        if "kill" in signal_names and not self._killed:
            self._killed = True
            self._kill_at = time.monotonic() + KILL_SECONDS
        if self._kill_at is not None and time.monotonic() >= self._kill_at:
            self._kill_at = None
            signals.append(int(signal.SIGKILL))
        return signals

    def started(self) -> None:
        self._link.state = "running"
        self._link.send({"op": "launcher", "state": "running"})

    def traceback(self, rank: int, log_path: Path, offset: int) -> str | None:  # noqa: ARG002
        self._console.drain(DRAIN_SECONDS)
        return traceback_in(self._console.tail(rank))

    def blame(self, text: str) -> None:
        self._console.drain(DRAIN_SECONDS)
        self._console.write_line(text)
        with contextlib.suppress(OSError):
            Path(TERMINATION_LOG).write_bytes(_ends(text))

    def ended(self, code: int, failure: Failure | None) -> None:
        self._console.drain(DRAIN_SECONDS)
        report = {"op": "ended", "code": code, "failure": _small(failure)}
        deadline = time.monotonic() + DONE_SECONDS
        self._link.state = "ended"
        self._link.send(report)
        while time.monotonic() < deadline:
            away = self._link.descriptor() is None
            messages = self._link.wait(deadline - time.monotonic())
            if any(message.get("kind") == "done" for message in messages):
                return
            if away and self._link.descriptor() is not None:
                self._link.send(report)

    def _output_due(self) -> float | None:
        if self._console.bytes_read == self._output_reported:
            return None
        return self._output_reported_at + self._output_seconds


def _ends(text: str) -> bytes:
    """The headline and the end of the traceback, within kubelet's limit."""
    encoded = text.encode(errors="replace")
    if len(encoded) <= TERMINATION_BYTES_MAX:
        return encoded
    headline, _, rest = encoded.partition(b"\n")
    headline = headline[:1024] + b"\n...\n"
    return headline + rest[len(headline) - TERMINATION_BYTES_MAX :]


def _small(failure: Failure | None) -> dict[str, Any] | None:
    """The failure as an object that fits a protocol line; a long traceback is cut."""
    if failure is None:
        return None
    body = asdict(failure)
    body["traceback"] = (failure.traceback or "")[-4096:] or None
    return body


def pod_of(order: Mapping[str, Any], words: Sequence[str], folder: Path) -> PodSpec:
    """The start order's pod with this container's command."""
    # The container's environment has priority: the pod's defaults would replace it, and PATH
    # decides which interpreter a bare `python` is.
    entries = {
        name: os.environ[name]
        for name in (*THREAD_COUNT_NAMES, "PYTHONUNBUFFERED", "PATH", KEY_FILE_VARIABLE)
        if name in os.environ
    }
    body = dict(order) | {
        "command": list(words[:1]),
        "args": list(words[1:]),
        "env": entries,
        "socket_path": str(folder / "job.sock"),
        "topology_path": str(folder / "topology.json"),
        "log_dir": str(folder / "ranks"),
        "run_dir": str(folder / "ranks"),
    }
    return PodSpec.from_object(body)


def _with_key(spec: PodSpec, key: object) -> PodSpec:
    """Create the pod's folder, and the key file of the job's collectives if there is a key.

    This process writes it, not the sidecar: the ranks run as the same user.
    """
    folder = Path(spec.run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    if not isinstance(key, str):
        return spec
    write_private(folder / KEY_FILE, key)
    return replace(spec, key_path=str(folder / KEY_FILE))


def _wait_for_start(link: _Link, seconds: float) -> dict[str, Any] | None:
    deadline = time.monotonic() + seconds
    while (remaining := deadline - time.monotonic()) > 0:
        for message in link.wait(min(remaining, 60.0)):
            if message.get("kind") == "start" and isinstance(message.get("pod"), dict):
                return message
            if message.get("kind") in ("terminate", "kill"):
                return message
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """`flyer-launch [--run-folder DIR] [--start-seconds S] -- COMMAND [ARGUMENT …]`."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    options, command = words, list[str]()
    if "--" in words:
        options, command = words[: words.index("--")], words[words.index("--") + 1 :]
    values = dict(zip(options[::2], options[1::2], strict=False))
    if not command:
        sys.stderr.write("flyer-launch: missing command: flyer-launch -- COMMAND [ARGUMENT …]\n")
        return launcher.EXIT_BAD_POD
    folder = Path(values.get("--run-folder", RUN_FOLDER))
    seconds = float(values.get("--start-seconds", START_SECONDS))
    # The kernel drops signals that a container's first process has no handler for.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _frame: os._exit(128 + number))
    link = _Link(folder / LAUNCHER_SOCKET)
    order = _wait_for_start(link, seconds)
    if order is None:
        sys.stderr.write(
            f"flyer-launch: the gang was not started within {seconds:g} s: the sidecar of this pod "
            "or of another one did not reach the gateway; see `flyer why` and the log of the "
            "container `flyer-sidecar`\n"
        )
        return EXIT_NO_START
    if order["kind"] != "start":
        sys.stderr.write("flyer-launch: the attempt ended before the gang started\n")
        return EXIT_NO_START
    try:
        spec = _with_key(pod_of(order["pod"], command, folder), order.get("key"))
    except (OSError, PodSpecError) as error:
        sys.stderr.write(f"flyer-launch: invalid start order: {error}\n")
        return launcher.EXIT_BAD_POD
    seconds = order.get("output_seconds", OUTPUT_SECONDS)
    launcher.run_pod(spec, _Container(link, float(seconds)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
