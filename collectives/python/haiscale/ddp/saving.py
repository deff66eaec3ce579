"""Checkpoints of scripts written for HAI: `init_checkpoint` binds them, `try_save` writes them.

All ranks of the job call both, with pipelines as well: each stage has a file, and the job is
suspended once all files are complete. An error of one rank is raised on every rank.
A job that is asked to suspend is saved by the next `try_save`, and gives its nodes back. The
request comes from `hfai.client`, which `flyer.job.hfai.install()` provides in a FlyerJob; without
it nothing is saved unless the script forces it.
"""

from __future__ import annotations

import importlib
import os
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Checkpoint", "CheckpointError", "init_checkpoint", "try_save"]


class CheckpointError(RuntimeError):
    """A checkpoint was not saved or loaded by all ranks; raised on every rank."""


class Model(Protocol):
    """A wrapped model, as it is saved."""

    module: nn.Module
    process_group: dist.ProcessGroup
    device: torch.device
    checkpoint: Checkpoint | None

    def synchronize(self) -> None:
        """Waits until the parameters are final."""


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Checkpoint:
    """A file, and what is saved in it with the model."""

    path: Path
    stateful: dict[str, Any]
    """The optimizer, the scheduler and the gradient scaler, by their names in the file."""

    def load(self, module: nn.Module) -> tuple[int, int, Any] | None:
        """Epoch, step and other values of the file; None without a file."""
        if not self.path.exists():
            return None
        # Not only weights: `others` may be of any type, and the job wrote the file.
        state = torch.load(self.path, map_location="cpu", weights_only=False)
        for name in ("model", *self.stateful, "epoch", "step", "others"):
            if name not in state:
                raise ValueError(
                    f"the file has no {name}: pass the path of a file that try_save has written "
                    "with the same arguments of init_checkpoint"
                )
        module.load_state_dict(state["model"])
        for name, each in self.stateful.items():
            each.load_state_dict(state[name])
        return state["epoch"], state["step"], state["others"]

    def check_directory(self) -> None:
        """Raises if no file can be created in the checkpoint's directory."""
        if not self.path.parent.is_dir():
            raise NotADirectoryError(f"no directory {self.path.parent}: create it first")

    def save(self, module: nn.Module, epoch: int, step: int, others: Any) -> None:
        """Replaces the file at once: a reader finds the old content or the new one."""
        state = {name: each.state_dict() for name, each in self.stateful.items()}
        state |= {"model": module.state_dict(), "epoch": epoch, "step": step, "others": others}
        temporary = self.path.with_name(f"{self.path.name}.tmp")
        try:
            with temporary.open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.path)
        finally:
            temporary.unlink(missing_ok=True)


_BOUND: weakref.WeakValueDictionary[Path, Checkpoint] = weakref.WeakValueDictionary()
"""The last checkpoint that was bound to each file."""


def init_checkpoint(
    model: Model,
    optimizer: torch.optim.Optimizer,
    scheduler: Any = None,
    amp_scaler: Any = None,
    *,
    ckpt_path: str | Path,
) -> tuple[int, int, Any]:
    """Binds a checkpoint to a model for `try_save`, and loads it if it exists.

    Every rank of the job calls it, with a path that all ranks of the model's process group can
    read. The file is loaded as `torch.load(weights_only=False)` does: it must be the job's own.

    Args:
        model: The wrapped model.
        optimizer: Its optimizer.
        scheduler: An object with `state_dict` and `load_state_dict`; None: there is none.
        amp_scaler: The `GradScaler`; None: there is none.
        ckpt_path: The file.

    Returns:
        Epoch, step and other values that the last `try_save` was called with; 0, 0 and None at
        first.

    Raises:
        CheckpointError: A rank cannot load its file, the files are of different steps, or several
            process groups have the same file; on every rank. A file of another model may have
            changed a part of this one, which `try_save` then does not save.
    """
    named = {"optimizer": optimizer, "scheduler": scheduler, "amp_scaler": amp_scaler}
    stateful = {name: each for name, each in named.items() if each is not None}
    checkpoint = Checkpoint(Path(ckpt_path).absolute(), stateful)
    model.checkpoint = None
    _check_owners(checkpoint.path, model.process_group)
    loaded, error = None, None
    try:
        if model.process_group.rank() == 0:
            checkpoint.check_directory()
        loaded = checkpoint.load(model.module)
    except Exception as failure:  # noqa: BLE001  (raised on every rank)
        error = failure
    _check_all(f"init_checkpoint: loading {checkpoint.path}", error)
    what = "no file" if loaded is None else f"epoch {loaded[0]}, step {loaded[1]}"
    _check_equal(what, checkpoint.path)
    model.checkpoint = _BOUND[checkpoint.path] = checkpoint
    return loaded or (0, 0, None)


def try_save(model: Model, epoch: int, step: int, others: Any, *, force: bool) -> None:
    """Saves if the job is asked to suspend, which then ends, or if forced.

    Every rank of the job calls it. The first rank of each process group writes its file. Request
    and `force` are those of the job's first rank, since the client of other nodes has no request.

    Raises:
        CheckpointError: A rank has no checkpoint or cannot write its file; on every rank.
    """
    checkpoint, client, error = model.checkpoint, None, None
    suspends = False
    try:
        _check_bound(checkpoint)
        client = _client()
        if dist.get_rank() == 0 and client is not None:
            suspends = bool(client.receive_suspend_command())
    except Exception as failure:  # noqa: BLE001  (raised on every rank)
        error = failure
    request = torch.tensor(
        [int(suspends), int(force and dist.get_rank() == 0), int(error is not None)],
        device=model.device,
    )
    dist.all_reduce(request)
    if request[2].item():
        _check_all("try_save", error)
    if checkpoint is None or not request.any():
        return
    error = None
    try:
        model.synchronize()
        if model.process_group.rank() == 0:
            checkpoint.save(model.module, epoch, step, others)
    except Exception as failure:  # noqa: BLE001  (raised on every rank)
        error = failure
    # Also a barrier: no rank ends the job before all files are complete.
    _check_all(f"try_save: writing {checkpoint.path}", error)
    if request[0].item() and client is not None:
        client.go_suspend()


def _check_bound(checkpoint: Checkpoint | None) -> None:
    """Raises if a model has no checkpoint, or another wrapper has its file."""
    if checkpoint is None:
        raise ValueError(
            "the model has no checkpoint: call haiscale.ddp.init_checkpoint(model, optimizer, "
            "ckpt_path=…) first"
        )
    if _BOUND.get(checkpoint.path) is not checkpoint:
        raise ValueError(
            f"{checkpoint.path} is the file of another wrapper, which called init_checkpoint "
            "later: use a different ckpt_path for each model"
        )


def _check_owners(path: Path, group: dist.ProcessGroup) -> None:
    """Raises on every rank if two process groups would write the same file."""
    owners: dict[str, list[int]] = {}
    for where, ranks in _gather((str(path), dist.get_process_group_ranks(group))):
        first = owners.setdefault(where, ranks)
        if ranks != first:
            raise CheckpointError(
                f"init_checkpoint: {where} is the file of ranks {first} and of ranks {ranks}: use "
                "a different ckpt_path for each process group, for example with the stage's number"
            )


def _check_all(action: str, error: Exception | None) -> None:
    """Raises on every rank if an action has failed on one."""
    own = None if error is None else f"{action} on rank {dist.get_rank()}: {error!r}"
    failure = next((each for each in _gather(own) if each is not None), None)
    if failure is not None:
        raise CheckpointError(failure) from error


def _check_equal(what: str, path: Path) -> None:
    """Raises on every rank if the ranks have loaded different steps."""
    loaded = _gather((what, str(path)))
    for rank, (other, where) in enumerate(loaded):
        first, at = loaded[0]
        if other != first:
            raise CheckpointError(
                f"init_checkpoint: rank {rank} has {other} at {where}, rank 0 has {first} at {at}: "
                "use a directory that all nodes share, and files of the same step"
            )


def _gather(own: Any) -> list[Any]:
    """The values of all ranks of the job."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, own)
    return values


def _client() -> Any:
    """HAI's module, or the one that is installed under its name."""
    try:
        return importlib.import_module("hfai.client")
    except ModuleNotFoundError as error:
        if error.name not in {"hfai", "hfai.client"}:
            raise  # a broken installation: without it no request to suspend would arrive
        return None
