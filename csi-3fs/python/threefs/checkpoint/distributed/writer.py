"""`StorageWriter` of DCP: all ranks write shards, the coordinator commits with one rename."""

from __future__ import annotations

import pickle
import threading
import time
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from threefs.checkpoint.checksum import ALGORITHM
from threefs.checkpoint.distributed.folder import CheckpointId, Save
from threefs.checkpoint.distributed.index import BLOCK_BYTES, Index, Item
from threefs.checkpoint.distributed.shard import ShardWriter
from threefs.checkpoint.distributed.source import FilesSource
from threefs.checkpoint.errors import CheckpointBusyError, CheckpointError

if TYPE_CHECKING:
    import os

    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

    from threefs.checkpoint.files import Files

__all__ = ["ThreeFSWriter"]

BUSY_SECONDS_MAX = 60.0

_saves: dict[str, threading.Thread] = {}
"""Folders of saves that this process coordinates, with the thread that runs each."""
_saves_lock = threading.Lock()


def _register(path: str, checkpoint: CheckpointId) -> None:
    """Refuse a second save of one id at once. A save ends with its thread, or when it fails."""
    current = threading.current_thread()
    with _saves_lock:
        for other, thread in list(_saves.items()):
            if thread is current or not thread.is_alive():
                del _saves[other]
        if path in _saves:
            raise CheckpointBusyError(
                f"{checkpoint.path} is still being written by this process: wait for the future of "
                "`async_save` before the next save of this id"
            )
        _saves[path] = current


def _unregister(path: str) -> None:
    with _saves_lock:
        _saves.pop(path, None)


class _ThreadState(threading.local):
    """State of the save that runs in this thread: DCP runs each save in one thread."""

    checkpoint_id: str | os.PathLike[str] | None = None
    rank = 0
    save: Save | None = None


class ThreeFSWriter(StorageWriter, AsyncStager):
    """Writes checkpoints of `dcp.save` and `dcp.async_save`; see docs/concepts/checkpoints.md.

    `files` is a `threefs.Client`, a `LocalFiles`, or the path of a cluster's `cluster.json`
    (default: the one that THREEFS_CLUSTER names). `path` is the checkpoint if the call has no
    `checkpoint_id`. With `keep` only that many checkpoints stay in its folder.

    The copy for `async_save` is kept in memory and reused by the next save of this writer, which
    waits for the previous one for at most `busy_seconds_max`: use one writer for all saves.
    """

    _synchronize_after_execute = False  # `stage` returns after the copy

    def __init__(
        self,
        files: Files | str | os.PathLike[str] | None = None,
        path: str | os.PathLike[str] | None = None,
        *,
        keep: int | None = None,
        busy_seconds_max: float = BUSY_SECONDS_MAX,
    ) -> None:
        if keep is not None and keep < 1:
            raise CheckpointError(f"keep is {keep}: at least 1 checkpoint has to stay")
        self._source = FilesSource(files)
        self._path = path
        self._keep = keep
        self._busy_seconds_max = busy_seconds_max
        self._stager: DefaultStager | None = None
        self._thread_state = _ThreadState()
        self._async_save: threading.Thread | None = None
        self._staging_thread: threading.Thread | None = None

    def __getstate__(self) -> dict[str, Any]:
        """State for the process of `AsyncCheckpointerType.PROCESS`."""
        self._enter_thread()  # the thread that waits for that process
        names = ("_source", "_path", "_keep", "_busy_seconds_max")
        return {name: self.__dict__[name] for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(None)  # type: ignore[misc]
        self.__dict__.update(state)

    # Staging: a copy of the state in memory, made before `async_save` returns

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copy the state to memory that is reused, once the previous save has ended."""
        self._await_previous()
        if self._stager is None:
            has_gpu = torch.accelerator.is_available()
            self._stager = DefaultStager(StagingOptions(has_gpu, False, False, has_gpu))
        staged = self._stager.stage(state_dict)
        self._staging_thread = threading.current_thread()
        self._async_save = None
        return staged  # type: ignore[return-value]  # no Future without asynchronous staging

    def _await_previous(self) -> None:
        """Until then its save reads the memory, and its collectives must not mix with the next."""
        deadline = time.monotonic() + self._busy_seconds_max
        while self._staging_thread is not None:
            thread = self._async_save
            if thread is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
                if not thread.is_alive():
                    break
            if time.monotonic() > deadline:
                raise CheckpointBusyError(
                    f"the previous `async_save` is still being written after "
                    f"{self._busy_seconds_max:g} s: this one was not started; save less often"
                )
            time.sleep(0.001)

    def close(self) -> None:
        """Free the memory of the copy."""
        if self._stager is not None:
            self._stager.close()
            self._stager = None

    # One save, in the order of DCP's calls

    def _enter_thread(self) -> None:
        """Record the thread of the asynchronous save; a save by the training thread is another."""
        current = threading.current_thread()
        if self._async_save is None and self._staging_thread not in (None, current):
            self._async_save = current

    @property
    def checkpoint_id(self) -> str | os.PathLike[str] | None:
        """The id of the save that runs in this thread."""
        state = self._thread_state
        return state.checkpoint_id if state.checkpoint_id is not None else self._path

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Start a save of this id."""
        self._enter_thread()
        self._thread_state.checkpoint_id = checkpoint_id

    def storage_meta(self) -> StorageMeta:
        """Return the id of this save."""
        self._enter_thread()
        return StorageMeta(checkpoint_id=self.checkpoint_id)

    def set_up_storage_writer(
        self,
        is_coordinator: bool,  # noqa: FBT001  DCP's signature
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Check the id before anything is written."""
        del is_coordinator, args
        if not kwargs.get("use_collectives", True):
            raise CheckpointError(
                "use_collectives=False is not supported: all ranks commit one checkpoint together"
            )
        CheckpointId.parse(self.checkpoint_id)
        self._thread_state.rank = kwargs.get("rank") or 0
        self._thread_state.save = None

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Nothing: each rank's place is chosen when it writes."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator: start the save, and give its key to every rank.

        The key stays the same for all saves of this process, because a planner with
        `enable_plan_caching` gives ranks the plan of an earlier save.
        """
        files = self._source.open()
        checkpoint = CheckpointId.parse(self.checkpoint_id)
        save = Save(files, checkpoint, self._keep)
        _register(save.path, checkpoint)
        try:
            with _saves_lock:
                in_flight = set(_saves)
            save.begin(in_flight)
        except BaseException:
            _unregister(save.path)
            raise
        self._thread_state.save = save
        return [replace(plan, storage_data=save.key) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items to one shard; all of it is durable when this returns."""
        rank = self._thread_state.rank
        checkpoint = CheckpointId.parse(self.checkpoint_id)
        folder = checkpoint.saving_path(plan.storage_data)
        results = []
        if plan.items:
            # The name is unique: files of another save in the same folder are never named.
            name = f"shard-{rank:04d}-{uuid.uuid4().hex[:8]}.bin"
            shard = ShardWriter(self._source.open(), folder, name)
            try:
                for write in plan.items:
                    fqn, data = write.index.fqn, planner.resolve_data(write)
                    if write.type == WriteItemType.BYTE_IO:
                        item = shard.add_bytes(fqn, data.getbuffer())  # type: ignore[union-attr]
                    else:
                        origin = list(write.index.offset or ())
                        item = shard.add_tensor(fqn, origin, data)  # type: ignore[arg-type]
                    results.append(WriteResult(write.index, item.length, (folder, item)))
                shard.close()
            except FileNotFoundError as error:
                raise CheckpointError(
                    f"rank {rank} cannot write {folder}: it was removed by a later save of "
                    f"{checkpoint.path}, or this rank has another checkpoint_id than rank 0, or "
                    "the ranks do not share this file system"
                ) from error
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator: verify that all shards are there, and commit."""
        save = self._thread_state.save
        if save is None:
            raise CheckpointError("DCP has called `finish` without `prepare_global_plan`")
        metadata.storage_meta = self.storage_meta()
        try:
            index = self._index(save, results)
            save.commit(index, pickle.dumps(metadata))
        finally:
            self._thread_state.save = None
            _unregister(save.path)

    @staticmethod
    def _index(save: Save, results: list[list[WriteResult]]) -> Index:
        shards: dict[str, int] = {}
        items: list[Item] = []
        for rank, written in enumerate(results):
            for folder, item in (result.storage_data for result in written):
                if folder != save.path:
                    save.abandon()
                    raise CheckpointError(
                        f"rank {rank} wrote to {folder} and rank 0 to {save.path}: pass the same "
                        "checkpoint_id on every rank"
                    )
                items.append(item)
                shards[item.shard] = item.offset + item.length
        return Index(uuid.uuid4().hex, ALGORITHM, BLOCK_BYTES, shards, items)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a path in a folder, with a name that is not reserved."""
        return CheckpointId.is_valid(checkpoint_id)
