"""The training loop of examples/llama and examples/moe: interruptible, in any layout.

- `haiscale.mesh` places the axes of the layout on the nodes, by rule;
- a sample depends on seed, step and index alone: a job that returns with other nodes, and with
  another layout, continues with the same global batches;
- a checkpoint has full names and global boxes (`haiscale.state`), so every layout loads it;
- the allreduce of a step's loss has whether a rank was asked to make room (`flyer.job`): all ranks
  stop after the same step.
"""

import argparse
import json
import math
import os
import sys
from pathlib import Path

import flyer.job
import threefs
import torch
import torch.distributed as dist
from haiscale.data import Order
from haiscale.mesh import Meshes, build
from haiscale.placement import Sizes
from haiscale.state import TrainingState, digest
from model import SIZES
from threefs.checkpoint.distributed import ThreeFSReader, ThreeFSWriter, latest_checkpoint

sys.path.append(str(Path(__file__).parents[1] / "gpt"))
from corpus import Corpus


def arguments(description: str, checkpoints: str) -> argparse.ArgumentParser:
    """The options of both examples."""
    parser = argparse.ArgumentParser(description=description)
    for axis, text in {
        "dp": "replicas; default: what the other axes leave",
        "shard": "ranks that share a replica's parameters",
        "pp": "pipeline stages",
        "tp": "ranks that share each matrix",
    }.items():
        parser.add_argument(f"--{axis}", type=int, default=None if axis == "dp" else 1, help=text)
    parser.add_argument("--stages-per-node", type=int, help="pipeline stages of a node")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--corpus", default="/corpus", help="folder in 3FS with the text")
    parser.add_argument("--checkpoints", default=checkpoints, help="folder in 3FS")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--checkpoint-every", type=int, default=10, help="steps")
    parser.add_argument("--batch", type=int, default=16, help="sequences of a step, on all ranks")
    parser.add_argument("--microbatch", type=int, default=1, help="sequences of a forward pass")
    parser.add_argument("--context", type=int, default=128, help="bytes per sequence")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=1)
    return parser


def start(args: argparse.Namespace) -> Meshes:
    """Joins the job and places the axes; the same first weights on every rank."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    torch.manual_seed(args.seed)
    dist.init_process_group("hfreduce")
    others = args.shard * args.pp * args.tp
    return build(
        Sizes(
            dp=args.dp or max(1, dist.get_world_size() // others),
            shard=args.shard,
            pp=args.pp,
            tp=args.tp,
            ep=getattr(args, "ep", 1),
            ep_nodes=getattr(args, "ep_nodes", 1),
            stages_per_node=args.stages_per_node,
        )
    )


def microbatches(args: argparse.Namespace, meshes: Meshes) -> int:
    """Forward passes of a step. The global batch is the same on any number of ranks."""
    each, rest = divmod(args.batch, meshes.data_size * args.microbatch)
    if rest or not each:
        raise SystemExit(
            f"--batch {args.batch} does not divide into micro-batches of {args.microbatch} on "
            f"{meshes.data_size} data-parallel ranks: choose a multiple of "
            f"{meshes.data_size * args.microbatch}"
        )
    return each


def train(args: argparse.Namespace, meshes: Meshes, trainer) -> None:
    """Trains from the last checkpoint, of whatever layout, to the last step."""
    job = flyer.job.current()
    files = threefs.connect()
    corpus = Corpus(files, args.corpus, args.context)
    order = Order(len(corpus), args.batch, args.seed)
    state = TrainingState(trainer.state, trainer.optimizer, data=order)
    checkpoints = Checkpoints(files, args.checkpoints, state, job)

    done = checkpoints.load()
    if done > args.steps:
        raise SystemExit(f"the checkpoint has {done} steps, more than --steps {args.steps}")
    for step in range(done, args.steps):
        tokens = corpus.read(order.step(step, meshes.data_rank, meshes.data_size))
        own = trainer.step(tokens, learning_rate(args, step))
        loss, is_asked = means(own, float(job.suspend_requested()))

        steps = step + 1
        if dist.get_rank() == 0:
            print(f"step {steps}/{args.steps} loss {loss:.4f}", flush=True)
        job.progress(steps, total_steps=args.steps, loss=loss)
        if is_asked and steps < args.steps:
            # Everything up to here is saved: the next attempt starts with the next step.
            job.received()
            checkpoints.save_now(steps)
            job.release(steps)
        if steps % args.checkpoint_every == 0 and steps < args.steps:
            checkpoints.save(steps)

    checkpoints.save_now(args.steps)
    if dist.get_rank() == 0:
        checkpoints.finish(args.steps)
    dist.barrier()
    dist.destroy_process_group()


class Checkpoints:
    """Checkpoints of one folder, reported to the scheduler once they are durable."""

    def __init__(self, files, folder: str, state: TrainingState, job: flyer.job.Job) -> None:
        self.files, self.folder, self.state, self.job = files, folder, state, job
        self.writer = ThreeFSWriter(files, keep=3)

    def load(self) -> int:
        """Loads the last one; returns the number of completed steps, or 0 without any."""
        found = [latest_checkpoint(self.files, self.folder)] if dist.get_rank() == 0 else [None]
        dist.broadcast_object_list(found)  # all ranks load the same one
        if found[0] is None:
            return 0
        step = self.state.load(ThreeFSReader(self.files), found[0])
        if dist.get_rank() == 0:
            print(f"resumed from step {step} of {found[0]}", flush=True)
        return step

    def save(self, step: int) -> None:
        """Copies the state now and writes it in the background."""
        saving = self.state.save_async(self.writer, self.path(step), step)

        def report(done) -> None:
            if done.exception() is None:
                self.report(step)
            else:
                print(f"step {step} was not saved: {done.exception()}", flush=True)

        saving.add_done_callback(report)

    def save_now(self, step: int) -> None:
        """Returns once the checkpoint is durable and reported."""
        self.state.save(self.writer, self.path(step), step)
        self.report(step)
        dist.barrier()  # no rank releases the job before

    def report(self, step: int) -> None:
        """From one rank, for all."""
        if dist.get_rank() == 0:
            self.job.checkpoint(step, self.path(step), durable=True)

    def path(self, step: int) -> str:
        return f"{self.folder}/step-{step}"

    def finish(self, step: int) -> None:
        """Leaves the digest of the last checkpoint: of parameters, optimizer and position."""
        result = {"steps": step, "digest": digest(ThreeFSReader(self.files), self.path(step))}
        self.files.write_file(f"{self.folder}/result.json", json.dumps(result).encode())
        print("result " + json.dumps(result), flush=True)


def means(*values: float) -> list[float]:
    """Over all ranks; ranks of one replica have equal losses."""
    totals = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(totals)
    return (totals / dist.get_world_size()).tolist()


def learning_rate(args: argparse.Namespace, step: int) -> float:
    """Linear warm-up, then a cosine to a tenth: a function of the step, with no state to save."""
    warmup = max(1, args.steps // 10)
    if step < warmup:
        return args.learning_rate * (step + 1) / warmup
    done = (step - warmup) / max(1, args.steps - warmup)
    return args.learning_rate * (0.55 + 0.45 * math.cos(math.pi * done))
