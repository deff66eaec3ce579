"""`record`: a loop over steps, a few of which are traced.

Each rank writes one file; ``haiscale trace`` merges them. The ranks meet once at the start, so that
their clocks can be compared.
"""

from __future__ import annotations

import logging
import socket
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import torch.distributed as dist
from hfreduce.group import OPEN
from hfreduce.waits import WAITS

from haiscale.trace import chrome
from haiscale.trace.compute import ComputeHooks
from haiscale.trace.operations import Watcher
from haiscale.trace.peers import PeerCounts
from haiscale.trace.recorder import Recorder, recording, set_recording
from haiscale.trace.spans import Kind, RankTrace, named

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator, Sequence

    from torch import nn

__all__ = ["record"]

TRACED: Final = range(2, 5)
"""The third to fifth step of a loop: the first ones allocate and connect."""

_LOG = logging.getLogger("haiscale")
T = TypeVar("T")


def record(
    loop: Iterable[T],
    folder: str | os.PathLike[str] | None,
    *models: nn.Module,
    traced: range = TRACED,
) -> Iterator[T]:
    """Yields what `loop` yields, and traces some of its steps on the way.

    ``for step in record(range(start, steps), "traces", model)``: every rank calls it in the same
    way, and the body of the loop is a step. Afterwards `folder` has a file of each rank.

    Args:
        loop: The steps.
        folder: Where the files are written; None traces nothing, and costs nothing.
        models: Models whose parts are shown. A `haiscale.pipeline.Pipeline` shows its stages by
            itself.
        traced: The steps that are traced, counted from 0 in this loop; consecutive.

    Raises:
        ValueError: `traced` is empty or has gaps, or torch.distributed is not initialized.
        RuntimeError: Another recording of this process is under way.
    """
    if folder is None:
        yield from loop
        return
    if traced.step != 1 or not 0 <= traced.start < traced.stop:
        raise ValueError(f"traced={traced}: expected consecutive steps, such as range(2, 5)")
    run: _Recording | None = None
    try:
        for index, item in enumerate(loop):
            if index == traced.start:
                run = _Recording(Path(folder), models)
            if run is not None:
                run.next_step(f"step {item if isinstance(item, int) else index}")
            yield item
            if run is not None and index == traced.stop - 1:
                run.finish()
                run = None
    finally:
        if run is not None:
            run.finish()


class _Recording:
    """One recording, from the meeting of the ranks to the file."""

    def __init__(self, folder: Path, models: Sequence[nn.Module]) -> None:
        if not dist.is_initialized():
            raise ValueError("torch.distributed is not initialized: call init_process_group first")
        if recording() is not None:
            raise RuntimeError("a recording is under way: end it before another one starts")
        self._folder = folder
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._node = _node()
        self._step: tuple[str, int] | None = None
        self._recorder = Recorder()
        run = [uuid.uuid4().hex]  # of rank 0
        dist.broadcast_object_list(run)
        self._run = run[0]
        dist.barrier()  # no rank leaves it before the last one comes
        self._origin = time.monotonic_ns()
        self._peer_counts = PeerCounts()
        self._watcher = Watcher(self._recorder)
        self._hooks = ComputeHooks(self._recorder, tuple(models))
        WAITS.observer = self._recorder.add_wait
        set_recording(self._recorder)

    def next_step(self, name: str) -> None:
        """Ends the step before and starts this one."""
        now = time.monotonic_ns()
        if self._step is not None:
            self._recorder.add(Kind.STEP, *self._step, now)
        self._step = name, now
        self._hooks.reset()

    def finish(self) -> None:
        """Ends the recording and writes the file. A failure to write is logged, not raised."""
        now = time.monotonic_ns()
        peers = self._peer_counts.since()
        set_recording(None)
        WAITS.observer = None
        self._hooks.remove()
        self._watcher.stop(now)
        recorder = self._recorder
        if self._step is not None:
            recorder.add(Kind.STEP, *self._step, now)
        spans = [*recorder.spans, *named(recorder.waits, self._watcher.numbered)]
        if recorder.dropped:
            _LOG.warning(
                "trace: %d spans above the limit of %d are left out: trace fewer steps",
                recorder.dropped,
                len(spans),
            )
        trace = RankTrace(
            run=self._run,
            rank=self._rank,
            world_size=self._size,
            node=self._node,
            machine=_machine(),
            origin=self._origin,
            spans=tuple(
                span._replace(start=span.start - self._origin, end=span.end - self._origin)
                for span in spans
            ),
            peers=peers,
            dropped=recorder.dropped,
            lost=self._watcher.lost,
        )
        try:
            chrome.write(self._folder, trace)
        except OSError as error:
            _LOG.warning("trace of rank %d is not written: %s", self._rank, error)


def _node() -> str:
    """The node's name; on one machine the ranks of several nodes of FLYER_TOPOLOGY may run."""
    group = next(iter(OPEN), None)
    return socket.gethostname() if group is None else str(group.communicator.flight()["node"])


def _machine() -> str:
    """The boot of this machine: its processes share one monotonic clock."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
