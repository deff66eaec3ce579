"""A job that counts steps: reports progress, saves a number, and suspends or fails on request.

Steps wait for files only where a test requests it, so that no test depends on a sleep.
"""

import argparse
import os
import signal
import sys
import time
from pathlib import Path

import flyer.job

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--pause", type=float, default=0.02)
parser.add_argument("--folder", type=Path, required=True)
parser.add_argument("--save-every", type=int, default=5)
parser.add_argument("--hold-at", type=int, help="wait before this step until FOLDER/go exists")
parser.add_argument("--deaf", action="store_true", help="never react to a suspend")
parser.add_argument("--fail-at", type=int)
parser.add_argument("--fail-rank", type=int, default=0)
parser.add_argument("--exit-with", type=int)
parser.add_argument("--kill-self-at", type=int, help="SIGKILL to itself, in the first attempt")
parser.add_argument("--silent-at", type=int, help="no progress or output from this step on")
parser.add_argument(
    "--silent-attempts", type=int, default=1, help="number of first attempts that do so"
)
args = parser.parse_args()

job = flyer.job.current()
args.folder.mkdir(parents=True, exist_ok=True)
step = int(Path(job.restore_path).read_text()) if job.restore_path else 0
print(f"rank {job.rank} attempt {job.attempt} starts at step {step}", flush=True)


def save() -> None:
    if job.rank == 0:
        path = args.folder / f"step-{step}"
        path.write_text(str(step))
        job.checkpoint(step, str(path), durable=True)


def answer_suspend() -> None:
    job.received()
    if job.rank == 0:
        save()
        job.release(step)
    if job.reason == "SIGTERM":
        os._exit(104)
    signal.pause()  # the other ranks wait to be stopped


def wait_for(path: Path) -> None:
    while not path.exists():
        if job.suspend_requested() and not args.deaf:
            answer_suspend()
        time.sleep(0.01)


if args.deaf:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
while step < args.steps:
    if args.hold_at == step:
        wait_for(args.folder / "go")
    if args.fail_at == step and job.rank == args.fail_rank:
        if args.exit_with is not None:
            sys.exit(args.exit_with)
        raise ValueError(f"bad batch at step {step}")
    if args.kill_self_at == step and job.rank == args.fail_rank and job.attempt == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if args.silent_at == step and job.attempt <= args.silent_attempts:
        signal.pause()
    time.sleep(args.pause)
    step += 1
    if job.rank == 0:
        print(f"step {step}", flush=True)
        job.progress(step, total_steps=args.steps, loss=1 / step)
    if job.suspend_requested() and not args.deaf:
        answer_suspend()
    if step % args.save_every == 0:
        save()
print(f"rank {job.rank} done", flush=True)
