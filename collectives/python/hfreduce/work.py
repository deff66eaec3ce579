"""torch works of outstanding operations."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from torch._C._autograd import (
    _record_function_with_args_enter,
    _record_function_with_args_exit,
)
from torch.distributed import Work
from torch.futures import Future

from hfreduce.waits import WAITS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from hfreduce import _native
    from hfreduce.completer import Completer

__all__ = ["Closing", "CollectiveWork", "answer_for_works"]

NO_TIMEOUT = timedelta(0)
"""torch's value for a wait without a timeout: the deadline of the operation applies."""
RECORD_SECONDS: Final = 5.0
"""Limit of a wait for the profiler's event of an operation that has ended."""
_UNKNOWN: Final = 100
"""c10d's number for operations that a backend does not name, as those in Python cannot."""

_LOCK = threading.RLock()
"""Lock for creating futures of all works; held only while a future is created."""


class CollectiveWork(Work):
    """One or several operations of the engine that torch sees as one.

    The engine's own handles hold the memory until the operation has ended. One is made for every
    call, whose data has just pushed Python out of the caches: what it does without is time saved.
    """

    __slots__ = ("_closing", "_completer", "_future", "_result", "_started", "operations")

    def __init__(
        self,
        operations: Sequence[_native.Work],
        result: Sequence[torch.Tensor],
        completer: Completer,
        closing: Closing | None = None,
    ) -> None:
        super().__init__()
        self.operations = operations
        self._result = result
        self._completer = completer
        self._closing = closing
        self._future: Future[Any] | None = None
        self._started: Future[Any] | None = None

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Returns True when done; raises `hfreduce.CollectiveError` when failed."""
        seconds = timeout.total_seconds() if timeout > NO_TIMEOUT else None
        if self._has_ended():
            self._wait(seconds)
        else:
            with WAITS.counted(self.operations):
                self._wait(seconds)
        return True

    def _wait(self, seconds: float | None) -> None:
        for operation in self.operations:
            operation.wait(seconds)
        if self._closing is not None:
            self._closing.wait()

    def is_completed(self) -> bool:
        """True once the results are in place, or the operation has failed."""
        return self._has_ended() and (self._closing is None or self._closing.is_done())

    def _has_ended(self) -> bool:
        return all(operation.done() for operation in self.operations)

    def source_rank(self) -> int:
        """The sender of a finished receive from any rank, as a rank of the group."""
        source = self.operations[0].source if self.operations else None
        if source is None:
            raise RuntimeError("source_rank: not a receive from any rank, or not finished")
        return source

    def is_success(self) -> bool:
        """True once finished in success."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Why it failed, or None."""
        for operation in self.operations:
            error = operation.error()
            if error is not None:
                return error
        return None if self._closing is None else self._closing.error

    def result(self) -> list[torch.Tensor]:
        """The tensors that hold the result."""
        return list(self._result)

    def synchronize(self) -> None:
        """Equal to `wait`: the work has no stream to synchronize with."""
        self.wait()

    def get_future(self) -> Future[Any]:
        """A future that completes when the operation has ended, whatever else is under way.

        An error must reach waiters in C++ too, and `Future.set_exception` reaches Python waiters
        alone (C++ would see a success and train on unreduced gradients). What a callback raises
        reaches both, therefore the future handed out is a callback's.
        """
        works = _ASKING.works
        if works is not None:
            works.append(self)
            return _NO_ANSWER
        with _LOCK:
            if self._future is not None:
                return self._future
            # With its devices a future orders the streams of its waiters, and those that callbacks
            # run in, after the kernels of callbacks before them.
            devices = {tensor.device for tensor in self._result if not tensor.is_cpu}
            started: Future[Any] = Future(devices=sorted(devices, key=str) or None)
            self._started = started
            self._future = future = started.then(self._settle)
        self._completer.watch(self)
        return future

    def ended(self) -> Future[Any] | None:
        """Called by the completer once the operations have ended: finishes what is left to do.

        Returns the future to complete, which runs callbacks of users.
        """
        if self._closing is not None:
            self._closing.run(failed=any(each.error() is not None for each in self.operations))
        with _LOCK:
            started, self._started = self._started, None
            return started

    def _settle(self, _started: Future[Any]) -> list[torch.Tensor]:
        self.wait()
        return list(self._result)


class Closing:
    """What is left once the operations of a work have ended; it happens exactly once.

    Results that landed elsewhere are put in place by the first waiter or by the completer. The
    profiler's event ends on the completer's thread: torch takes an event for asynchronous if it
    ends on another thread than the one that it started on.
    """

    __slots__ = ("_finish", "_is_done", "_lock", "_record", "_recorded", "error")

    def __init__(self, finish: Callable[[], object] | None, record: Record | None) -> None:
        self.error: BaseException | None = None
        self._finish = finish
        self._is_done = finish is None
        self._lock = threading.Lock()
        self._record = record
        self._recorded = None if record is None else threading.Event()

    def is_done(self) -> bool:
        """True once results are in place."""
        return self._is_done

    def wait(self) -> None:
        """Puts the results in place, unless that is done; the operations have ended well."""
        self._put_in_place()
        if self._recorded is not None:
            self._recorded.wait(RECORD_SECONDS)
        if self.error is not None:
            raise self.error

    def run(self, *, failed: bool) -> None:
        """As `complete`, on the completer's thread; also ends the profiler's event."""
        if failed:
            with self._lock:
                self._finish, self._is_done = None, True
        else:
            self._put_in_place()
        if self._record is not None and self._recorded is not None:
            self._record.end()
            self._recorded.set()

    def _put_in_place(self) -> None:
        # Under the lock: a second waiter must not return before the results are in place.
        with self._lock:
            finish, self._finish = self._finish, None
            if finish is not None:
                try:
                    finish()
                except Exception as error:  # noqa: BLE001  (every waiter raises it)
                    self.error = error
                self._is_done = True


class Record:
    """An event of torch's profiler, with the sizes of the tensors it is given."""

    __slots__ = ("_handle", "_lock")

    def __init__(self, name: str, inputs: Sequence[torch.Tensor]) -> None:
        self._handle: Any = _record_function_with_args_enter(name, *inputs)
        self._lock = threading.Lock()

    def end(self) -> None:
        """Ends it, unless that is done."""
        with self._lock:
            handle, self._handle = self._handle, None
        if handle is not None:
            _record_function_with_args_exit(handle)


class _Asking(threading.local):
    works: list[CollectiveWork] | None = None


_ASKING = _Asking()
_NO_ANSWER: Future[Any] = Future()


def answer_for_works() -> None:
    """Makes torch query HFReduce's works for their completion, result and source.

    torch wraps a Python backend's work in a C++ work, which forwards only `wait` and `get_future`
    and has fixed answers for the other methods: never completed, successful, no source. A script
    that polls would not end. The works of other backends are called as before.
    """
    torch_methods = {
        name: getattr(Work, name)
        for name in ("is_completed", "is_success", "exception", "result", "_source_rank")
    }

    def is_completed(self: Work) -> bool:
        own_work = _behind(self)
        return (
            bool(torch_methods["is_completed"](self))
            if own_work is None
            else own_work.is_completed()
        )

    def is_success(self: Work) -> bool:
        own_work = _behind(self)
        return (
            bool(torch_methods["is_success"](self)) if own_work is None else own_work.is_success()
        )

    def exception(self: Work) -> Any:
        own_work = _behind(self)
        return torch_methods["exception"](self) if own_work is None else own_work.exception()

    def result(self: Work) -> Any:
        own_work = _behind(self)
        return torch_methods["result"](self) if own_work is None else own_work.result()

    def source_rank(self: Work) -> int:
        own_work = _behind(self)
        return (
            int(torch_methods["_source_rank"](self)) if own_work is None else own_work.source_rank()
        )

    Work.is_completed = is_completed  # type: ignore[method-assign]
    Work.is_success = is_success  # type: ignore[method-assign]
    Work.exception = exception  # type: ignore[method-assign]
    Work.result = result  # type: ignore[method-assign]
    Work._source_rank = source_rank  # type: ignore[method-assign]


def _behind(work: Work) -> CollectiveWork | None:
    """The hfreduce work of a torch work from which this thread currently requests a future."""
    if work._get_op_type() != _UNKNOWN:  # type: ignore[attr-defined]
        return None
    works: list[CollectiveWork] = []
    _ASKING.works = works
    try:
        work.get_future()
    except RuntimeError:
        return None  # a work of another backend: HFReduce's have one
    finally:
        _ASKING.works = None
    return works[0] if works else None
