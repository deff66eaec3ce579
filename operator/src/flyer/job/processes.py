"""Linux process control that Python lacks: parent death signal, subreaper, descriptors.

With these no process outlives the one that started it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "adopt_orphans",
    "child_pids",
    "close_descriptors",
    "default_signals",
    "descendant_pids",
    "die_with_parent",
    "kill_all",
    "reap_until_childless",
    "redirect_output",
    "redirect_output_to",
    "set_name",
    "thread_count",
]

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int | bytes) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    argument = ctypes.c_char_p(value) if isinstance(value, bytes) else ctypes.c_ulong(value)
    zero = ctypes.c_ulong(0)
    if libc.prctl(ctypes.c_int(option), argument, zero, zero, zero) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


def die_with_parent(signal_number: signal.Signals, parent_pid: int) -> None:
    """Set the parent death signal; it is sent immediately if the parent has already died.

    `execve` keeps the setting, `fork` clears it: every level sets it again.
    """
    _prctl(_PR_SET_PDEATHSIG, signal_number)
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal_number)


def adopt_orphans() -> None:
    """Become the parent of orphaned descendants (child subreaper)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_name(name: str) -> None:
    """Set the command name that `ps` and `top` show, at most 15 bytes."""
    _prctl(_PR_SET_NAME, name.encode()[:15])


def default_signals() -> None:
    """Restore the signal handlers of a new Python interpreter and unblock all signals."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        handler = signal.SIG_IGN if number in (signal.SIGPIPE, signal.SIGXFSZ) else signal.SIG_DFL
        with contextlib.suppress(OSError, ValueError):  # the C library reserves two signals
            signal.signal(number, handler)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def close_descriptors(keep: Iterable[int] = ()) -> None:
    """Close all but standard input, output and error, and `keep`."""
    descriptors = {0, 1, 2, *keep}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  names only, no objects
        if int(name) not in descriptors:
            with contextlib.suppress(OSError):  # the listing's own descriptor is already closed
                os.close(int(name))


def redirect_output(path: Path) -> None:
    """Append output and errors to a file, line-buffered; standard input becomes empty."""
    redirect_output_to(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644))


def redirect_output_to(log: int) -> None:
    """Like `redirect_output`, with an open descriptor, which is closed."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    for source, destination in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, destination)
    for descriptor in (log, null):
        os.close(descriptor)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def thread_count() -> int:
    """Number of threads of this process, including native ones."""
    return len(os.listdir("/proc/self/task"))  # noqa: PTH208  names only


def child_pids(parent_pid: int) -> list[int]:
    """The children of a process, including dead ones that are not reaped."""
    return [pid for pid, parent in _parents().items() if parent == parent_pid]


def descendant_pids(ancestor_pid: int) -> list[int]:
    """All descendants of this process in any group or session; deepest first.

    In this order an interrupted kill leaves only processes with a living launcher above them,
    which kills the rest.
    """
    parents = _parents()
    pids = [ancestor_pid]
    for pid in pids:  # grows during the loop
        pids += [child for child, parent in parents.items() if parent == pid]
    return pids[:0:-1]


def _parents() -> dict[int, int]:
    parents = {}
    for name in os.listdir("/proc"):  # noqa: PTH208  names only, no objects
        if not name.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError, IndexError):  # it may have ended
            stat = Path("/proc", name, "stat").read_bytes()
            # The command's name is in parentheses, of any content; the state follows it.
            parents[int(name)] = int(stat.rpartition(b")")[2].split()[1])
    return parents


def kill_all(pids: Iterable[int], signal_number: int = signal.SIGKILL) -> None:
    """Signal each process; ended ones are skipped."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal_number)


def reap_until_childless(timeout_seconds: float) -> bool:
    """Kill and reap all descendants and adopted orphans. Returns whether all have ended."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        kill_all(descendant_pids(os.getpid()))
        try:
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        except ChildProcessError:
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
