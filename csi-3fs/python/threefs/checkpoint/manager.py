"""Checkpoint manager: the interface for training scripts."""

from __future__ import annotations

import atexit
import logging
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

from threefs.checkpoint.attempts import (
    AttemptFence,
    attempt_from_environment,
    numbered_attempt,
)
from threefs.checkpoint.choosing import Choice, await_choice, publish_choice
from threefs.checkpoint.errors import (
    CheckpointBusyError,
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointSupersededError,
)
from threefs.checkpoint.loading import (
    Loaded,
    LoadReport,
    Skipped,
    is_damage,
    read_checkpoint,
    read_manifest,
    verify_others,
)
from threefs.checkpoint.manifest import Piece, split
from threefs.checkpoint.names import (
    DISTRIBUTED_MANIFEST_NAME,
    MANIFEST_NAME,
    Name,
    choice_folder,
    final_name,
    is_leftover,
    parse_commit,
    parse_name,
    shard_name,
)
from threefs.checkpoint.names import temporary_name as temporary_folder_name
from threefs.checkpoint.saving import SaveHandle, SaveJob, Snapshot, throw_away
from threefs.checkpoint.tree import flatten, state_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from threefs.checkpoint.files import Files
    from threefs.checkpoint.manifest import Manifest

__all__ = ["CheckpointManager"]

COMMIT_SECONDS_MAX = 120.0
BUSY_SECONDS_MAX = 60.0
EXIT_SECONDS_MAX = 30.0
LOAD_SECONDS_MAX = 1800.0
EMPTIED = 1 << 62
FOREIGN = -1

_log = logging.getLogger(__name__)


class CheckpointManager:
    """Saves and loads the state of one job in one folder. All ranks make the same calls.

    `attempt` identifies one start of the job. Default: taken from the environment under `flyer` and
    torchrun; if several starts share a folder without either, pass a unique value.
    """

    def __init__(
        self,
        files: Files,
        path: str,
        rank: int = 0,
        world_size: int = 1,
        *,
        keep: int = 3,
        attempt: str | None = None,
        commit_seconds_max: float = COMMIT_SECONDS_MAX,
        busy_seconds_max: float = BUSY_SECONDS_MAX,
        load_seconds_max: float = LOAD_SECONDS_MAX,
    ) -> None:
        if not 0 <= rank < world_size:
            raise CheckpointError(f"rank {rank} is not below world_size {world_size}")
        if keep < 1:
            raise CheckpointError(f"keep is {keep}: at least 1 checkpoint has to stay")
        self.path = path.rstrip("/")
        self._files = files
        self._rank = rank
        self._world_size = world_size
        self._keep = keep
        self._attempt = attempt if attempt is not None else attempt_from_environment(world_size)
        if not all(letter.isalnum() or letter == "_" for letter in self._attempt):
            raise CheckpointError(f"attempt {attempt!r} is not made of letters, digits and _")
        numbered = numbered_attempt() if attempt is None else None
        self._fence = AttemptFence(files, self.path, numbered)
        self._commit_seconds_max = commit_seconds_max
        self._busy_seconds_max = busy_seconds_max
        self._load_seconds_max = load_seconds_max
        self._loads = 0
        self._snapshot = Snapshot()
        self._handle: SaveHandle | None = None
        self._saves = 0
        self._swept = False
        # At exit, a process waits for its checkpoint, but for a limited time: the other ranks may
        # be waiting for this process to exit.
        atexit.register(self._finish)

    def save(
        self,
        step: int,
        state: dict[str, Any] | None = None,
        *,
        sharded: dict[str, Any] | None = None,
        on_durable: Callable[[str], object] | None = None,
        **parts: Any,
    ) -> SaveHandle:
        """Snapshot the state now and write it in the background. Call it on every rank.

        `state` and `parts` are the same on all ranks, and each rank writes its share of the bytes;
        a part with a `state_dict` method is saved through it. `sharded` is the state of this
        rank only. `on_durable` is called with the folder, on rank 0 only, from a background
        thread, before `wait` returns on any rank.

        One save is in flight at a time: this call waits for the previous one, at most
        `busy_seconds_max`, then raises `CheckpointBusyError`.
        """
        if step < 0:
            raise CheckpointError(f"step is {step}: steps count from 0")
        self._saves += 1  # before any failure, so that all ranks count the same
        if self._handle is not None and not self._handle._done.wait(self._busy_seconds_max):
            raise CheckpointBusyError(
                f"step {self._handle.step} is still being written after "
                f"{self._busy_seconds_max:g} s: step {step} was not started; save less often"
            )
        handle = SaveHandle(step)
        job = self._prepare(step, state_of(state, parts), state_of(sharded, {}), on_durable)
        name = f"checkpoint-{step}"
        threading.Thread(target=self._run, args=(job, handle), name=name, daemon=True).start()
        self._handle = handle
        return handle

    def _prepare(
        self,
        step: int,
        state: dict[str, Any],
        sharded: dict[str, Any],
        on_durable: Callable[[str], object] | None,
    ) -> SaveJob:
        shard = shard_name(self._rank)
        tree, leaves = flatten(state)
        own_tree, own_leaves = flatten(sharded)
        pieces = split(leaves, self._rank, self._world_size, shard)
        offset = sum(piece.length for piece in pieces)
        own_pieces = []
        for leaf in own_leaves:
            if leaf.length:
                own_pieces.append(Piece(leaf.name, 0, shard, offset, leaf.length))
                offset += leaf.length
        self._snapshot.take(
            [({leaf.name: leaf for leaf in leaves}, pieces),
             ({leaf.name: leaf for leaf in own_leaves}, own_pieces)],
        )  # fmt: skip
        save = f"{self._attempt}-{self._saves}"
        return SaveJob(
            files=self._files,
            folder=self.path,
            temporary=f"{self.path}/{temporary_folder_name(step, save)}",
            save=save,
            step=step,
            rank=self._rank,
            world_size=self._world_size,
            snapshot=self._snapshot,
            tree=tree,
            leaves=leaves,
            pieces=pieces,
            own_tree=own_tree,
            own_leaves=own_leaves,
            own_pieces=own_pieces,
            commit_seconds_max=self._commit_seconds_max,
            on_durable=on_durable,
            next_commit=self._next_commit,
            after_commit=partial(self._clean, self._loads) if self._rank == 0 else None,
        )

    def _run(self, job: SaveJob, handle: SaveHandle) -> None:
        if self._rank == 0:
            self._prepare_folder()
        job.run(handle)

    def _prepare_folder(self) -> None:
        try:
            self._fence.end_earlier_attempts()
            if not self._swept:
                self._fence.refuse_superseded()  # a successor's files must not be swept
                self._swept = True
                self._sweep()
        except CheckpointSupersededError:
            return  # the commit will be refused with this error
        except Exception as error:  # noqa: BLE001  leftovers only cost space
            _log.warning("leftovers of earlier attempts stay in %s: %s", self.path, error)

    def _finish(self) -> None:
        if self._handle is not None and not self._handle._done.wait(EXIT_SECONDS_MAX):
            _log.warning("step %d was still being written at exit", self._handle.step)

    def _sweep(self) -> None:
        """Remove unfinished checkpoints of earlier attempts, but not of this one."""
        for name in self._names():
            if is_leftover(name) and f".tmp-{self._attempt}-" not in name:
                throw_away(self._files, self.path, f"{self.path}/{name}")

    def _clean(self, loads: int) -> None:
        """After a commit: every rank has saved, so every rank has read the earlier choices."""
        self._prune()
        folders = {choice_folder(f"{self._attempt}-{number}") for number in range(1, loads + 1)}
        for name in folders.intersection(self._names()):
            throw_away(self._files, self.path, f"{self.path}/{name}")

    def _prune(self) -> None:
        """Keep the last commits; of each step only the last one."""
        steps: set[int] = set()
        for name in reversed(self._checkpoints()):
            if name.step in steps or len(steps) == self._keep:
                throw_away(self._files, self.path, self._path_of(name))
            else:
                steps.add(name.step)

    def latest(self) -> int | None:
        """The step of the last committed checkpoint with a valid manifest, or None."""
        for name in reversed(self._checkpoints()):
            try:
                return read_manifest(self._files, self._path_of(name)).step
            except Exception as error:
                if not is_damage(error):
                    raise
        return None

    def load(self, step: int | None = None) -> Loaded:
        """Load the last valid commit, or the last one of a step, on every rank.

        Rank 0 verifies every byte, chooses and publishes its choice; the other ranks wait for it,
        at most `load_seconds_max`, and load that checkpoint or fail. A damaged checkpoint is
        skipped in favor of the previous commit, and reported in a warning and in `.report`.
        Call it on every rank, the same number of times.
        """
        loaded, skipped = self._load(step)
        if loaded is not None:
            return loaded
        of_step = "" if step is None else f" of step {step}"
        reasons = "".join(f"; {item.path}: {item.reason}" for item in skipped)
        raise CheckpointNotFoundError(f"no complete checkpoint{of_step} in {self.path}{reasons}")

    def _load(self, step: int | None) -> tuple[Loaded | None, list[Skipped]]:
        self._loads += 1  # before any failure, so that all ranks count the same
        load = f"{self._attempt}-{self._loads}"
        if self._rank > 0:
            return self._follow(load)
        try:
            self._fence.end_earlier_attempts()
            loaded, skipped = self._choose(step)
        except Exception as error:
            if self._world_size > 1:
                choice = Choice(None, error=f"{type(error).__name__}: {error}")
                publish_choice(self._files, self.path, load, choice)
            raise
        if self._world_size > 1:
            choice = Choice(loaded.path if loaded else None, skipped)
            publish_choice(self._files, self.path, load, choice)
        return loaded, skipped

    def _choose(self, step: int | None) -> tuple[Loaded | None, list[Skipped]]:
        skipped: list[Skipped] = []
        for name in reversed(self._checkpoints()):
            if step is not None and name.step != step:
                continue
            path = self._path_of(name)
            try:
                manifest = read_manifest(self._files, path)
                if manifest.world_size == self._world_size:
                    verify_others(self._files, path, manifest, self._rank)
                loaded = self._read(path, manifest, skipped)
            except Exception as error:
                if not is_damage(error):
                    raise
                _log.warning("checkpoint %s is damaged and not used: %s", path, error)
                skipped.append(Skipped(path, str(error)))
                continue
            return loaded, skipped
        return None, skipped

    def _follow(self, load: str) -> tuple[Loaded | None, list[Skipped]]:
        choice = await_choice(self._files, self.path, load, self._load_seconds_max)
        if choice.error:
            raise CheckpointError(f"rank 0 could not choose a checkpoint: {choice.error}")
        if choice.path is None:
            return None, choice.skipped
        # Damage is an error here: loading another checkpoint than the other ranks would be worse.
        manifest = read_manifest(self._files, choice.path)
        return self._read(choice.path, manifest, choice.skipped), choice.skipped

    def _read(self, path: str, manifest: Manifest, skipped: list[Skipped]) -> Loaded:
        state, sharded = read_checkpoint(self._files, path, manifest, self._rank, self._world_size)
        return Loaded(manifest.step, path, state, sharded, LoadReport(list(skipped)))

    def load_latest(self, **parts: Any) -> Loaded | None:
        """Load the newest valid checkpoint into these objects; None if no checkpoint exists.

        If all checkpoints are damaged, an error is raised: a fresh start would hide the loss.
        """
        loaded, skipped = self._load(None)
        if loaded is None and not skipped:
            return None
        if loaded is None:
            reasons = "; ".join(f"{item.path}: {item.reason}" for item in skipped)
            raise CheckpointNotFoundError(f"no complete checkpoint in {self.path}; {reasons}")
        for name, part in parts.items():
            if name not in loaded.state:
                parts_saved = ", ".join(loaded.state)
                raise CheckpointError(f"{loaded.path} has no part `{name}`; it has: {parts_saved}")
            part.load_state_dict(loaded.state[name])
        return loaded

    def _names(self) -> list[str]:
        try:
            return self._files.listdir(self.path)
        except FileNotFoundError:
            return []

    def _checkpoints(self) -> list[Name]:
        """Return the checkpoints in commit order; those of DCP are not this manager's."""
        names = [name for text in self._names() if (name := parse_name(text)) is not None]
        commits = {name: self._commit_of(name) for name in names}
        return sorted(
            (name for name in names if commits[name] != FOREIGN),
            key=lambda name: (commits[name], name),
        )

    def _commit_of(self, name: Name) -> int:
        try:
            names = self._files.listdir(self._path_of(name))
        except FileNotFoundError:
            return 0  # removed meanwhile
        if DISTRIBUTED_MANIFEST_NAME in names:
            return FOREIGN
        # A folder without files is examined first, so that its damage is reported.
        return parse_commit(names) if MANIFEST_NAME in names else EMPTIED

    def _next_commit(self) -> int:
        self._fence.refuse_superseded()
        commits = {self._commit_of(name) for name in self._checkpoints()} - {EMPTIED}
        return max(commits, default=0) + 1

    def _path_of(self, name: Name) -> str:
        return f"{self.path}/{final_name(*name)}"
