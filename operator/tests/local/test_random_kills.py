"""Random kills: the job completes every step, and no process remains."""

from __future__ import annotations

import os
import random
import signal
from contextlib import suppress
from pathlib import Path

import pytest
from flyer.client import FlyerError

KILLS = 6


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, *(pytest.param(n, marks=pytest.mark.soak) for n in (2, 3, 4))])
def test_random_kills(bench, seed):
    print(f"repeat with: pytest {__file__} -k 'test_random_kills[{seed}]' -m slow")
    choose = random.Random(seed)
    manifest = bench.manifest(steps=60, pause=0.03, save_every=7, spec__nodes=4)
    driver = bench.drive(manifest, nodeReturnSeconds=1)
    for kill in range(KILLS):
        if driver.poll() is not None:
            break
        # a moment after the job got a little further, so that the kills fall on different steps
        with suppress(FlyerError, AssertionError):
            bench.step("job", 6 * kill + choose.randrange(1, 6))
        target = choose.choice(["driver", "driver", "term", "node", "rank", "fork-server"])
        if target in ("driver", "term"):
            driver.send_signal(signal.SIGKILL if target == "driver" else signal.SIGTERM)
            driver.wait(20)
            bench.until("every process gone", lambda: not bench.survivors())
            driver = bench.drive(manifest, nodeReturnSeconds=1)
        else:
            _kill_in_a_node(bench, target, choose)
    assert bench.ended(driver) == 0, bench.err()
    steps = {
        line.text for line in bench.client_on_disk().logs("job", rank=0) if "step " in line.text
    }
    assert {f"step {number}" for number in range(1, 61)} <= steps


def _kill_in_a_node(bench, target, choose):
    with suppress(FlyerError, OSError):
        busy = [node for node in bench.client().nodes() if node.pids]
        if not busy:
            return
        node = choose.choice(busy)
        pids = {"node": node.pids, "rank": node.pids[1:][:1], "fork-server": []}[target]
        if target == "fork-server":
            stat = Path(f"/proc/{node.supervisor_pid}/stat").read_text()
            pids = [int(stat.rpartition(")")[2].split()[1])]
        for pid in pids:
            if pid > 1:
                os.kill(pid, signal.SIGKILL)
