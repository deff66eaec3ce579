"""Folders of DCP checkpoints: names, the start of a save, its commit, removal. Without torch.

`step-40` is the checkpoint with the id `step-40`; `step-40@2` is one that replaced it.
`step-40.saving-KEY` is an unfinished save; the key identifies the process that coordinates it, and
under `flyer` also the job and its attempt. A folder that contains a manifest is a checkpoint: the
manifest is written before the folder gets its name.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import uuid
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

from threefs.checkpoint.attempts import AttemptFence, numbered_attempt
from threefs.checkpoint.distributed.index import decode_index, encode_index
from threefs.checkpoint.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointSupersededError,
)
from threefs.checkpoint.loading import is_damage
from threefs.checkpoint.names import (
    DISTRIBUTED_MANIFEST_NAME,
    commit_name,
    is_leftover,
    is_trash,
    parse_attempt,
    parse_commit,
)
from threefs.checkpoint.saving import throw_away

if TYPE_CHECKING:
    from threefs.checkpoint.distributed.index import Index
    from threefs.checkpoint.files import Files

__all__ = ["CheckpointId", "Save", "latest_checkpoint", "process_key", "resolve"]

_REPLACEMENT = re.compile(r"(.+)@(\d+)")
_SAVING = re.compile(r"(.+)\.saving-(?:(\w+)\.(\d+)\.)?([0-9a-f]{12})")

_log = logging.getLogger(__name__)
_process_keys: dict[int, str] = {}


def process_key() -> str:
    """Identifies this process as coordinator of saves; a forked process has another one."""
    return _process_keys.setdefault(os.getpid(), uuid.uuid4().hex[:12])


class _Committed(NamedTuple):
    """One checkpoint in a folder; entries sort from old to new."""

    commit: int
    name: str
    generation: int

    @property
    def entry(self) -> str:
        return _entry(self.name, self.generation)


def _entry(name: str, generation: int) -> str:
    return f"{name}@{generation}" if generation > 1 else name


def _parse_entry(entry: str) -> tuple[str, int]:
    match = _REPLACEMENT.fullmatch(entry)
    return (match[1], int(match[2])) if match else (entry, 1)


@dataclass(frozen=True, slots=True)
class CheckpointId:
    """DCP's `checkpoint_id`: an absolute path; its folder holds the job's checkpoints."""

    folder: str
    name: str

    @classmethod
    def parse(cls, checkpoint_id: str | os.PathLike[str] | None) -> CheckpointId:
        """Parse an id; a relative path is relative to the root of the file system."""
        if checkpoint_id is None:
            raise CheckpointError(
                "no checkpoint_id: pass it to `save` or `load`, for example /ckpt/gpt/step-40, or "
                "to the constructor"
            )
        path = PurePosixPath("/") / os.fspath(checkpoint_id)
        name = path.name
        reserved = (
            _REPLACEMENT.fullmatch(name)
            or is_leftover(name)
            or ".saving-" in name
            or parse_attempt(name)
        )
        if len(path.parts) < 3 or ".." in path.parts or reserved:
            raise CheckpointError(
                f"invalid checkpoint_id {os.fspath(checkpoint_id)!r}: expected a path in a "
                "folder, such as /ckpt/gpt/step-40, without `..`; a name must not end in @NUMBER, "
                "contain `.saving-` or `.tmp-`, or have the form attempt-NAME-NUMBER"
            )
        return cls(str(path.parent), name)

    @classmethod
    def is_valid(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a path in a folder, with a name that is not reserved."""
        try:
            cls.parse(checkpoint_id)
        except CheckpointError:
            return False
        return True

    @property
    def path(self) -> str:
        """The id as a path; a replaced checkpoint is in another folder, see `resolve`."""
        return f"{self.folder}/{self.name}"

    def saving_path(self, key: str) -> str:
        """The folder of an unfinished save."""
        return f"{self.path}.saving-{key}"


def _list(files: Files, path: str) -> list[str]:
    try:
        return files.listdir(path)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _generations(entries: list[str], name: str) -> list[int]:
    parsed = [_parse_entry(entry) for entry in entries]
    return sorted((generation for other, generation in parsed if other == name), reverse=True)


def resolve(files: Files, checkpoint: CheckpointId) -> str:
    """The folder of the newest checkpoint with this id."""
    entries = _list(files, checkpoint.folder)
    for generation in _generations(entries, checkpoint.name):
        path = f"{checkpoint.folder}/{_entry(checkpoint.name, generation)}"
        if DISTRIBUTED_MANIFEST_NAME in _list(files, path):
            return path
    newest = [committed.name for committed in _committed(files, checkpoint.folder)[-3:]]
    there = f"the last ones in {checkpoint.folder} are {', '.join(newest)}" if newest else (
        f"{checkpoint.folder}/ has none"
    )  # fmt: skip
    raise CheckpointNotFoundError(f"no complete checkpoint {checkpoint.path}; {there}")


def _committed(files: Files, folder: str) -> list[_Committed]:
    """Every checkpoint in a folder, in commit order."""
    checkpoints = []
    for entry in _list(files, folder):
        if is_leftover(entry) or _SAVING.fullmatch(entry) or parse_attempt(entry):
            continue
        names = _list(files, f"{folder}/{entry}")
        if DISTRIBUTED_MANIFEST_NAME in names:
            checkpoints.append(_Committed(parse_commit(names), *_parse_entry(entry)))
    return sorted(checkpoints)


def latest_checkpoint(files: Files, folder: str) -> str | None:
    """The id of the checkpoint that was committed last in a folder, or None.

    After a return to an older step this is the last save since then, not the highest step. A
    checkpoint whose manifest is damaged is skipped with a warning. If all are damaged, an error is
    raised: a fresh start would hide the loss.
    """
    folder = str(PurePosixPath("/") / folder)
    damaged: dict[str, str] = {}
    for committed in reversed(_committed(files, folder)):
        if committed.name in damaged:
            continue  # replaced: a load of the id finds the damaged one
        path = f"{folder}/{committed.entry}"
        try:
            decode_index(files.read_file(f"{path}/{DISTRIBUTED_MANIFEST_NAME}"), path)
        except Exception as error:
            if not is_damage(error):
                raise
            _log.warning("checkpoint %s is damaged and not used: %s", path, error)
            damaged[committed.name] = str(error)
        else:
            return f"{folder}/{committed.name}"
    if damaged:
        raise CheckpointNotFoundError(
            f"no complete checkpoint in {folder}: {'; '.join(damaged.values())}; restore one, or "
            "remove them to start anew"
        )
    return None


class Save:
    """One save, seen by the coordinator: `begin`, then all ranks write, then `commit`."""

    def __init__(self, files: Files, checkpoint: CheckpointId, keep: int | None) -> None:
        self._files = files
        self._id = checkpoint
        self._keep = keep
        self._numbered = numbered_attempt()
        self._fence = AttemptFence(files, checkpoint.folder, self._numbered)
        self._replaced = 0
        prefix = "" if self._numbered is None else "{}.{}.".format(*self._numbered)
        self.key = prefix + process_key()
        self.path = checkpoint.saving_path(self.key)

    def begin(self, in_flight: set[str]) -> None:
        """Create the folder of this save; end an unfinished save of the same id.

        `in_flight` are the folders of the saves that this process coordinates now.
        """
        self._files.mkdir(self._id.folder, parents=True, exist_ok=True)
        self._fence.end_earlier_attempts()
        self._fence.refuse_superseded()
        entries = self._files.listdir(self._id.folder)
        for entry in entries:
            path = f"{self._id.folder}/{entry}"
            if self._is_abandoned(entry) and (path == self.path or path not in in_flight):
                throw_away(self._files, self._id.folder, path)
        generations = _generations(entries, self._id.name)
        for generation in generations:
            self._refuse_foreign(_entry(self._id.name, generation))
        self._replaced = max(generations, default=0)
        self._files.mkdir(self.path)

    def _is_abandoned(self, entry: str) -> bool:
        """Of the same id, or left by an earlier save of this process or by an earlier attempt."""
        match = _SAVING.fullmatch(entry)
        if match is None:
            return False
        name, chain, number, key = match.groups()
        if name == self._id.name or key == process_key():
            return True
        return self._numbered is not None and (
            chain == self._numbered[0] and int(number) < self._numbered[1]
        )

    def _refuse_foreign(self, entry: str) -> None:
        path = f"{self._id.folder}/{entry}"
        try:
            names = self._files.listdir(path)
        except NotADirectoryError:
            names = [path]
        if names and DISTRIBUTED_MANIFEST_NAME not in names:
            raise CheckpointError(
                f"{path} exists and was not written by ThreeFSWriter: remove it or choose another "
                "checkpoint_id"
            )

    def abandon(self) -> None:
        """Remove what was written."""
        throw_away(self._files, self._id.folder, self.path)

    def commit(self, index: Index, metadata: bytes) -> None:
        """Write the manifest and rename the folder: then the checkpoint exists."""
        manifest = encode_index(index, metadata)
        try:
            self._check_shards(index)
            self._files.write_file(f"{self.path}/{DISTRIBUTED_MANIFEST_NAME}", manifest)
            self._fence.refuse_superseded()
            commits = [committed.commit for committed in _committed(self._files, self._id.folder)]
            number = max(commits, default=0) + 1
            self._files.write_file(f"{self.path}/{commit_name(number)}", b"")
            final = self._rename(manifest)
        except FileNotFoundError as error:
            raise CheckpointSupersededError(
                f"another process has started a save of {self._id.path}: this one is not committed"
            ) from error
        except CheckpointError:
            self.abandon()
            raise
        try:
            self._clean(final)
        except Exception as error:  # noqa: BLE001  the checkpoint exists; older ones stay longer
            _log.warning("clean-up after the commit of %s: %s", final, error)

    def _check_shards(self, index: Index) -> None:
        for shard, size in index.shards.items():
            actual = self._files.stat(f"{self.path}/{shard}").size
            if actual != size:
                raise CheckpointError(f"{self.path}/{shard} has {actual} bytes instead of {size}")

    def _rename(self, manifest: bytes) -> str:
        entries = _list(self._files, self._id.folder)
        newest = max(_generations(entries, self._id.name), default=0)
        if newest > self._replaced:
            raise CheckpointSupersededError(
                f"another process has committed {self._id.path} since this save started: this one "
                "is not committed"
            )
        # An empty folder with the name of the id is replaced by the rename.
        generation = newest
        if generation == 0 or self._files.listdir(
            f"{self._id.folder}/{_entry(self._id.name, generation)}"
        ):
            generation += 1
        final = f"{self._id.folder}/{_entry(self._id.name, generation)}"
        try:
            self._files.rename(self.path, final)
        except OSError as error:
            # The rename may have happened, and only the answer was lost.
            if self._is_own(final, manifest):
                return final
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
                raise CheckpointSupersededError(
                    f"another process has committed {self._id.path} at the same time: this save is "
                    "not committed"
                ) from error
            raise
        return final

    def _is_own(self, path: str, manifest: bytes) -> bool:
        try:
            return self._files.read_file(f"{path}/{DISTRIBUTED_MANIFEST_NAME}") == manifest
        except (FileNotFoundError, NotADirectoryError):
            return False

    def _clean(self, final: str) -> None:
        """Remove replaced checkpoints of the id, those beyond `keep`, and interrupted removals."""
        checkpoints = _committed(self._files, self._id.folder)
        kept: set[str] = set()
        for committed in reversed(checkpoints):
            path = f"{self._id.folder}/{committed.entry}"
            replaced = committed.name == self._id.name and path != final
            if replaced or (self._keep is not None and len(kept) >= self._keep):
                throw_away(self._files, self._id.folder, path)
            else:
                kept.add(path)
        for entry in filter(is_trash, _list(self._files, self._id.folder)):
            self._files.rmtree(f"{self._id.folder}/{entry}", missing_ok=True)
