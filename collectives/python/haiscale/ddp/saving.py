"""Checkpoints of scripts written for HAI: `init_checkpoint` binds them, `try_save` writes them.

A job that is asked to suspend is saved by the next `try_save`, and gives its nodes back. The
request comes from `hfai.client`, which `flyer.job.hfai.install()` provides in a FlyerJob; without
it nothing is saved unless the script forces it.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Checkpoint", "init_checkpoint", "try_save"]


class Model(Protocol):
    """A wrapped model, as it is saved."""

    module: nn.Module
    process_group: dist.ProcessGroup
    checkpoint: Checkpoint | None

    def synchronize(self) -> None:
        """Waits until the parameters are final."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A file, and what is saved in it with the model."""

    path: Path
    stateful: dict[str, Any] = field(default_factory=dict)
    """The optimizer, the scheduler and the gradient scaler, by their names in the file."""

    def load(self, module: nn.Module) -> tuple[int, int, Any]:
        """Epoch, step and other values of the file; zeros and None without a file."""
        if not self.path.exists():
            return 0, 0, None
        state = torch.load(self.path, map_location="cpu")
        module.load_state_dict(state["model"])
        for name, each in self.stateful.items():
            each.load_state_dict(state[name])
        return state["epoch"], state["step"], state["others"]

    def save(self, module: nn.Module, epoch: int, step: int, others: Any) -> None:
        """Replaces the file at once: a reader finds the old content or the new one."""
        state = {name: each.state_dict() for name, each in self.stateful.items()}
        state |= {"model": module.state_dict(), "epoch": epoch, "step": step, "others": others}
        temporary = self.path.with_name(f"{self.path.name}.tmp")
        with temporary.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.path)


def init_checkpoint(
    model: Model,
    optimizer: torch.optim.Optimizer,
    scheduler: Any = None,
    amp_scaler: Any = None,
    *,
    ckpt_path: str | Path,
) -> tuple[int, int, Any]:
    """Binds a checkpoint to a model for `try_save`, and loads it if it exists.

    Every rank calls it, with a path that all of them can read.

    Args:
        model: The wrapped model.
        optimizer: Its optimizer.
        scheduler: An object with `state_dict` and `load_state_dict`; None: there is none.
        amp_scaler: The `GradScaler`; None: there is none.
        ckpt_path: The file.

    Returns:
        Epoch, step and other values that the last `try_save` was called with; 0, 0 and None at
        first.
    """
    named = {"optimizer": optimizer, "scheduler": scheduler, "amp_scaler": amp_scaler}
    stateful = {name: each for name, each in named.items() if each is not None}
    checkpoint = model.checkpoint = Checkpoint(Path(ckpt_path), stateful)
    return checkpoint.load(model.module)


def try_save(model: Model, epoch: int, step: int, others: Any, *, force: bool) -> None:
    """Saves on the first rank if the job is asked to suspend, which then ends, or if forced."""
    checkpoint = model.checkpoint
    if checkpoint is None:
        raise RuntimeError(
            "try_save: the model has no checkpoint: call haiscale.ddp.init_checkpoint(model, "
            "optimizer, ckpt_path=…) first"
        )
    group = model.process_group
    device = next(model.module.parameters()).device
    client = _client()
    first = group.rank() == 0
    suspends = first and client is not None and client.receive_suspend_command()
    asked = torch.tensor([int(suspends)], device=device)
    source = dist.get_global_rank(group, 0)
    dist.broadcast(asked, source, group)
    if not (asked.item() or force):
        return
    model.synchronize()
    if first:
        checkpoint.save(model.module, epoch, step, others)
    dist.barrier(group)  # no rank ends the job before the file is complete
    if asked.item() and client is not None:
        client.go_suspend()


def _client() -> Any:
    """HAI's module, or the one that is installed under its name."""
    try:
        return importlib.import_module("hfai.client")
    except ModuleNotFoundError:
        return None
