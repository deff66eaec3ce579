"""kill -9 of a real saving process at random moments: what loads is always a whole checkpoint.

Each process kills itself at a random file operation: before it, after it or, for writes, with half
of the bytes written. A failure prints the seed and the kill that repeat it.
"""

import os
import random
import signal
import subprocess
import sys
import threading
import traceback
from pathlib import Path

import pytest
from threefs.checkpoint import CheckpointManager, LocalFiles

KILLS = 60
OPERATIONS_MAX = 60


class DyingFiles(LocalFiles):
    """Kills its process at the n-th change that it makes."""

    def __init__(self, root, chance):
        super().__init__(root)
        self._left = chance.randrange(OPERATIONS_MAX)
        self._when = chance.choice(["before", "torn", "after"])
        self._lock = threading.Lock()

    def _count(self, act, torn=None):
        with self._lock:  # one change at a time: the seed determines the operation
            self._left -= 1
            dies = self._left < 0
            if dies and self._when == "torn" and torn is not None:
                torn()
            if dies and self._when != "after":
                os.kill(os.getpid(), signal.SIGKILL)
            act()
            if dies:
                os.kill(os.getpid(), signal.SIGKILL)

    def mkdir(self, path, **options):
        self._count(lambda: super(DyingFiles, self).mkdir(path, **options))

    def rename(self, source, destination):
        self._count(lambda: super(DyingFiles, self).rename(source, destination))

    def rmtree(self, path, **options):
        def torn():
            local = self._local(path)
            for file in sorted(local.iterdir())[::2]:
                file.unlink()

        self._count(lambda: super(DyingFiles, self).rmtree(path, **options), torn)

    def write_file(self, path, data):
        def torn():  # LocalFiles never leaves half a file; other file systems may
            self._local(path).write_bytes(data[: len(data) // 2])

        self._count(lambda: super(DyingFiles, self).write_file(path, data), torn)

    def batch_write(self, writes):
        halves = [(path, offset, data[: len(data) // 2]) for path, offset, data in writes]
        self._count(
            lambda: super(DyingFiles, self).batch_write(writes),
            lambda: super(DyingFiles, self).batch_write(halves),
        )


def state_of(step):
    return {"step": step, "x": [bytes([step % 256, part]) * 6000 for part in range(5)]}


def run_saver(folder, world_size, attempt, chance):
    """Save step after step, all ranks in this process, until killed."""
    os.fsync = lambda _: None  # SIGKILL does not lose the page cache: skipped for speed
    files = DyingFiles(folder, chance)
    ranks = [
        CheckpointManager(files, "/c", rank, world_size, attempt=attempt, keep=2)
        for rank in range(world_size)
    ]
    loaded = ranks[0].load_latest()
    step = loaded.step if loaded else 0
    while True:
        step += 1
        for handle in [rank.save(step, state_of(step)) for rank in ranks]:
            path = handle.wait(20)
        (folder / "durable.partial").write_text(f"{step} {path}")
        (folder / "durable.partial").rename(folder / "durable")


def fork_server(folder, seed):
    """Forks a saver for each number that it reads and reports how it ended.

    Single-threaded: a child forked from pytest would inherit locks that other threads hold and
    wait for them forever.
    """
    for line in sys.stdin:
        kill = int(line)
        pid = os.fork()
        if pid == 0:
            try:
                run_saver(folder, 1 + kill % 3, f"a{kill}", random.Random(f"{seed} {kill}"))
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        print(os.waitpid(pid, 0)[1], flush=True)


@pytest.fixture
def killed_saver(tmp_path):
    seed = os.environ.get("CHECKPOINT_SEED", "1")
    with subprocess.Popen(
        [sys.executable, __file__, str(tmp_path), seed],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
    ) as process:  # fmt: skip

        def run(kill):
            repeat = f"CHECKPOINT_SEED={seed}, kill {kill}"
            process.stdin.write(f"{kill}\n")
            status = process.stdout.readline().strip()
            assert status == str(int(signal.SIGKILL)), f"the saver failed by itself: {repeat}"
            return repeat

        yield run


def test_after_any_kill_the_last_durable_checkpoint_or_a_newer_one_loads(tmp_path, killed_saver):
    newest = 0
    for kill in range(KILLS):
        repeat = killed_saver(kill)
        newest = max(newest, told_durable(tmp_path))
        manager = CheckpointManager(LocalFiles(tmp_path), "/c", attempt="reader")
        if newest:
            loaded = manager.load()
            assert loaded.report.skipped == [], repeat
            assert loaded.step >= newest, repeat
            assert loaded.state == state_of(loaded.step), repeat
            newest = loaded.step
    assert newest > KILLS, "the savers hardly got anything done"
    assert len(list((tmp_path / "c").iterdir())) < 10, "leftovers pile up"


def told_durable(folder):
    path = folder / "durable"
    return int(path.read_text().split()[0]) if path.exists() else 0


if __name__ == "__main__":
    fork_server(Path(sys.argv[1]), sys.argv[2])
