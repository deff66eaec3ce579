"""`TrainingState`: saves and loads model, optimizers and the position in the data."""

from __future__ import annotations

import concurrent.futures
import json
import pickle
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from haiscale.overlap import groups
from haiscale.state.boxes import Box, named_boxes
from haiscale.state.contents import load_planner
from haiscale.state.errors import StateMismatchError
from haiscale.state.optimizers import NamedOptimizer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Future

    from torch import nn
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.storage import StorageReader, StorageWriter
    from torch.optim import Optimizer

    from haiscale.data import Order
    from haiscale.pipeline.module import Pipeline
    from haiscale.state.boxes import Named
    from haiscale.state.optimizers import Hyperparameters

__all__ = ["TrainingState"]

MODEL, OPTIMIZER = "model.", "optimizer."
"""Before the names of tensors in a checkpoint."""
HYPERPARAMETERS, POSITION = "hyperparameters", "position"
"""Objects of a checkpoint, as JSON."""
BUSY_SECONDS_MAX: Final = 600.0
"""For a save in the background to end before the next save or load."""

T = TypeVar("T")
Kind = tuple[torch.Size, torch.dtype]
"""Shape and type of a whole tensor."""


class TrainingState:
    """The state from which a job continues, in the names and shapes of the whole model.

    Every rank of the job makes one, after the model was wrapped and the optimizers were made, and
    calls its methods at the same steps.

    Args:
        model: The module (also with shards, divided matrices or experts), its
            DistributedDataParallel, or the pipeline.
        optimizers: Of this rank's parameters; none: only the model is saved and loaded.
        data: The order of the data; a checkpoint of another order is refused.
    """

    def __init__(
        self,
        model: nn.Module | Pipeline,
        optimizers: Optimizer | Sequence[Optimizer] = (),
        *,
        data: Order | None = None,
    ) -> None:
        self._model = model
        is_one = isinstance(optimizers, torch.optim.Optimizer)
        self._optimizers: list[Any] = [optimizers] if is_one else [*optimizers]  # type: ignore[misc]
        self._data = data
        # Background saves have collectives, which must not mix with those of the training.
        world = dist.group.WORLD
        self._group: Any = None if world is None else groups.sibling(world, "low")
        self._saving: Future[Any] | None = None

    def save(self, writer: StorageWriter, checkpoint: str, step: int) -> None:
        """Writes a checkpoint; it is complete when this returns.

        Args:
            writer: Where to, for example a `threefs.checkpoint.distributed.ThreeFSWriter`.
            checkpoint: Its id, a path such as `/ckpt/llama/step-40`.
            step: Number of completed steps.

        Raises:
            CheckpointException: torch's, on every rank, with the errors of each rank.
            TimeoutError: An earlier save in the background has not ended.
        """
        contents = self._contents(step)
        save(
            contents,
            storage_writer=writer,
            checkpoint_id=checkpoint,
            planner=_save_planner(),
            process_group=self._group,
        )

    def save_async(self, writer: StorageWriter, checkpoint: str, step: int) -> Future[Any]:
        """Copies the state and writes it in the background; training may continue.

        `result()` of the returned future waits for the checkpoint and raises as `save`.
        """
        contents = self._contents(step)
        saving: Any = async_save(
            contents,
            storage_writer=writer,
            checkpoint_id=checkpoint,
            planner=_save_planner(),
            process_group=self._group,
        )
        future: Future[Any] = saving
        self._saving = future
        return future

    def load(self, reader: StorageReader, checkpoint: str) -> int:
        """Loads a checkpoint of any layout of the same model; returns its step.

        Each rank reads its boxes only. Nothing is changed unless every rank has read everything.

        Raises:
            StateMismatchError: The checkpoint has another parameter, shape, type, optimizer or data
                order; the first difference is named, on every rank.
            CheckpointException: torch's, on every rank: it is damaged or cannot be read.
        """

        def make_room() -> tuple[Named, dict[str, Box]]:
            self._await_saving()
            named = named_boxes(self._model)
            return named, {
                MODEL + name: Box(torch.empty_like(box.tensor), box.shape, box.offsets)
                for name, box in named.boxes.items()
            }

        named, targets = _agreed(make_room)

        def prepare() -> list[tuple[NamedOptimizer, dict[str, Box]]]:
            reader.reset(checkpoint)
            metadata = reader.read_metadata()
            _check_model(checkpoint, expected, metadata)
            saved = _tensors(metadata, OPTIMIZER)
            own = [NamedOptimizer(optimizer, named) for optimizer in self._optimizers]
            return [(each, each.targets(saved)) for each in own]

        expected = _all_kinds(named)
        optimizers = _agreed(prepare)
        contents: dict[str, Any] = {POSITION: "", HYPERPARAMETERS: ""}
        contents |= {name: box.checkpointable() for name, box in targets.items()}
        for _, states in optimizers:
            contents |= {OPTIMIZER + name: box.checkpointable() for name, box in states.items()}
        load(
            contents,
            storage_reader=reader,
            checkpoint_id=checkpoint,
            planner=load_planner(),
            process_group=self._group,
        )
        position = json.loads(contents[POSITION])
        values: Hyperparameters = json.loads(contents[HYPERPARAMETERS])

        def check() -> list[Callable[[], None]]:
            self._check_data(checkpoint, position["data"] or {})
            return [own.setting(states, values, checkpoint) for own, states in optimizers]

        settings = _agreed(check)
        for name, box in named.boxes.items():
            box.tensor.copy_(targets[MODEL + name].tensor)
        for setting in settings:
            setting()
        return int(position["step"])

    def _await_saving(self) -> None:
        if self._saving is not None:
            concurrent.futures.wait([self._saving], timeout=BUSY_SECONDS_MAX)
            if not self._saving.done():
                raise TimeoutError(
                    f"the save in the background has not ended after {BUSY_SECONDS_MAX:g} s: save "
                    "less often, and look at the storage"
                )

    def _contents(self, step: int) -> dict[str, Any]:
        """The state of this rank: its parts, and objects that are equal on all ranks."""
        named, contents, own = _agreed(self._parts)
        values: Hyperparameters = {}
        for rank, (others, buffers) in enumerate(_gathered((own, named.buffers))):
            values |= others
            if rank < _rank():  # a buffer is that of the first rank that has it
                for name in named.buffers & buffers:
                    contents.pop(MODEL + name, None)
        data = None if self._data is None else asdict(self._data)
        contents[HYPERPARAMETERS] = json.dumps(values, sort_keys=True)
        contents[POSITION] = json.dumps({"step": step, "data": data})
        return contents

    def _parts(self) -> tuple[Named, dict[str, Any], Hyperparameters]:
        """Names and tensors of this rank's state, and the hyperparameters of its parameters."""
        self._await_saving()
        named = named_boxes(self._model)
        contents: dict[str, Any] = {
            MODEL + name: box.checkpointable() for name, box in named.boxes.items()
        }
        values: Hyperparameters = {}
        for optimizer in (NamedOptimizer(each, named) for each in self._optimizers):
            values |= optimizer.hyperparameters()
            for name, box in optimizer.states().items():
                contents[OPTIMIZER + name] = box.checkpointable()
        return named, contents, values

    def _check_data(self, checkpoint: str, found: Mapping[str, Any]) -> None:
        for name, expected in ({} if self._data is None else asdict(self._data)).items():
            if found.get(name) != expected:
                raise StateMismatchError(
                    checkpoint, f"{name} of the data order", str(found.get(name)), str(expected)
                )


def _save_planner() -> DefaultSavePlanner:
    """Contents are flat: names are those of the checkpoint."""
    return DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _gathered(value: Any) -> list[Any]:
    """The values of all ranks."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _agreed(call: Callable[[], T]) -> T:
    """The result of a call without collectives; the first rank's exception is raised on all."""
    failure: Exception | None = None
    try:
        result = call()
    except Exception as error:  # noqa: BLE001  (raised below)
        failure = _sendable(error)
    for each in _gathered(failure):
        if each is not None:
            raise each
    return result


def _sendable(error: Exception) -> Exception:
    """The error, or its text if other ranks could not read it."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301  (our own bytes)
    except Exception:  # noqa: BLE001  (constructors of any package)
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _all_kinds(named: Named) -> dict[str, Kind]:
    """Shapes and types of all ranks' tensors."""
    kinds: dict[str, Kind] = {}
    for each in _gathered({n: (box.shape, box.tensor.dtype) for n, box in named.boxes.items()}):
        kinds |= each
    return kinds


def _tensors(metadata: Metadata, prefix: str) -> dict[str, Kind]:
    """Shapes and types of the tensors of a checkpoint whose names have a prefix."""
    return {
        name.removeprefix(prefix): (entry.size, entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }


def _check_model(checkpoint: str, expected: Mapping[str, Kind], metadata: Metadata) -> None:
    """Compares names, shapes and types of all ranks with those of a checkpoint."""
    found = _tensors(metadata, MODEL)
    for name in sorted(expected.keys() | found.keys()):
        if found.get(name) != expected.get(name):
            raise StateMismatchError(
                checkpoint, repr(name), _text(found.get(name)), _text(expected.get(name))
            )


def _text(kind: Kind | None) -> str:
    if kind is None:
        return "nothing"
    shape, dtype = kind
    text = f"shape {'x'.join(map(str, shape))}" if shape else "a scalar"
    return f"{text} of {str(dtype).removeprefix('torch.')}"
