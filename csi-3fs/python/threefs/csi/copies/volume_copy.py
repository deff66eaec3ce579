"""The copy of one volume: from its directory to its record, which is written last.

::

    /volumes/pvc-2            attribute user.threefs.copy: the state (JSON); a claim
    /volumes/pvc-2/data       the copy of `data` in the snapshot
    /volumes/pvc-2/.copy      files with several names, until the copy is complete
    /.csi/copies/NONCE        a symbolic link: its target names the snapshot to remove (JSON)

Each step may be repeated, so a copy continues wherever its controller was killed. Of two
controllers only the one with the claim copies. Its changes require a lease that it extends only
while it has the claim, so a controller that was stopped for a while changes nothing in a volume
that another one has completed and pods use.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from threefs.csi.copies.tree_copy import BARRIER, Progress, TreeCopy
from threefs.csi.errors import AlreadyExists, CsiError, InFlight, Missing, OutOfRange, Unreadable
from threefs.csi.logs import logger
from threefs.csi.volumes.parameters import inodes_max
from threefs.csi.volumes.removal import COPY_PREFIX, discard, remove_rest
from threefs.csi.volumes.volume_id import VolumeId
from threefs.csi.volumes.volumes import COPY, DATA, RECORD, ContentSource, Volume
from threefs.daemon import CLAIM_SECONDS
from threefs.errors import Exists, NoAttribute, NotADirectory, NotFound, QuotaExceeded, Stale

if TYPE_CHECKING:
    from collections.abc import Iterator

    from threefs.csi.copies.tree_copy import Unit
    from threefs.csi.volumes.clusters import Copier, Directories
    from threefs.csi.volumes.node_claims import NodeClaims
    from threefs.csi.volumes.parameters import Parameters
    from threefs.csi.volumes.volumes import Volumes
    from threefs.snapshots import Snapshot

__all__ = [
    "HOLDER_PREFIX",
    "CopyRequest",
    "CopyState",
    "VolumeCopy",
    "complete_published",
    "remove_unfinished_copy",
    "stored_state",
    "sweep_copies",
]

LINKS = ".copy"
COPIES = "/.csi/copies"
HOLDER_PREFIX = "controller/"
"""Of the holders of claims; no node's name has a slash."""


@dataclass(frozen=True, slots=True)
class CopyRequest:
    """A volume to create with the contents of a snapshot or of another volume."""

    volume: VolumeId
    name: str
    size_bytes: int
    parameters: Parameters
    source: ContentSource
    source_volume: VolumeId
    snapshot: str
    """Name of the snapshot in 3FS; empty: one is made for the copy, and then removed."""

    def result(self) -> Volume:
        """Return the volume as it will be."""
        parameters = dict(self.parameters.as_record())
        return Volume(self.volume, self.name, self.size_bytes, parameters, self.source)


@dataclass(frozen=True, slots=True)
class CopyState:
    """The stored state of a copy."""

    nonce: str
    name: str
    size_bytes: int
    parameters: dict[str, object]
    source: dict[str, str]
    source_volume: str
    snapshot: str
    is_temporary: bool
    is_copied: bool = False

    def encode(self, *, is_copied: bool) -> bytes:
        """Return the stored attribute."""
        state = {name: getattr(self, name) for name in self.__slots__}
        return json.dumps(state | {"version": 1, "is_copied": is_copied}).encode()

    @classmethod
    def decode(cls, volume: VolumeId, value: bytes) -> CopyState:
        """Parse the stored attribute."""
        try:
            data = json.loads(value)
            return cls(**{name: data[name] for name in cls.__slots__})
        except (ValueError, KeyError, TypeError) as error:
            raise Unreadable(
                f"the state of the copy `{volume}` cannot be read ({error}); attribute {COPY} of "
                f"`{volume.path}` was written by something else"
            ) from error

    @classmethod
    def of(cls, request: CopyRequest) -> CopyState:
        """Return the state of a copy that starts."""
        nonce = uuid.uuid4().hex
        return cls(
            nonce=nonce,
            name=request.name,
            size_bytes=request.size_bytes,
            parameters=dict(request.parameters.as_record()),
            source=request.source.as_record(),
            source_volume=str(request.source_volume),
            snapshot=request.snapshot or COPY_PREFIX + nonce,
            is_temporary=not request.snapshot,
        )

    def request(self, volume: VolumeId, parameters: Parameters) -> CopyRequest:
        """Return the request that started the copy, if its parameters were these."""
        return CopyRequest(
            volume=volume,
            name=self.name,
            size_bytes=self.size_bytes,
            parameters=parameters.with_record(self.parameters),
            source=ContentSource.of_record(self.source) or ContentSource("snapshot", ""),
            source_volume=VolumeId.parse(self.source_volume),
            snapshot="" if self.is_temporary else self.snapshot,
        )


class VolumeCopy:
    """The copy of one volume by this process."""

    def __init__(self, request: CopyRequest, volumes: Volumes, claims: NodeClaims) -> None:
        self.request = request
        self.progress = Progress()
        self._volumes = volumes
        self._files: Directories = volumes.files
        self._claims = claims
        self._copier: Copier = volumes.files.copier()
        self._beat = 0
        self._is_lost = False
        self._renewing = threading.Lock()

    def steps(self) -> Iterator[Unit | None]:
        """Return the units of the whole copy; what is between them is done one after another."""
        volume, files = self.request.volume, self._files
        self._volumes.make_directory(volume)
        self._acquire()
        state = self._begin()
        if not state.is_copied:
            tree = TreeCopy(self._copier, *self._open(state), self.progress)
            yield from tree.copy()
            yield BARRIER
            yield from tree.finish()
            yield BARRIER
            files.setxattr(volume.path, COPY, state.encode(is_copied=True))
        if state.is_temporary:
            remove_copied_snapshot(self._volumes, state)
        self._publish()

    def renew(self) -> bool:
        """Renew the claim and the lease; False if the copy is not this process's any more."""
        with self._renewing:
            return self._beat == 0 or self._renewed()

    def end(self, error: Exception | None) -> Exception | None:
        """Release the claim. Return the error for the caller; what cannot succeed is removed."""
        self._copier.revoke()
        if self._is_lost:
            volume = self.request.volume
            return InFlight(f"another controller continues the copy `{volume}`; retry")
        final = self._final(error) if error is not None else None
        if final is not None:
            self._abandon()
        self._release()
        return final or error

    def _renewed(self) -> bool:
        path, holder = self.request.volume.path, self._claims.node_id
        requested = time.clock_gettime(time.CLOCK_BOOTTIME)
        try:
            claim = self._files.claim(path, holder)
        except (NotFound, NotADirectory):
            claim = ("", 0)
        if claim != (holder, self._beat + 1):
            self._copier.revoke()
            self._is_lost = True
            if claim[0] == holder:
                # Another controller had it, and has completed or given up the copy.
                self._files.unclaim(path, holder)
            return False
        self._beat = claim[1]
        self._extend(requested)
        return True

    def _acquire(self) -> None:
        volume, holder = self.request.volume, self._claims.node_id
        requested = time.clock_gettime(time.CLOCK_BOOTTIME)
        try:
            self._claims.acquire(volume, self._files)
        except CsiError as error:
            raise InFlight(
                f"another controller copies `{volume}`, or was killed while it did; "
                "this one continues when its claim expires"
            ) from error
        claim = self._files.claim_of(volume.path)
        if claim is None or claim[0] != holder:
            raise InFlight(f"another controller copies `{volume}`; retry when it has ended")
        self._beat = claim[1]
        self._extend(requested)

    def _release(self) -> None:
        with self._renewing:
            self._beat = 0
            with suppress(NotFound, NotADirectory):
                self._files.unclaim(self.request.volume.path, self._claims.node_id)

    def _extend(self, requested: float) -> None:
        elapsed = time.clock_gettime(time.CLOCK_BOOTTIME) - requested
        self._copier.hold_for(CLAIM_SECONDS - elapsed)

    def _begin(self) -> CopyState:
        request, files, path = self.request, self._files, self.request.volume.path
        state = stored_state(self._volumes, request.volume)
        if state is None:
            if self._volumes.find(request.volume) is not None:
                raise InFlight(f"volume `{request.name}` was completed meanwhile; retry")
            state = CopyState.of(request)
            files.setxattr(path, COPY, state.encode(is_copied=False))
        elif state.request(request.volume, request.parameters) != request:
            raise AlreadyExists(
                f"volume `{request.name}` is being created with {state.size_bytes} bytes and "
                f"the contents of {state.source}; request the same, or use another name"
            )
        return state

    def _open(self, state: CopyState) -> tuple[int, int, int]:
        """Prepare the volume; return the directories of the snapshot, the copy and the links."""
        request, files, path = self.request, self._files, self.request.volume.path
        source = request.source_volume.path
        snapshot = self._snapshot(state)
        if snapshot is None:
            raise Missing(f"{request.source.kind} `{request.source.id}` does not exist any more")
        size_bytes = min(snapshot.size, request.size_bytes) if request.snapshot else snapshot.size
        if size_bytes > request.size_bytes:
            raise OutOfRange(
                f"volume `{request.source_volume}` has {size_bytes} bytes in use, and "
                f"{request.size_bytes} were requested; request at least as many"
            )
        # As many inodes as the source has, unless the class has a limit.
        inodes = inodes_max(request.size_bytes, request.parameters.inodes)
        if not request.parameters.inodes:
            inodes = max(inodes, snapshot.inodes)
        files.set_quota(path, bytes_max=request.size_bytes, inodes_max=inodes)
        self._volumes.make_data(request.volume, request.parameters)
        links = files.make_directory(f"{path}/{LINKS}", 0o700, exist_ok=True)
        return (
            files.stat(f"{source}/.snapshots/{state.snapshot}/{DATA}").inode,
            files.stat(f"{path}/{DATA}").inode,
            links.inode,
        )

    def _snapshot(self, state: CopyState) -> Snapshot | None:
        """Return the snapshot to copy; one for this copy is made, and recorded before."""
        request, files = self.request, self._files
        snapshots = files.snapshots(request.source_volume.path)
        if state.is_temporary:
            files.make_directory("/.csi", 0o755, exist_ok=True)
            files.make_directory(COPIES, 0o700, exist_ok=True)
            record = {"volume": str(request.volume), "source": state.source_volume}
            with suppress(Exists):
                files.symlink(json.dumps(record), f"{COPIES}/{state.nonce}")
            with suppress(Exists):
                snapshots.create(state.snapshot)
            if self._volumes.attribute(request.volume, COPY) is None:
                # Deleted meanwhile by another controller, which did not see the snapshot.
                remove_copied_snapshot(self._volumes, state)
                raise Missing(f"volume `{request.volume}` was deleted while it was created")
        return next((each for each in snapshots.all() if each.name == state.snapshot), None)

    def _publish(self) -> None:
        request, files, path = self.request, self._files, self.request.volume.path
        files.remove_tree(f"{path}/{LINKS}", missing_ok=True)
        if request.parameters.trash:
            files.keep_removed(path, request.parameters.trash)
        if not self.renew():
            raise InFlight(f"another controller continues the copy `{request.volume}`; retry")
        files.setxattr(path, RECORD, request.result().record())
        self._release()
        with suppress(NoAttribute):
            files.removexattr(path, COPY)

    def _final(self, error: Exception) -> CsiError | None:
        """Return the reply for an error after which a retry cannot succeed."""
        if isinstance(error, QuotaExceeded):
            return OutOfRange(
                f"the contents of {self.request.source.kind} `{self.request.source.id}` do not fit "
                f"into {self.request.size_bytes} bytes, or the limit of inodes: {error}"
            )
        if isinstance(error, OutOfRange):
            return error
        if isinstance(error, Missing | NotFound | Stale) and self._source_is_gone():
            return Missing(
                f"{self.request.source.kind} `{self.request.source.id}` was deleted while it was "
                "copied"
            )
        return None

    def _source_is_gone(self) -> bool:
        state = stored_state(self._volumes, self.request.volume)
        if state is None:
            return False
        try:
            stored = self._files.snapshots(self.request.source_volume.path).all()
        except (NotFound, NotADirectory):
            return True
        return not any(each.name == state.snapshot for each in stored)

    def _abandon(self) -> None:
        """Remove an incomplete copy whose caller may not come back."""
        volume = self.request.volume
        remove_unfinished_copy(self._volumes, volume)
        logger().warning("copy given up", volume_id=str(volume), source=self.request.source.id)


def stored_state(volumes: Volumes, volume: VolumeId) -> CopyState | None:
    """Return the state of an unfinished copy."""
    value = volumes.attribute(volume, COPY)
    return CopyState.decode(volume, value) if value is not None else None


def remove_copied_snapshot(volumes: Volumes, state: CopyState) -> None:
    """Remove the snapshot that was made for a copy, and its source if that is removed."""
    source = VolumeId.parse(state.source_volume)
    _remove_snapshot(volumes, source, state.snapshot)
    with suppress(NotFound):
        volumes.files.remove(f"{COPIES}/{state.nonce}")


def remove_unfinished_copy(volumes: Volumes, volume: VolumeId) -> None:
    """Remove a volume whose contents are not complete, with the snapshot that was made for it."""
    state = stored_state(volumes, volume)
    if state is not None and volumes.find(volume) is None:
        if state.is_temporary:
            remove_copied_snapshot(volumes, state)
        discard(volumes.files, volume.path)


def complete_published(volumes: Volumes, volume: Volume) -> None:
    """Remove what is left of the copy of a volume whose controller was killed at the very end."""
    if volume.source is not None and volumes.attribute(volume.id, COPY) is not None:
        claim = volumes.files.claim_of(volume.id.path)
        if claim is not None and claim[0].startswith(HOLDER_PREFIX):
            volumes.files.unclaim(volume.id.path, claim[0])
        with suppress(NoAttribute):
            volumes.files.removexattr(volume.id.path, COPY)


def sweep_copies(volumes: Volumes) -> int:
    """Remove snapshots of copies whose volume does not exist any more; return their number."""
    files, count = volumes.files, 0
    names: list[str] = []
    with suppress(NotFound):
        names = files.listdir(COPIES)
    for nonce in names:
        try:
            record = json.loads(files.readlink(f"{COPIES}/{nonce}"))
            volume = VolumeId.parse(str(record["volume"]))
            source = VolumeId.parse(str(record["source"]))
        except NotFound:
            continue
        except (ValueError, KeyError, TypeError, CsiError) as error:
            logger().error("unreadable record of a copy", name=nonce[:80], error=str(error))
            continue
        state = stored_state(volumes, volume)
        if state is None or state.nonce != nonce:
            _remove_snapshot(volumes, source, COPY_PREFIX + nonce)
            with suppress(NotFound):
                files.remove(f"{COPIES}/{nonce}")
            count += 1
    return count


def _remove_snapshot(volumes: Volumes, source: VolumeId, name: str) -> None:
    with suppress(NotFound, NotADirectory):
        volumes.files.snapshots(source.path).remove(name)
    remove_rest(volumes, source)
