"""`StorageReader` of DCP: reads parts of shards, verified, straight into the target tensors."""

from __future__ import annotations

import io
import pickle
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from threefs.checkpoint.distributed.folder import CheckpointId, resolve
from threefs.checkpoint.distributed.index import Index, Item, decode_index
from threefs.checkpoint.distributed.ranges import BytesRead, TensorRead, read_all
from threefs.checkpoint.distributed.source import FilesSource
from threefs.checkpoint.errors import CheckpointDamagedError, CheckpointError
from threefs.checkpoint.files import BATCH_BYTES
from threefs.checkpoint.names import DISTRIBUTED_MANIFEST_NAME

if TYPE_CHECKING:
    import os

    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem

    from threefs.checkpoint.distributed.ranges import Read
    from threefs.checkpoint.files import Files

__all__ = ["ThreeFSReader"]


def _load_bytes(planner: LoadPlanner, request: ReadItem, data: bytearray) -> None:
    planner.load_bytes(request, io.BytesIO(data))


class ThreeFSReader(StorageReader):
    """Reads checkpoints of `ThreeFSWriter` for `dcp.load`, on any number of ranks.

    `files` and `path` are the same as for `ThreeFSWriter`. As with DCP's own readers, the metadata
    and objects that are not tensors are pickles: load only checkpoints that you trust.
    """

    def __init__(
        self,
        files: Files | str | os.PathLike[str] | None = None,
        path: str | os.PathLike[str] | None = None,
    ) -> None:
        self._source = FilesSource(files)
        self._path = path
        self._folder = ""
        self._index: Index | None = None
        self._items: dict[MetadataIndex, Item] = {}

    @property
    def checkpoint_id(self) -> str | os.PathLike[str] | None:
        """The id of the checkpoint that is loaded."""
        return self._path

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Start a load of this id."""
        if checkpoint_id is not None:
            self._path = checkpoint_id
        self._index, self._items = None, {}

    # The last parameter is not called `kwargs`: DCP would then look for metadata of single ranks.
    def read_metadata(self, *args: Any, **_options: Any) -> Metadata:
        """Find the newest checkpoint with the id, and read and verify its manifest."""
        del args
        files = self._source.open()
        self._folder = resolve(files, CheckpointId.parse(self._path))
        path = f"{self._folder}/{DISTRIBUTED_MANIFEST_NAME}"
        self._index, pickled = decode_index(files.read_file(path), path)
        metadata: Metadata = pickle.loads(pickled)  # noqa: S301  see the class
        metadata.storage_data = {
            MetadataIndex(item.fqn, item.origin): item for item in self._index.items
        }
        return metadata

    def set_up_storage_reader(
        self,
        metadata: Metadata,
        is_coordinator: bool,  # noqa: FBT001  DCP's signature
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Keep the places of all items."""
        del is_coordinator, args, kwargs
        self._items = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Report to the coordinator which save this rank has found."""
        return replace(plan, storage_data=self._index.save if self._index else None)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """On the coordinator: refuse to load different saves of one id on different ranks."""
        if len({plan.storage_data for plan in plans}) > 1:
            raise CheckpointError(
                f"ranks would load different saves of {self._path}: it was replaced while it was "
                "being loaded; load it again"
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read everything of the plan; each block that is touched is verified."""
        if self._index is None:
            raise CheckpointError("DCP has called `read_data` without `read_metadata`")
        batch: list[Read] = []
        batch_bytes = 0
        for request in plan.items:
            item = self._items.get(request.storage_index)
            if item is None:
                raise CheckpointDamagedError(
                    f"{self._folder}: the manifest lacks `{request.storage_index.fqn}` at "
                    f"{request.storage_index.offset}"
                )
            if request.type == LoadItemType.BYTE_IO:
                batch.append(BytesRead(item, partial(_load_bytes, planner, request)))
            else:
                batch.append(
                    TensorRead(
                        item,
                        list(request.storage_offsets),
                        list(request.lengths),
                        planner.resolve_tensor(request).detach(),
                        partial(planner.commit_tensor, request),
                    )
                )
            batch_bytes += batch[-1].length
            if batch_bytes >= BATCH_BYTES:
                self._read(batch)
                batch, batch_bytes = [], 0
        self._read(batch)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read(self, batch: list[Read]) -> None:
        assert self._index is not None
        read_all(self._source.open(), self._folder, self._index, batch)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a path in a folder, with a name that is not reserved."""
        return CheckpointId.is_valid(checkpoint_id)
