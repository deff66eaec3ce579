"""A training run as a user writes it: torch over HFReduce, data and checkpoints in a volume.

Pods run this file's text: `python3 -c TEXT VOLUME NAME STEPS`. VOLUME/corpus is the training text;
the run's own files are in VOLUME/NAME. A checkpoint contains all parameters and the whole state of
the optimizer, one slice per rank, and a manifest that is renamed into place last.

The file VOLUME/NAME/until, if it exists, names the step before which the run pauses, so that a
test's faults fall inside the run however fast the host is. A paused run still obeys the scheduler.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

BATCH, CONTEXT, WIDTH = 4, 32, 48
CHECKPOINT_STEPS = 10
HELD_SECONDS = 0.05  # between two looks of a run that is held
STOP, HOLD = 1.0, 2.0


def main() -> None:
    """One rank."""
    import flyer.job
    import hfreduce.torch
    import torch
    import torch.distributed as dist

    volume, name, steps = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    folder = volume / name
    folder.mkdir(exist_ok=True)
    torch.set_num_threads(1)
    torch.manual_seed(1)  # the same first weights on every rank
    dist.init_process_group("hfreduce")
    job = flyer.job.current()
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    settle(model, optimizer)
    start = 0
    if job.restore_path is not None:
        start = restore(Path(job.restore_path), model, optimizer)
    first = job.rank == 0
    devices = " ".join(f"{key}={os.environ.get(key)}" for key in DEVICES)
    say(f"rank {job.rank} of {job.world_size} attempt {job.attempt} from step {start} {devices}")

    step = start
    with (volume / "corpus").open("rb") as corpus:
        while step < steps:
            order = torch.zeros(1)
            if first:
                order[0] = STOP if job.suspend_requested() else HOLD * (step >= until(folder))
            dist.all_reduce(order)
            if order.item() == STOP:
                if first:
                    job.received()
                save(folder, step, model, optimizer, job)
                say(f"saved step {step}, asked by: {job.reason}")
                job.release(step)
            if order.item() == HOLD:
                time.sleep(HELD_SECONDS)
                continue
            take_step(model, optimizer, batch(corpus, step * job.world_size + job.rank))
            step += 1
            if first:
                job.progress(step, total_steps=steps)
            if step % CHECKPOINT_STEPS == 0 and step < steps:
                save(folder, step, model, optimizer, job)
    end = {
        "digest": hashlib.sha256(state_of(model, optimizer).numpy().tobytes()).hexdigest(),
        "attempt": job.attempt,
        "from_step": start,
        "crossings": hfreduce.torch.plan()["crossings"],
    }
    say(f"final {end['digest']}")
    if first:
        write(folder / "final.json", json.dumps(end).encode())
    dist.destroy_process_group()


DEVICES = ("FLYER_GPUS", "FLYER_GPU_PAIRS", "FLYER_HFREDUCE_SERVICE_LEVEL")
"""Environment set by the device plugin."""


def network() -> Any:
    """Predicts the next byte."""
    from torch import nn

    layers = (
        nn.Embedding(256, WIDTH),
        nn.Linear(WIDTH, 4 * WIDTH),
        nn.GELU(),
        nn.Linear(4 * WIDTH, WIDTH),
        nn.LayerNorm(WIDTH),
        nn.Linear(WIDTH, 256),
    )
    return nn.Sequential(*layers)


def settle(model: Any, optimizer: Any) -> None:
    """Makes the optimizer's state, which a checkpoint is then read into."""
    import torch

    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()


def take_step(model: Any, optimizer: Any, tokens: Any) -> None:
    """One step on the mean of all ranks' gradients."""
    import torch
    import torch.distributed as dist
    from torch.nn import functional

    optimizer.zero_grad()
    logits = model(tokens[:, :-1])
    loss: Any = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    total: Any = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(total)
    total /= dist.get_world_size()
    for target, part in zip(gradients, total.split([g.numel() for g in gradients]), strict=True):
        target.copy_(part.view_as(target))
    optimizer.step()


def batch(corpus: Any, seed: int) -> Any:
    """Some sequences of the corpus, the same ones for the same seed; read at every step."""
    import torch

    size = os.fstat(corpus.fileno()).st_size
    places = torch.randint(
        size - CONTEXT - 1, (BATCH,), generator=torch.Generator().manual_seed(seed)
    )
    rows = [os.pread(corpus.fileno(), CONTEXT + 1, int(place)) for place in places]
    return torch.tensor([list(row) for row in rows])


def until(folder: Path) -> int:
    """The step before which the run is held."""
    try:
        return int((folder / "until").read_text())
    except FileNotFoundError:
        return sys.maxsize


def tensors_of(model: Any, optimizer: Any) -> list[Any]:
    """All state that a run needs to continue: parameters and their optimizer states."""
    tensors = list(model.parameters())
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        tensors += [state[key] for key in sorted(state)]
    return tensors


def state_of(model: Any, optimizer: Any) -> Any:
    """It in one row."""
    import torch

    return torch.cat([tensor.detach().flatten() for tensor in tensors_of(model, optimizer)])


def save(folder: Path, step: int, model: Any, optimizer: Any, job: Any) -> None:
    """A checkpoint of all ranks; on return it is durable and reported to the scheduler."""
    import torch.distributed as dist

    where = folder / f"step-{step}"
    where.mkdir(exist_ok=True)
    state = state_of(model, optimizer)
    own = state.tensor_split(job.world_size)[job.rank]
    write(where / f"rank-{job.rank}", own.numpy().tobytes())
    dist.barrier()
    if job.rank == 0:
        manifest = {"step": step, "ranks": job.world_size}
        write(where / "manifest.json", json.dumps(manifest).encode())
        job.checkpoint(step, str(where), durable=True)
    dist.barrier()


def restore(where: Path, model: Any, optimizer: Any) -> int:
    """Reads a checkpoint; its step."""
    import torch

    manifest = json.loads((where / "manifest.json").read_text())
    data = b"".join((where / f"rank-{rank}").read_bytes() for rank in range(manifest["ranks"]))
    state = torch.frombuffer(bytearray(data), dtype=torch.float32)
    at = 0
    with torch.no_grad():
        for tensor in tensors_of(model, optimizer):
            tensor.copy_(state[at : at + tensor.numel()].reshape(tensor.shape))
            at += tensor.numel()
    if at != state.numel():
        raise ValueError(f"{where} has {state.numel()} numbers, the model {at}")
    return int(manifest["step"])


def write(path: Path, data: bytes) -> None:
    """All of it or nothing of it, and durable when this returns."""
    part = path.with_name(f".{path.name}.part")
    with part.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    part.rename(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def say(line: str) -> None:
    """Into the pod's log."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
