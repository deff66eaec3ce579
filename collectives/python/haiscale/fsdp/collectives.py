"""Gathers and scatters of FSDP2 that run while the processor computes.

On the CPU torch's streams are empty, and its own collectives block. These start an operation and
return. torch waits for a gather where it copies the parameters out. It ignores the work of a
reduce-scatter, so a scatter waits inside where torch reads the result (`may_land_later`), and is
otherwise waited for by the `Reducer`.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Protocol

import torch.distributed as dist

from haiscale.internals import fsdp
from haiscale.overlap.groups import average_op, members

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from datetime import timedelta

    import torch
    from torch import Tensor

    from haiscale.fsdp.buffers import Buffers
    from haiscale.internals.fsdp import ParameterGroup

__all__ = ["Averaging", "Gather", "Scatter", "Scatters"]

SCATTERS_MAX: Final = 2
"""Scatters whose inputs are held: whole gradients of that many modules. One waits for a scatter to
end before the next module's gradients are packed; more than two rarely gain anything."""


class Gather:
    """The all-gather of a parameter group."""

    def __init__(
        self, group: dist.ProcessGroup, buffers: Buffers, fail: Callable[[Exception], Exception]
    ) -> None:
        self._group, self._buffers, self._fail = group, buffers, fail

    def allocate(
        self,
        size: Sequence[int],
        *,
        dtype: torch.dtype,
        device: torch.device,  # noqa: ARG002  (torch's)
    ) -> Tensor:
        """Memory for the gathered parameters."""
        return self._buffers.take(size, dtype)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,  # noqa: ARG002, FBT001, FBT002  (torch's)
    ) -> dist.Work:
        """Starts it. torch waits for the result before it uses the parameters."""
        # With an integer `reshard_after_forward` backward gathers from fewer ranks.
        own = self._group if group.size() == self._group.size() else group
        try:
            work = dist.all_gather_into_tensor(output_tensor, input_tensor, own, async_op=True)
        except Exception as error:
            raise self._failed(error, own) from error
        assert work is not None, "this rank is in the group"
        return _Gathering(work, lambda error: self._failed(error, own))

    def _failed(self, error: Exception, group: dist.ProcessGroup) -> Exception:
        return self._fail(Exception(f"all-gather of {members(group)}: {error}"))


class _Gathering(dist.Work):
    """A gather that was started; its failure is the failure of the step."""

    def __init__(self, work: dist.Work, fail: Callable[[Exception], Exception]) -> None:
        super().__init__()
        self._work, self._fail = work, fail

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Returns once the parameters are there."""
        try:
            return self._work.wait() if timeout is None else self._work.wait(timeout)
        except Exception as error:
            raise self._fail(error) from error


class Scatters:
    """Scatters in the order of their start: their inputs, and the allreduces that follow them."""

    def __init__(self) -> None:
        self._running: list[Averaging] = []

    def make_room(self) -> None:
        """Waits until one input fewer than the limit is held, in the order of the start.

        No input is given back before, whether its scatter has ended or not: so the number of
        buffers depends on the model, not on the network.
        """
        while len(self._running) >= SCATTERS_MAX:
            oldest = self._running.pop(0)
            oldest.scattered()
            oldest.release()

    def start(
        self, scatter: dist.Work, then: Callable[[], dist.Work] | None, names: tuple[str, str]
    ) -> Averaging:
        """A scatter that was started, and what is started once it has ended; both with a name."""
        before = next((each for each in self._running[::-1] if then and each.then), None)
        averaging = Averaging(scatter, then, before, names)
        self._running.append(averaging)
        return averaging

    def advance(self) -> None:
        """Starts allreduces whose scatters have ended."""
        for averaging in self._running:
            if averaging.then is not None:
                averaging.is_completed()

    def reset(self) -> None:
        """Forgets all; none is under way."""
        self._running = []


class Averaging:
    """A reduce-scatter, and with replicas the allreduce of its result after it.

    Allreduces start in the order of the scatters on every rank, whatever ends first.
    """

    def __init__(
        self,
        scatter: dist.Work,
        then: Callable[[], dist.Work] | None,
        before: Averaging | None,
        names: tuple[str, str],
    ) -> None:
        self.then = then
        self._names = names
        self._scatter: dist.Work | None = scatter
        self._has_scattered = False
        self._before = before
        self._allreduce: dist.Work | None = None
        self._error: Exception | None = None

    def scattered(self) -> None:
        """Waits for the scatter, and starts the allreduce."""
        if self._error is not None:
            raise self._error
        if self._has_scattered or self._scatter is None:
            return
        if self._before is not None:
            self._before.scattered()
            self._before = None
        self._has_scattered = True
        with self._naming(0):
            self._scatter.wait()
        if self.then is not None:
            with self._naming(1):
                self._allreduce = self.then()

    def release(self) -> None:
        """Gives the input back; the scatter has ended."""
        self._scatter = None

    def wait(self) -> None:
        """Returns once the averages are in place."""
        self.scattered()
        if self._allreduce is not None:
            with self._naming(1):
                self._allreduce.wait()

    @contextmanager
    def _naming(self, part: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._error = RuntimeError(f"{self._names[part]}: {error}")
            raise self._error from error

    def is_completed(self) -> bool:
        """Whether `wait` would return or raise at once; starts the allreduce if it can."""
        if self._error is not None:
            return True
        if self._scatter is not None and not self._has_scattered:
            if self._before is not None and not self._before.has_scattered():
                return False
            if not self._scatter.is_completed():
                return False
            try:
                self.scattered()
            except Exception:  # noqa: BLE001  (`wait` raises it)
                return True
        return self._allreduce is None or self._allreduce.is_completed()

    def has_scattered(self) -> bool:
        """Whether the allreduce is started, or none is due."""
        return self.is_completed() or self._has_scattered


class Bucket(Protocol):
    """The bucket of a scatter, as the scatter uses it."""

    group: ParameterGroup

    def before_scatter(self) -> None:
        """Before memory is taken: uses earlier averages of the bucket."""

    def started(self, averaging: Averaging, dtype: torch.dtype) -> None:
        """After the start: waits where torch reads the result at once."""

    def failed(self, error: Exception) -> Exception:
        """The error to raise."""


class Scatter:
    """The reduce-scatter of a parameter group's gradients, and the allreduce over its replicas."""

    def __init__(
        self,
        bucket: Bucket,
        replicas: dist.ProcessGroup | None,
        buffers: Buffers,
        scatters: Scatters,
    ) -> None:
        self._bucket, self._replicas = bucket, replicas
        self._buffers, self._scatters = buffers, scatters
        self._has_input = False

    def allocate(
        self,
        size: Sequence[int],
        *,
        dtype: torch.dtype,
        device: torch.device,  # noqa: ARG002  (torch's)
    ) -> Tensor:
        """Memory for the packed gradients, then for this rank's averages, which `.grad` views."""
        if not self._has_input:
            self._bucket.before_scatter()
            try:
                self._scatters.make_room()
            except Exception as error:
                raise self._bucket.failed(error) from error
        self._has_input = not self._has_input
        return self._buffers.take(size, dtype)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,  # noqa: ARG002, FBT001, FBT002  (torch's)
    ) -> None:
        """Starts it, and waits where torch reads the result at once."""
        if op == dist.ReduceOp.AVG:
            op = average_op(group, input_tensor)
        try:
            work = dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op=True)
        except Exception as error:
            raise self._bucket.failed(error) from error
        assert work is not None, "this rank is in the group"
        names = (f"reduce-scatter of {members(group)}", "")
        if self._replicas is not None:
            names = (names[0], f"allreduce of {members(self._replicas)}")
        averaging = self._scatters.start(work, self._over_replicas(output_tensor), names)
        self._bucket.started(averaging, output_tensor.dtype)

    def _over_replicas(self, output: Tensor) -> Callable[[], dist.Work] | None:
        replicas = self._replicas
        if replicas is None or fsdp.reduces_replicas_itself(self._bucket.group):
            return None
        is_scaled = fsdp.scale(self._bucket.group) is not None

        def start() -> dist.Work:
            op = dist.ReduceOp.SUM if is_scaled else average_op(replicas, output)
            work = dist.all_reduce(output, op, replicas, async_op=True)
            assert work is not None, "this rank is in the group"
            return work

        return start

    def reset(self) -> None:
        """After an exception between `allocate` and the call."""
        self._has_input = False
