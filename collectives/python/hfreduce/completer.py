"""Threads that complete the futures of operations, each as soon as its operation has ended.

A future's callbacks are users' code and run on the thread that completes it. They may block on
another operation of the same group, as PowerSGD's do. Therefore a thread that is about to run
callbacks first sees to it that another one takes what ends meanwhile: the number of threads is two,
plus one for each callback that blocks.
"""

from __future__ import annotations

import contextlib
import os
import threading
import traceback
from typing import TYPE_CHECKING, Any, Final, Protocol

from hfreduce import _native

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.futures import Future

__all__ = ["Completable", "Completer"]

IDLE_MAX: Final = 2
"""Threads that are kept while there is nothing to complete: one completes, one takes over."""
IDLE_SECONDS: Final = 10.0
"""After this time without a completion and without anything to wait for, they end."""
STOP_SECONDS: Final = 1.0
"""Time for which `stop` waits for threads that do not run a callback."""


class Completable(Protocol):
    """A work whose future a completer completes."""

    operations: Sequence[_native.Work]

    def ended(self) -> Future[Any] | None:
        """Runs what remains to be done after the operations; returns the future to complete."""


class Completer:
    """Completes the works of one group. It has threads only once a work is watched."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._process = os.getpid()
        self._ended: _native.Completions | None = None
        self._changed = threading.Condition()
        self._idle = 0
        self._watched = 0
        self._is_stopped = False
        self._ending: list[threading.Thread] = []

    def watch(self, work: Completable) -> None:
        """Completes `work` once its operations have ended; the caller need not wait for it."""
        if self._process != os.getpid():
            # A forked child has no thread that completes operations: a wait raises an error.
            self._complete(work)
            return
        with self._changed:
            if not self._is_stopped:
                if self._ended is None:
                    self._ended = _native.Completions()
                if self._idle == 0:
                    self._start()
                self._watched += 1
                self._ended.watch(work.operations, work)
                return
        # The group is closed: every operation has ended already, or fails immediately.
        self._complete(work)

    def stop(self) -> None:
        """Ends the threads once all that is watched is completed; the group is closed."""
        if self._process != os.getpid():
            return
        with self._changed:
            self._is_stopped = True
            if self._ended is not None:
                self._ended.stop()

    def join(self) -> None:
        """After `stop` and the group's end: waits for the threads that run no callback."""
        if self._process != os.getpid():
            return
        with self._changed:
            self._changed.wait_for(lambda: self._idle == 0, STOP_SECONDS)
            ended, self._ending = self._ending, []
        for thread in ended:
            thread.join(STOP_SECONDS)

    def _start(self) -> None:
        self._idle += 1
        try:
            threading.Thread(target=self._run, name=self._name, daemon=True).start()
        except RuntimeError:
            self._idle -= 1
            raise

    def _run(self) -> None:
        ended = self._ended
        assert ended is not None
        while (work := self._next(ended)) is not None:
            self._complete(work)
            del work
            with self._changed:
                if self._idle >= IDLE_MAX:
                    return
                self._idle += 1

    def _next(self, ended: _native.Completions) -> Completable | None:
        """The next work whose operations have ended; None if this thread is not needed."""
        while True:
            work: Completable | None = ended.next(IDLE_SECONDS)
            with self._changed:
                if work is not None:
                    self._watched -= 1
                    self._idle -= 1
                    if self._idle == 0 and self._watched > 0:
                        # If no thread can be started, this one continues alone.
                        with contextlib.suppress(RuntimeError):
                            self._start()
                    return work
                if self._watched == 0 or self._idle > 1:
                    self._idle -= 1
                    if self._is_stopped:
                        self._ending.append(threading.current_thread())
                    self._changed.notify_all()
                    return None
            if self._is_stopped:
                # `next` no longer waits, and an operation is about to fail with its group.
                threading.Event().wait(0.001)

    @staticmethod
    def _complete(work: Completable) -> None:
        try:
            started = work.ended()
            if started is not None:
                started.set_result(None)
        except Exception:  # noqa: BLE001  (a user's callback must not end other waits)
            traceback.print_exc()
