"""A job that counts steps with only the standard library; pods run this file's text.

`python3 -c TEXT STEPS`. Ranks do not communicate: rank 0 reports steps and every tenth as a
checkpoint, without writing one, so that a restart continues from there.
"""

from __future__ import annotations

import sys
import time

SAVE_STEPS = 10
STEP_SECONDS = 0.05


def main() -> None:
    """One rank."""
    import flyer.job

    job, steps = flyer.job.current(), int(sys.argv[1])
    for step in range(job.restore_step or 0, steps):
        if job.suspend_requested():
            if job.rank == 0:
                job.received()
                job.checkpoint(step, f"/nowhere/{step}", durable=True)
                print("saved step", step, flush=True)
                job.release(step)
            time.sleep(60)  # until its pod is stopped: rank 0 reports for all ranks
        time.sleep(STEP_SECONDS)
        if job.rank == 0:
            job.progress(step + 1, total_steps=steps)
            if (step + 1) % SAVE_STEPS == 0:
                job.checkpoint(step + 1, f"/nowhere/{step + 1}", durable=True)
    print("rank", job.rank, "counted to", steps, flush=True)


if __name__ == "__main__":
    main()
