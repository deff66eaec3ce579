"""Trains the GPT of model.py on text in 3FS, with gradients averaged by HFReduce.

An ordinary data-parallel script. What is not ordinary:
  - `init_process_group("hfreduce")` instead of "gloo": gradients go over the double binary tree;
  - `haiscale.ddp` instead of torch's DistributedDataParallel: a layer's parameters are updated
    when its gradients are averaged, while the next step's forward pass runs already;
  - data comes from 3FS in an order that depends on seed, step and index alone, so a resumed run
    of as many ranks reads what the uninterrupted one would have read (`haiscale.data`);
  - checkpoints go to 3FS in the background (`threefs`);
  - before each step the ranks agree whether they were asked to make room (`flyer.job`).
"""

import argparse
import json
import os

import flyer.job
import hfreduce.torch
import threefs
import torch
import torch.distributed as dist
from corpus import Corpus
from haiscale.data import Order
from haiscale.ddp import DistributedDataParallel
from haiscale.trace.exposure import Exposure
from haiscale.trace.record import record
from model import GPT
from threefs.checkpoint import CheckpointManager, digest
from torch.nn import functional


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", default="/corpus", help="folder in 3FS with the text")
    parser.add_argument("--checkpoints", default="/ckpt/gpt", help="folder in 3FS")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--checkpoint-every", type=int, default=10, help="steps")
    parser.add_argument("--batch", type=int, default=2, help="sequences per rank and step")
    parser.add_argument("--context", type=int, default=128, help="bytes per sequence")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--trace", help="folder for a trace of the third to fifth step")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    torch.manual_seed(args.seed)  # the same first weights on every rank
    dist.init_process_group("hfreduce")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    job = flyer.job.current()
    files = threefs.connect()
    corpus = Corpus(files, args.corpus, args.context)
    order = Order(len(corpus), args.batch * world_size, args.seed)
    checkpoints = CheckpointManager(files, args.checkpoints, rank, world_size, keep=3)

    model = GPT(args.context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    ddp = DistributedDataParallel(model, optimizer=optimizer)

    exposure = Exposure()
    start = 0
    loaded = checkpoints.load_latest(model=model, optimizer=optimizer)
    if loaded is not None:
        start = loaded.step
        if start > args.steps:
            raise SystemExit(f"the checkpoint has {start} steps, more than --steps {args.steps}")
        if rank == 0:
            print(f"resumed from step {start} of {loaded.path}", flush=True)

    for step in record(range(start, args.steps), args.trace, model):
        if asked_to_stop(job):
            # Everything up to here is saved: the next attempt starts with this step.
            job.received()
            save(checkpoints, job, step, model, optimizer).wait(timeout=60)
            job.release(step)

        tokens = corpus.read(order.step(step, rank, world_size))
        logits = ddp(tokens[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

        if rank == 0:
            print(f"step {step + 1}/{args.steps} loss {loss.item():.4f}", flush=True)
        job.progress(
            step + 1,
            total_steps=args.steps,
            loss=loss.item(),
            exposed=exposure.share(),
            allreduce_gigabytes_per_second=allreduce_gigabytes_per_second(),
        )
        if (step + 1) % args.checkpoint_every == 0 and step + 1 < args.steps:
            save(checkpoints, job, step + 1, model, optimizer)

    save(checkpoints, job, args.steps, model, optimizer).wait(timeout=60)
    if rank == 0:
        finish(files, args, model, optimizer)
    dist.destroy_process_group()


def asked_to_stop(job: flyer.job.Job) -> bool:
    """The same answer on all ranks: one rank is notified first, and none may continue alone."""
    flag = torch.tensor([1.0 if job.suspend_requested() else 0.0])
    dist.all_reduce(flag)
    return flag.item() > 0


def save(checkpoints, job, step, model, optimizer):
    """Copies the state now, writes it in the background, and reports it once it is durable."""
    return checkpoints.save(
        step,
        model=model,
        optimizer=optimizer,
        on_durable=lambda path: job.checkpoint(step, path, durable=True),
    )


def allreduce_gigabytes_per_second() -> float:
    """Bytes of gradients by the time that sums were under way, waiting for slow ranks included."""
    stats = hfreduce.torch.stats()
    return stats["reduced_bytes"] / max(1, stats["reducing_nanoseconds"])


def finish(files, args, model, optimizer) -> None:
    """Leaves the digest of all parameters and of the optimizer's state: the run's fingerprint."""
    result = {
        "steps": args.steps,
        "digest": digest(model=model, optimizer=optimizer),
        "zone_crossings_per_tree": hfreduce.torch.plan()["crossings"],
    }
    files.write_file(f"{args.checkpoints}/result.json", json.dumps(result).encode())
    print("result " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
