"""A gang whose ranks need each other at every step, with only the standard library.

Pods run this file's text: `python3 -c TEXT FOLDER STEPS`. The state after a step depends on every
rank's number, so it is the same on all ranks and in all runs: `state_after` computes it.
Checkpoints are files in FOLDER that are renamed into place. The file FOLDER/until, if it exists,
names the step before which the run pauses; a paused run still obeys the scheduler.

FOLDER also gets `started-ATTEMPT-RANK`, which is created exactly once, and `final.json`. A rank
that shares its node with another rank fails.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

SAVE_STEPS = 20
HELD_SECONDS = 0.05  # between two looks of a run that is held
STEP_SECONDS = 0.02
MEET_SECONDS = 60.0  # a peer's name may be known later than its pod runs
GO, HOLD, STOP = b"g", b"h", b"s"
NUMBER_BYTES = 32


def main() -> None:
    """One of two ranks."""
    import flyer.job

    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    job = flyer.job.current()
    alone = (folder.parent / os.environ["FLYER_NODE"]).open("a")
    fcntl.flock(alone, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until this process ends
    start, state = 0, b""
    if job.restore_path is not None:
        saved = json.loads(Path(job.restore_path).read_text())
        start, state = int(saved["step"]), bytes.fromhex(saved["state"])
    with (folder / f"started-{job.attempt}-{job.rank}").open("x") as file:
        json.dump({"step": start}, file)
    peer, step = meet(job.rank), start
    while step < steps:
        order = decide(job, folder, step) if job.rank == 0 else b""
        order = exchange(peer, order, 1, leads=job.rank == 0)
        if order == STOP:
            if job.rank == 0:
                job.received()
                save(folder, step, state, job)
            exchange(peer, STOP if job.rank == 0 else b"", 1, leads=job.rank == 0)
            job.release(step)  # for all: it is saved
        if order == HOLD:
            time.sleep(HELD_SECONDS)
            continue
        own = number(job.rank, step)
        peer_number = exchange(peer, own, NUMBER_BYTES)
        state = after(state, *((own, peer_number) if job.rank == 0 else (peer_number, own)))
        step += 1
        time.sleep(STEP_SECONDS)
        if job.rank == 0:
            job.progress(step, total_steps=steps)
            if step % SAVE_STEPS == 0 and step < steps:
                save(folder, step, state, job)
    if job.rank == 0:
        write(folder / "final.json", {"state": state.hex(), "attempt": job.attempt})


def number(rank: int, step: int) -> bytes:
    """Input of a rank to a step."""
    return hashlib.sha256(f"{rank} {step}".encode()).digest()


def after(state: bytes, *numbers: bytes) -> bytes:
    """The state that follows."""
    return hashlib.sha256(b"".join([state, *numbers])).digest()


def state_after(steps: int) -> str:
    """The state of an uninterrupted run."""
    state = b""
    for step in range(steps):
        state = after(state, number(0, step), number(1, step))
    return state.hex()


def decide(job: Any, folder: Path, step: int) -> bytes:
    """Next action of all ranks."""
    if job.suspend_requested():
        return STOP
    try:
        return HOLD if step >= int((folder / "until").read_text()) else GO
    except FileNotFoundError:
        return GO


def meet(rank: int) -> socket.socket:
    """The connection of the two."""
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank == 0:
        with socket.create_server(("", address[1])) as server:
            server.settimeout(MEET_SECONDS)
            return server.accept()[0]
    deadline = time.monotonic() + MEET_SECONDS
    while True:
        try:
            return socket.create_connection(address)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(HELD_SECONDS)


def exchange(peer: socket.socket, own: bytes, size: int, *, leads: bool = False) -> bytes:
    """The peer's bytes for ours; the one who leads gives and takes nothing."""
    if own:
        peer.sendall(own)
    if leads:
        return own
    content = b""
    while len(content) < size:
        piece = peer.recv(size - len(content))
        if not piece:
            raise ConnectionError("the other rank is gone")
        content += piece
    return content


def save(folder: Path, step: int, state: bytes, job: Any) -> None:
    """A checkpoint; on return it is durable and reported to the scheduler."""
    path = folder / f"step-{step}.json"
    write(path, {"step": step, "state": state.hex()})
    job.checkpoint(step, str(path), durable=True)


def write(path: Path, value: dict[str, Any]) -> None:
    """All of it or nothing of it."""
    part = path.with_name(f".{path.name}.part")
    with part.open("w") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    part.rename(path)


if __name__ == "__main__":
    main()
