"""Layouts and rank functions of the tests of haiscale.state: the trainers of the examples."""

import argparse
import importlib.util
import os
import signal
import sys
from pathlib import Path

import threefs
import torch
import torch.distributed as dist
from haiscale.data import Order
from haiscale.fsdp import fully_shard
from haiscale.mesh import build
from haiscale.placement import Nodes, Sizes
from haiscale.state import TrainingState
from threefs.checkpoint import LocalFiles
from threefs.checkpoint.distributed import ThreeFSReader, ThreeFSWriter

EXAMPLES = Path(__file__).parents[4] / "examples"
sys.path.append(str(EXAMPLES / "llama"))
from model import BYTES, SIZES, Llama  # noqa: E402  after the path
from parallel import Trainer  # noqa: E402

BATCH, CONTEXT, RATE = 24, 12, 1e-2
ORDER = Order(1000, BATCH, seed=3)

DENSE = [
    "dp=1", "dp=2", "shard=2", "pp=2", "tp=2", "shard=3", "dp=4", "shard=4", "pp=4", "dp=2,tp=2",
    "dp=2,shard=2", "dp=2,pp=2", "shard=2,pp=2", "shard=2,tp=2", "pp=2,tp=2", "shard=8",
    "dp=2,pp=4", "dp=2,shard=2,pp=2", "dp=2,shard=2,tp=2", "dp=2,pp=2,tp=2", "shard=2,pp=2,tp=2",
    "pp=4,tp=2",
]  # fmt: skip
EXPERT = [
    "ep=1", "dp=2", "dp=2,ep=2", "dp=4,ep=2", "dp=4,ep=4", "dp=8,ep=4", "shard=2,ep=2",
    "dp=2,pp=2,ep=2", "dp=2,tp=2,ep=2", "dp=2,shard=2,ep=2", "dp=2,shard=2,ep=4",
    "dp=4,pp=2,ep=2", "shard=4,ep=2",
]  # fmt: skip


def sizes_of(layout):
    return Sizes(**{axis: int(size) for axis, size in (p.split("=") for p in layout.split(","))})


def ranks_of(layout):
    return sizes_of(layout).world_size


def trainer_of(layout, size, *, experts=False, seed=1):
    """The example's trainer, with any accelerators of the node in a tp group."""
    meshes = build(sizes_of(layout), nodes=Nodes.one(size, nvlink=(tuple(range(size)),)))
    microbatches = BATCH // meshes.data_size // 3
    torch.manual_seed(seed)
    if not experts:
        return Trainer(llama(), meshes, microbatches)
    example = moe_example()
    args = argparse.Namespace(size="tiny", experts=8, chosen=2)
    return example.ExpertTrainer(example.mixture(args, meshes), meshes, microbatches)


def llama():
    """The model alone, on one process."""
    return Llama(SIZES["tiny"])


def moe_example():
    spec = importlib.util.spec_from_file_location("moe_train", EXAMPLES / "moe/train.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train(trainer, steps):
    """Trains; returns the losses, each the mean over all ranks."""
    meshes, losses = trainer.meshes, []
    for step in steps:
        samples = ORDER.step(step, meshes.data_rank, meshes.data_size)
        loss = torch.tensor([trainer.step(torch.stack([sample(n) for n in samples]), RATE)])
        dist.all_reduce(loss)
        losses.append(loss.item() / dist.get_world_size())
    return losses


def sample(number):
    """Bytes that can be predicted from the one before."""
    generator = torch.Generator().manual_seed(number)
    first, factor = torch.randint(1, BYTES, (2,), generator=generator).tolist()
    return torch.tensor([(first + factor * k) % BYTES for k in range(CONTEXT + 1)])


def state_of(trainer):
    return TrainingState(trainer.state, trainer.optimizer, data=ORDER)


def visit(rank, size, experts, folder, visits):
    """One job after the other, each in another layout; returns the losses of their steps.

    A visit is (layout, checkpoint to load or None, steps, checkpoint to save). What was loaded is
    saved again before the first step.
    """
    files, losses = LocalFiles(folder), []
    for layout, before, steps, after in visits:
        trainer = trainer_of(layout, size, experts=experts, seed=1 if before is None else 5)
        state, first = state_of(trainer), 0
        if before is not None:
            first = state.load(ThreeFSReader(files), before)
            state.save(ThreeFSWriter(files), again(before, layout), first)
        losses.append(train(trainer, range(first, steps)))
        if after is not None:
            state.save(ThreeFSWriter(files), after, steps)
    return losses


def again(checkpoint, layout):
    """The checkpoint that a visit has loaded and saved."""
    return f"/again/{checkpoint.replace('/', '-')}-{layout}"


def resume(rank, size, folder, layouts):
    """In each layout the losses of a job of 4 steps, and those of one that resumes at step 2."""
    files, losses = LocalFiles(folder), []
    reader, writer = ThreeFSReader(files), ThreeFSWriter(files)
    for layout in layouts:
        trainer = trainer_of(layout, size, experts="ep" in layout)
        state = state_of(trainer)
        alone = train(trainer, range(2))
        saving = state.save_async(writer, f"/half/{layout}", 2)
        alone += train(trainer, range(2, 4))
        saving.result(timeout=60)
        state.save(writer, f"/alone/{layout}", 4)
        trainer = trainer_of(layout, size, experts="ep" in layout, seed=5)
        state = state_of(trainer)
        resumed = train(trainer, range(state.load(reader, f"/half/{layout}"), 4))
        state.save(writer, f"/resumed/{layout}", 4)
        losses.append((alone, resumed))
    return losses


def rewrite(rank, size, layout, folder, victim, change):
    """Saves step 1, and dies at a change of the files of step 2; the error of the others."""
    trainer = trainer_of(layout, size)
    state, files = state_of(trainer), LocalFiles(folder)
    train(trainer, range(1))
    state.save(ThreeFSWriter(files), "/run/step-1", 1)
    train(trainer, range(1, 2))
    dying = DyingFiles(files, change) if rank == victim else files
    try:
        state.save_async(ThreeFSWriter(dying), "/run/step-2", 2).result(timeout=60)
    except BaseException as error:  # DCP's own exception is not an Exception
        return str(error)
    return None


class DyingFiles:
    """Kills its process at its n-th change of files, in the middle of a write."""

    def __init__(self, files, change):
        self.files, self.remaining = files, change

    def __getattr__(self, name):
        function = getattr(self.files, name)
        if name not in ("mkdir", "batch_write", "write_file", "rename", "rmtree"):
            return function

        def changing(*arguments, **options):
            if self.remaining == 0:
                if name == "batch_write":
                    self.files.batch_write([(p, at, d[: len(d) // 2]) for p, at, d in arguments[0]])
                os.kill(os.getpid(), signal.SIGKILL)
            self.remaining -= 1
            return function(*arguments, **options)

        return changing


class FullFiles:
    """Files of a cluster without space for data."""

    def __init__(self, files):
        self.files = files

    def __getattr__(self, name):
        return getattr(self.files, name)

    def batch_write(self, *arguments, **options):
        raise threefs.NoSpace("target 3 is full: remove files", path="/run")


def fails_to_save(rank, size, folder):
    """Errors of every rank: no space on rank 1, and a state that cannot be saved there."""
    trainer, files = trainer_of("shard=2", size), LocalFiles(folder)
    state, errors = state_of(trainer), []
    full = FullFiles(files) if rank == 1 else files
    for broken in (False, True):
        if broken and rank == 1:
            trainer.optimizer.param_groups[0]["lr"] = object()
        try:
            state.save(ThreeFSWriter(full), "/run/step-1", 1)
        except BaseException as error:  # DCP's own exception is not an Exception
            errors.append(f"{type(error).__name__}: {error}")
    return errors


def refused(rank, size, layout, folder, load):
    """The error of loading another model's checkpoint, and whether anything was changed."""
    trainer = trainer_of(layout, size)
    before = {name: value.clone() for name, value in trainer.state.state_dict().items()}
    try:
        state_of(trainer).load(ThreeFSReader(LocalFiles(folder)), load)
    except ValueError as error:
        after = trainer.state.state_dict()
        same = all(torch.equal(after[name], value) for name, value in before.items())
        return str(error), same
    return None


class CountingFiles:
    """Counts the bytes that are read of shards."""

    def __init__(self, files):
        self.files, self.bytes = files, 0

    def __getattr__(self, name):
        return getattr(self.files, name)

    def batch_read_into(self, requests):
        self.bytes += sum(len(part) for _, _, part in requests)
        return self.files.batch_read_into(requests)


def share(rank, size, folder):
    """Bytes of the checkpoint of a wide layer that a rank reads, and those of its state."""
    mesh = build(Sizes(shard=size)).dense["shard"]
    torch.manual_seed(1)
    layer = torch.nn.Linear(1024, 2048)
    whole = TrainingState(layer)
    files = CountingFiles(LocalFiles(folder))
    whole.save(ThreeFSWriter(files), "/run/whole", 0)
    expected = [layer.weight.detach().clone(), layer.bias.detach().clone()]
    fully_shard(layer, mesh=mesh)
    with torch.no_grad():
        layer.weight.zero_()
    TrainingState(layer).load(ThreeFSReader(files), "/run/whole")
    parts = [layer.weight.full_tensor(), layer.bias.full_tensor()]
    return files.bytes, all(map(torch.equal, parts, expected))
