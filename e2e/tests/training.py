"""A training run in small, with the standard library alone; pods run this file's text.

Every rank has weights of its own. A step sums the ranks' gradients in rank 0, in rank order, and
gives the sum to all, with the word whether to stop: so all stop after the same step. Each rank
saves a shard (fsync, rename); when all have, rank 0 says that the checkpoint is durable.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

WIDTH = 16
CONNECT_SECONDS = 120.0
PEER_SECONDS = 120.0
Vector = list[float]


class Peers:
    """All ranks' lines to rank 0, and one answer to all."""

    def __init__(self, rank: int, world_size: int, address: str, port: int) -> None:
        self.rank = rank
        self._files: list[Any] = []
        if rank:
            self._files = [_connected(address, port).makefile("rw", encoding="utf-8")]
            self._say(self._files[0], rank)
            return
        with socket.create_server(("", port)) as server:
            server.settimeout(CONNECT_SECONDS)
            arrived: dict[int, Any] = {}
            while len(arrived) < world_size - 1:
                one, _ = server.accept()
                one.settimeout(PEER_SECONDS)
                file = one.makefile("rw", encoding="utf-8")
                arrived[json.loads(file.readline())] = file
        self._files = [arrived[peer] for peer in sorted(arrived)]

    def gather(self, mine: Any) -> list[Any]:
        """What all ranks gave, in rank order, in rank 0; nothing elsewhere."""
        if self.rank:
            self._say(self._files[0], mine)
            return []
        return [mine, *(json.loads(file.readline()) for file in self._files)]

    def share(self, said: Any) -> Any:
        """What rank 0 said, in all ranks."""
        if self.rank:
            return json.loads(self._files[0].readline())
        for file in self._files:
            self._say(file, said)
        return said

    def _say(self, file: Any, what: Any) -> None:
        file.write(json.dumps(what) + "\n")
        file.flush()


def gradient(weights: Vector, rank: int, step: int) -> Vector:
    """Some numbers whose sum depends on its order."""
    return [math.sin(w * (rank + 1) + step + i) / 3 for i, w in enumerate(weights)]


def stepped(weights: Vector, gradients: list[Vector]) -> Vector:
    """The weights after one step."""
    sums = [0.0] * WIDTH
    for one in gradients:
        sums = [a + b for a, b in zip(sums, one, strict=True)]
    return [w - 0.1 * s for w, s in zip(weights, sums, strict=True)]


def digest(weights: Vector) -> str:
    """A hash of their bits."""
    return hashlib.sha256(" ".join(w.hex() for w in weights).encode()).hexdigest()


def undisturbed(world_size: int, steps: int) -> str:
    """The final hash of a run that nobody interrupts."""
    weights = [0.0] * WIDTH
    for step in range(steps):
        weights = stepped(weights, [gradient(weights, r, step) for r in range(world_size)])
    return digest(weights)


def save(path: Path, what: object) -> None:
    """All of it or nothing of it, and durable when this returns."""
    part = path.with_name(f".{path.name}.part")
    with part.open("w") as file:
        json.dump(what, file)
        file.flush()
        os.fsync(file.fileno())
    part.rename(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def main() -> None:
    """One rank: `python3 training.py FOLDER STEPS SECONDS_A_STEP`."""
    import flyer.job

    folder, steps, pause = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    folder.mkdir(exist_ok=True)
    job = flyer.job.current()
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    peers = Peers(job.rank, job.world_size, address, port)
    start, weights = 0, [0.0] * WIDTH
    if job.restore_path is not None:
        saved = json.loads(Path(job.restore_path, f"rank-{job.rank}.json").read_text())
        start, weights = saved["step"], [float.fromhex(w) for w in saved["weights"]]
        if start != job.restore_step:
            raise ValueError(f"shard of step {start}, but the checkpoint is of {job.restore_step}")
    say(f"rank {job.rank} of {job.world_size} attempt {job.attempt} from step {start}")
    for step in range(start, steps):
        if peers.share(job.suspend_requested()):
            leave(job, peers, folder, step, weights)
        gathered = peers.gather(gradient(weights, job.rank, step))
        weights = [float.fromhex(w) for w in peers.share(summed(weights, gathered))]
        if job.rank == 0:
            job.progress(step + 1, total_steps=steps)
        time.sleep(pause)
    if job.rank == 0:
        end = {"hash": digest(weights), "attempt": job.attempt, "from_step": start}
        save(folder / "final.json", end)
    say(f"final {digest(weights)}")


def leave(job: Any, peers: Peers, folder: Path, step: int, weights: Vector) -> None:
    """Save, say so, give the nodes back."""
    if job.rank == 0:
        job.received()
        (folder / f"step-{step}").mkdir(exist_ok=True)
    where = folder / peers.share(f"step-{step}")
    shard = {"step": step, "weights": [w.hex() for w in weights]}
    save(where / f"rank-{job.rank}.json", shard)
    peers.gather("saved")
    if job.rank == 0:
        say(f"saved step {step}, asked by: {job.reason}")
        job.checkpoint(step, str(where), durable=True)
    peers.share("durable")
    job.release(step)


def summed(weights: Vector, gathered: list[Vector]) -> list[str]:
    """The new weights, bit for bit; only rank 0 knows."""
    return [w.hex() for w in stepped(weights, gathered)] if gathered else []


def say(line: str) -> None:
    """Into the pod's log."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _connected(address: str, port: int) -> socket.socket:
    deadline = time.monotonic() + CONNECT_SECONDS
    while True:
        try:
            return socket.create_connection((address, port), timeout=PEER_SECONDS)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


if __name__ == "__main__":
    main()
