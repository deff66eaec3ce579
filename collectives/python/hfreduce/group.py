"""One group of ranks as torch sees it: lifetime, deadlines and outstanding operations.

The common part of the collectives, which are in `hfreduce.backend`.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Protocol

import torch
from torch._C._autograd import _profiler_enabled
from torch._C._distributed_c10d import Backend, DebugLevel, PrefixStore, get_debug_level

from hfreduce import _native, gpu, tensors
from hfreduce.attendance import Attendance
from hfreduce.compat import Base
from hfreduce.completer import Completer
from hfreduce.lifetime import hold
from hfreduce.work import Closing, CollectiveWork, Record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from datetime import timedelta

    from torch._C._distributed_c10d import Store

    from hfreduce._native import Membership, Settings

__all__ = ["NAME", "OPEN", "Group", "Options"]

NAME = "hfreduce"

CLOSE_SECONDS = 5.0
"""Time-out of the shutdown handshake with the peers."""

OPEN: weakref.WeakSet[Group] = weakref.WeakSet()
"""Groups that torch has not shut down, closed at exit. One that is dropped before is closed when it
is collected: its threads, sockets and memory do not last as long as the process."""

_WRAPPED: set[Group] = set()
"""Groups that torch's debug wrapper may hold, which keeps the C++ half of a backend alone: without
a reference here the Python half would be collected, and its methods with it. They last until torch
shuts them down."""


def _close_dropped(connected: _native.Communicator, completer: Completer) -> None:
    """Closes a group without references, without waiting for its outstanding operations."""
    completer.stop()
    connected.close(0.0)


class Options(Protocol):
    """Fields that all of torch's option structures have."""

    timeout: timedelta
    asyncOp: bool  # noqa: N815  (torch's name)


class Group(Base):
    """A connected group that torch has not shut down, without the collectives."""

    def __init__(
        self,
        connected: _native.Communicator,
        membership: Membership,
        settings: Settings,
        timeout: timedelta,
        store: Store,
    ) -> None:
        super().__init__(connected.rank, connected.world_size)
        self.communicator = connected
        self.membership = membership
        self.settings = settings
        # Of the members: groups of other ranks may have this part of the store, too
        # (`store_rendezvous`).
        own = PrefixStore(membership.digest, store)
        self.attendance = Attendance(own, membership.rank, membership.size)
        self._timeout = timeout
        self._timeout_seconds = timeout.total_seconds()
        self._completer = Completer("hfreduce-futures")
        self._started = 0
        self._closed = False
        self._gpus: set[int] = set()
        self._is_joining = False
        OPEN.add(self)
        if get_debug_level() == DebugLevel.DETAIL:
            _WRAPPED.add(self)
        dropped = weakref.finalize(self, _close_dropped, connected, self._completer)
        # At exit the backends in OPEN are closed in their own order.
        dropped.atexit = False
        self._dropped = dropped

    # Life cycle

    def getBackendName(self) -> str:  # noqa: N802  (torch's name)
        """The name that scripts use."""
        return NAME

    @property
    def options(self) -> Backend.Options:
        """Properties that torch queries of every backend."""
        return Backend.Options(NAME, self._timeout)

    # The defaults of torch call the Python class, which calls torch, without end.

    @property
    def supports_coalescing(self) -> bool:
        """Operations are not held back to be started together."""
        return False

    @property
    def supports_shrinking(self) -> bool:
        """A group that lost a rank is over."""
        return False

    @property
    def supports_reconfigure(self) -> bool:
        """Members do not change."""
        return False

    @property
    def supports_window(self) -> bool:
        """One-sided access is not supported."""
        return False

    @property
    def _supports_time_estimate(self) -> bool:
        return False

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Tensors of the CPU can be made in memory that the machine's ranks reduce in place."""
        return torch.device(device).type == "cpu"

    def allocate_tensor(
        self, size: int, *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """A flat tensor in registered memory; FSDP2 uses it if it is configured to."""
        if not self.supports_tensor_alloc(device):
            raise ValueError(f"allocate_tensor: registered memory is on the CPU, not on {device}")
        return tensors.registered(self.communicator, size, dtype)

    def set_timeout(self, timeout: timedelta) -> None:
        """The deadline of operations that are given none."""
        self._timeout = timeout
        self._timeout_seconds = timeout.total_seconds()

    def shutdown(self) -> None:
        """Closes the group after a handshake with the peers."""
        OPEN.discard(self)
        _WRAPPED.discard(self)
        self._dropped.detach()
        if not self._closed:
            self._closed = True
            self._completer.stop()
            self.communicator.close(CLOSE_SECONDS)
            self._completer.join()

    def abort(self) -> None:
        """Ends every wait of every rank, now."""
        self.communicator.abort(f"rank {self.communicator.rank} aborted the group")
        self._closed = True
        self._completer.stop()

    def _get_sequence_number_for_group(self) -> int:
        return self._started

    def _set_sequence_number_for_group(self) -> None:
        """Numbers start at 0 on every rank by themselves."""

    # What the collectives share

    def _on(self, *memory: torch.Tensor) -> _native.Operations:
        """The engine's operations where these tensors are."""
        for tensor in memory:
            if not tensor.is_cpu:
                break
        else:
            return self.communicator
        places = {str(tensor.device) for tensor in memory}
        if len(places) > 1:
            names = ", ".join(sorted(places))
            raise ValueError(f"tensors of one operation are on {names}: pass tensors on one device")
        ordinal = memory[0].get_device()
        self._gpus.add(ordinal)
        stream = torch.cuda.current_stream(ordinal).cuda_stream
        return gpu.view(self.communicator, ordinal, stream)

    def _terms(self, opts: Options) -> tuple[float, bool]:
        """The operation's deadline in seconds, and whether the caller waits immediately."""
        seconds = opts.timeout.total_seconds()
        return seconds if seconds > 0 else self._timeout_seconds, not opts.asyncOp

    def _work(
        self,
        name: str,
        operations: Sequence[_native.Work],
        result: Sequence[torch.Tensor],
        *,
        inputs: Sequence[torch.Tensor] = (),
        finish: Callable[[], object] | None = None,
    ) -> CollectiveWork:
        """What torch gets; `finish` puts the results in place once the operations have ended.

        Memory is held by `operations`, so that neither a dropped work nor an exception on the way
        here frees what the engine still uses. `inputs` are for the profiler.
        """
        self._started += len(operations)
        if self._gpus:
            for operation in operations:
                # Its copies may outlive the caller's wait.
                hold(operation, (result, inputs))
        profiled = _profiler_enabled() and not self._is_joining
        if finish is None and not profiled:
            return CollectiveWork(operations, result, self._completer)
        record = Record(f"{NAME}:{name}", inputs) if profiled else None
        work = CollectiveWork(operations, result, self._completer, Closing(finish, record))
        self._completer.watch(work)
        return work

    def _join(
        self,
        name: str,
        works: Iterable[CollectiveWork],
        result: Sequence[torch.Tensor],
        *,
        inputs: Sequence[torch.Tensor],
    ) -> CollectiveWork:
        """Several works, which are started here, as one; the profiler sees this one alone."""
        record = Record(f"{NAME}:{name}", inputs) if _profiler_enabled() else None
        self._is_joining = True
        try:
            works = list(works)
        except BaseException:
            if record is not None:
                record.end()
            raise
        finally:
            self._is_joining = False

        def finish() -> None:
            for work in works:
                work.wait()

        operations = [operation for work in works for operation in work.operations]
        joined = CollectiveWork(operations, result, self._completer, Closing(finish, record))
        self._completer.watch(joined)
        return joined

    def _blocks(
        self,
        blocks: Sequence[torch.Tensor],
        operation: str,
        *,
        sources: Sequence[torch.Tensor],
        own: int | None = None,
    ) -> tuple[tensors.Place, object, Callable[[], object] | None]:
        """Where outputs of one rank each land, what holds that, and how to get into the outputs.

        They land in place where they can: contiguous, of the CPU, apart from each other and from
        the input. Otherwise in one buffer, and `finish` copies them.
        """
        place = tensors.place(blocks, operation, sources=sources, own=own)
        if place is not None:
            return place, blocks, None
        sizes = [tensor.numel() for tensor in blocks]
        whole = torch.empty(sum(sizes), dtype=blocks[0].dtype, device=blocks[0].device)

        def spread() -> None:
            with torch.no_grad():
                for tensor, piece in zip(blocks, torch.split(whole, sizes), strict=True):
                    tensor.copy_(piece.view(tensor.shape))
            if whole.is_cuda:
                # The waiting thread's stream need not be the reader's.
                torch.cuda.current_stream(whole.device).synchronize()

        return whole.data_ptr(), (whole, blocks), spread
