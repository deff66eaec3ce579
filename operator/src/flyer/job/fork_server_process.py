"""Fork server process: imports modules once, then forks a launcher for every requested pod.

Single-threaded, because it forks: one loop over `poll`. It owns the process groups of its pods: no
process of a pod outlives the pod, no pod outlives this process (each level sets a parent death
signal), and this process does not outlive its driver. Only `flyer.job.fork_server.ForkServer`
starts it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import traceback
from typing import Any, NoReturn

from flyer.job import launcher, processes
from flyer.job.pod import PodSpec, PodSpecError

__all__ = ["main"]

MESSAGE_BYTES_MAX = 1024 * 1024
CLOSE_SECONDS_MAX = 3.0


def main() -> None:
    """Arguments: the control socket's descriptor, the driver's pid, modules to import, a note."""
    control_fd, driver_pid, preload, *notes = sys.argv[1:]
    if sys.path[:1] == [""]:
        del sys.path[0]  # added by "python -c"; a rank sets its own
    processes.set_name("flyer-forker")
    processes.die_with_parent(signal.SIGKILL, int(driver_pid))
    processes.adopt_orphans()
    problems = notes + [problem for name in preload.split(",") if (problem := _import(name))]
    if processes.thread_count() > 1:
        note = f"`{preload}` starts threads, which makes a fork unsafe: nothing is preloaded"
        code = "from flyer.job.fork_server_process import main; main()"
        arguments = ["-c", code, control_fd, driver_pid, "", note]
        os.set_inheritable(int(control_fd), True)
        os.execv(sys.executable, [sys.executable, *arguments])  # noqa: S606
    # Imported modules are permanent: excluded from garbage collection, their pages stay shared.
    gc.collect()
    gc.freeze()
    spec = _ForkServer(socket.socket(fileno=int(control_fd)), problems).serve()
    # Only a forked child gets here: it becomes the pod's launcher or, later, one of its ranks.
    launcher.run_pod(spec)


def _import(name: str) -> str | None:
    try:
        if name:
            importlib.import_module(name)
    except Exception as error:  # noqa: BLE001  any module may fail in any way
        return f"cannot import `{name}`: {error!r:.300}"
    return None


class _ForkServer:
    def __init__(self, control: socket.socket, problems: list[str]) -> None:
        self._control = control
        self._control.setblocking(False)
        self._pid = os.getpid()
        self._received = bytearray()
        self._skipping = False  # the rest of an oversized line
        self._unsent = bytearray()
        self._pids: dict[int, int] = {}  # of pod numbers
        self._ended: dict[int, int] = {}  # codes of pods whose last processes are still dying
        self._closing = False
        self._wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._close)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self._report(event="ready", problems=problems)

    def _close(self, *_: object) -> None:
        self._closing = True

    def serve(self) -> PodSpec:  # noqa: RET503  the last line ends the process
        """Loop until the driver closes the connection. Returns only in forked children."""
        while not self._closing:
            poll = select.poll()
            poll.register(self._wake_read, select.POLLIN)
            poll.register(self._control, select.POLLIN | (select.POLLOUT if self._unsent else 0))
            ready = dict(poll.poll())
            if self._wake_read in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_read, 4096)
            self._reap()
            self._flush()
            for line in self._read_lines():
                if (spec := self._execute(line)) is not None:
                    return spec
        self._shut_down()

    def _read_lines(self) -> list[bytes]:
        try:
            received = self._control.recv(65536)
        except BlockingIOError:
            return []
        except OSError:
            received = b""
        if not received:
            self._closing = True
        *lines, rest = bytes(self._received + received).split(b"\n")
        if self._skipping and lines:
            lines.pop(0)
            self._skipping = False
        if self._skipping or len(rest) > MESSAGE_BYTES_MAX:
            if not self._skipping:
                self._report(event="error", message="an oversized request was dropped")
            self._skipping, rest = True, b""
        self._received[:] = rest
        return lines

    def _execute(self, line: bytes) -> PodSpec | None:
        """Execute one request. Returns the pod's spec in the forked child, otherwise None."""
        try:
            request = json.loads(line)
            op, number = request["op"], int(request["pod"])
            if op == "spawn":
                return self._spawn(number, request["spec"])
            if op == "kill":
                self._kill(number, int(request["signal"]))
            else:
                self._report(event="error", pod=number, message=f"unknown request {op!r:.40}")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            self._report(event="error", message=f"invalid request {line[:80]!r}: {error!r:.200}")
        return None

    def _spawn(self, number: int, text: str) -> PodSpec | None:
        try:
            spec = PodSpec.from_json(text)
            for folder in (spec.log_dir, spec.run_dir):
                os.makedirs(folder, exist_ok=True)  # noqa: PTH103
            group_made_read, group_made_write = os.pipe2(os.O_CLOEXEC)
            unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            pid = os.fork()
        except (PodSpecError, OSError) as error:
            self._report(event="error", pod=number, message=str(error))
            return None
        if pid == 0:
            try:
                os.setsid()
                launcher.become_launcher(spec, self._pid)
            except BaseException:  # noqa: BLE001
                traceback.print_exc()
                os._exit(1)  # the child must never continue as a second fork server
            return spec
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        os.close(group_made_write)
        os.read(group_made_read, 1)  # EOF: the group exists, or the child died
        os.close(group_made_read)
        self._pids[number] = pid
        self._report(event="spawned", pod=number, pid=pid)
        return None

    def _kill(self, number: int, signal_number: int) -> None:
        pid = self._pids.get(number)
        if pid is None:
            return  # it has ended and its exit was reported
        with contextlib.suppress(ProcessLookupError):
            if signal_number in (signal.SIGTERM, signal.SIGINT):
                os.kill(pid, signal_number)
                return
            if signal_number == signal.SIGKILL:
                processes.kill_all(processes.descendant_pids(pid))
            os.killpg(pid, signal_number)

    def _reap(self) -> None:
        numbers = {pid: number for number, pid in self._pids.items()}
        while (child := _dead_child()) is not None:
            number = numbers.get(child)
            if number is not None:
                # Kill the rest of the group before the kernel can reuse its number.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            if number is not None:
                del self._pids[number]
                self._ended[number] = os.waitstatus_to_exitcode(status)
        if self._ended and not self._kill_adopted():
            for number, code in self._ended.items():
                self._report_exit(number, code)
            self._ended.clear()

    def _kill_adopted(self) -> bool:
        """Kill orphans, which exist only after a launcher died. Returns whether some still live.

        A pod ends with its last process: only then is its node free. The death of each adopted
        process wakes the loop again.
        """
        orphans = set(processes.child_pids(self._pid)) - set(self._pids.values())
        for pid in orphans:
            processes.kill_all([pid, *processes.descendant_pids(pid)])
        return bool(orphans)

    def _report_exit(self, number: int, code: int) -> None:
        if code < 0:
            self._report(event="exited", pod=number, signal=-code)
        else:
            self._report(event="exited", pod=number, exit_status=code)

    def _report(self, **event: Any) -> None:
        self._unsent += json.dumps(event).encode() + b"\n"
        self._flush()

    def _flush(self) -> None:
        """Write without blocking; the number of pods bounds the unsent events."""
        try:
            while self._unsent:
                del self._unsent[: self._control.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._closing = True

    def _shut_down(self) -> NoReturn:
        processes.reap_until_childless(CLOSE_SECONDS_MAX)
        os._exit(0)


def _dead_child() -> int | None:
    """A child that has exited and is not reaped yet."""
    try:
        info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return info.si_pid if info is not None else None
