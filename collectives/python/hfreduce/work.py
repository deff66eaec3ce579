"""Operations under way, as torch wants to see them."""

from __future__ import annotations

import queue
import threading
import traceback
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from torch.distributed import Work
from torch.futures import Future

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from hfreduce import _native

__all__ = ["CollectiveWork", "Completer", "answer_for_works"]

NO_TIMEOUT = timedelta(0)
"""What torch passes when the caller gave no timeout: the operation's own deadline holds."""
_UNKNOWN: Final = 100
"""c10d's number for operations that a backend does not name, as those in Python cannot."""


_LOCK = threading.RLock()
"""Of all works that have nothing to finish: it is held for no longer than making a future takes."""


class CollectiveWork(Work):
    """One or several operations of the engine that torch sees as one.

    Holds the tensors until the engine is done with their memory. One is made for every call, whose
    data has just pushed Python out of the caches: what it does without is time saved.
    """

    __slots__ = (
        "_completer", "_finish", "_finishes", "_future", "_keep", "_lock", "_result", "operations",
    )  # fmt: skip

    def __init__(
        self,
        operations: Sequence[_native.Work],
        result: Sequence[torch.Tensor],
        completer: Completer,
        *,
        keep: Sequence[torch.Tensor] = (),
        finish: Callable[[], object] | None = None,
    ) -> None:
        super().__init__()
        self.operations = tuple(operations)
        self._result = result
        self._keep = keep
        self._completer = completer
        self._finish = finish
        self._finishes = finish is not None
        self._lock = _LOCK if finish is None else threading.RLock()
        self._future: Future[Any] | None = None

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Returns True when done; raises `hfreduce.CollectiveError` when failed."""
        seconds = timeout.total_seconds() if timeout > NO_TIMEOUT else None
        for operation in self.operations:
            operation.wait(seconds)
        if self._finishes:
            # Under the lock: a second waiter must not return before the results are in place.
            with self._lock:
                finish, self._finish = self._finish, None
                if finish is not None:
                    finish()
        return True

    def is_completed(self) -> bool:
        """True once finished, in success or failure."""
        if len(self.operations) == 1:
            return self.operations[0].done()
        return all(operation.done() for operation in self.operations)

    def source_rank(self) -> int:
        """Of a receive from anybody that has ended: who sent, as the group counts its ranks."""
        source = self.operations[0].source if self.operations else None
        if source is None:
            raise RuntimeError("source_rank: this is no receive from anybody, or it has not ended")
        return source

    def is_success(self) -> bool:
        """True once finished in success."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Why it failed, or None."""
        errors = (operation.error() for operation in self.operations)
        return next((error for error in errors if error is not None), None)

    def result(self) -> list[torch.Tensor]:
        """The tensors that hold the result."""
        return list(self._result)

    def synchronize(self) -> None:
        """As `wait`: there is no stream to order anything after."""
        self.wait()

    def get_future(self) -> Future[Any]:
        """A future that a thread of ours completes; DDP's reducer waits for it without Python.

        An error must reach waiters in C++ too, and `Future.set_exception` reaches Python waiters
        alone (C++ would see a success and train on unreduced gradients). What a callback raises
        reaches both, therefore the future handed out is a callback's.
        """
        asked = _ASKING.works
        if asked is not None:
            asked.append(self)
            return _NO_ANSWER
        with self._lock:
            if self._future is None:
                started: Future[Any] = Future()
                self._future = started.then(self._settle)
                self._completer.complete(started)
            return self._future

    def _settle(self, _started: Future[Any]) -> list[torch.Tensor]:
        self.wait()
        return list(self._result)


class Completer:
    """A thread that waits for operations in the order in which they were started.

    It runs only once somebody asks for a future. The queue is bounded by the group's limit of
    operations under way.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[Future[Any] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopped = False

    def complete(self, started: Future[Any]) -> None:
        """Completes `started`; its callback waits for the operation, on our thread."""
        with self._lock:
            if not self._stopped:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                    self._thread.start()
                self._queue.put(started)
                return
        # The group is closed: whatever is asked now has ended already, or fails at once.
        started.set_result(None)

    def stop(self) -> None:
        """Ends the thread after what is queued."""
        with self._lock:
            self._stopped = True
            self._queue.put(None)

    def _run(self) -> None:
        while (started := self._queue.get()) is not None:
            try:
                started.set_result(None)
            except Exception:  # noqa: BLE001  (a user's callback must not end everybody's waits)
                traceback.print_exc()
            del started


class _Asking(threading.local):
    works: list[CollectiveWork] | None = None


_ASKING = _Asking()
_NO_ANSWER: Future[Any] = Future()


def answer_for_works() -> None:
    """Makes torch ask our works whether they are completed, and who sent.

    torch hides a Python backend's work behind one of its own, which passes on `wait` and
    `get_future` and answers everything else itself: never completed, no source. A script that polls
    would do so for ever. The works of other backends are asked as before.
    """
    is_completed, source_rank = Work.is_completed, Work._source_rank

    def is_completed_of(self: Work) -> bool:
        ours = _behind(self)
        return is_completed(self) if ours is None else ours.is_completed()

    def source_rank_of(self: Work) -> int:
        ours = _behind(self)
        return source_rank(self) if ours is None else ours.source_rank()

    Work.is_completed = is_completed_of  # type: ignore[method-assign]
    Work._source_rank = source_rank_of  # type: ignore[method-assign]


def _behind(work: Work) -> CollectiveWork | None:
    """Our work behind one of torch's: whichever is asked, by this thread, for a future now."""
    if work._get_op_type() != _UNKNOWN:  # type: ignore[attr-defined]
        return None
    found: list[CollectiveWork] = []
    _ASKING.works = found
    try:
        work.get_future()
    except RuntimeError:
        return None  # a work that has none, so none of ours
    finally:
        _ASKING.works = None
    return found[0] if found else None
