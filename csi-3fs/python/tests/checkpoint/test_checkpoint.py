"""Saving and loading over a plain directory: round trips, retention and refusals."""

import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from threefs.checkpoint import (
    CheckpointBusyError,
    CheckpointError,
    CheckpointManager,
    CheckpointNotFoundError,
    digest,
)
from threefs.checkpoint.checksum import ALGORITHM, checksum

from .checkpoints import FOLDER, STATE, managers, same, save_all


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_every_kind_of_value_is_restored_on_every_rank(files, world_size):
    ranks = managers(files, world_size)
    assert save_all(ranks, 7, STATE) == [f"{FOLDER}/step-00000007"] * world_size
    for rank in ranks:
        loaded = rank.load()
        assert (loaded.step, loaded.report.skipped) == (7, [])
        assert same(STATE, loaded.state)
    assert ranks[0].latest() == 7


def test_a_checkpoint_of_four_ranks_loads_on_two(files):
    save_all(managers(files, 4), 1, STATE)
    assert all(same(STATE, rank.load().state) for rank in managers(files, 2))


def test_each_rank_writes_its_share(files):
    ranks = managers(files, 4)
    state = {"big": bytes(4_000_000), "small": b"x" * 100}
    handles = [rank.save(1, state) for rank in ranks]
    for handle in handles:
        handle.wait(20)
    sizes = [handle.bytes_written for handle in handles]
    assert sum(sizes) == 4_000_100
    assert max(sizes) - min(sizes) < 3 * 4096


def test_sharded_state_is_restored_to_its_rank_with_the_same_world_size_only(files):
    ranks = managers(files, 3)
    handles = [
        rank.save(1, {"shared": b"s"}, sharded={"mine": bytes([number]) * 5, "number": number})
        for number, rank in enumerate(ranks)
    ]
    for handle in handles:
        handle.wait(20)
    for number, rank in enumerate(ranks):
        loaded = rank.load()
        assert loaded.state == {"shared": b"s"}
        assert loaded.sharded == {"mine": bytes([number]) * 5, "number": number}
    with pytest.raises(CheckpointError, match="sharded state of 3 ranks, not of 2"):
        managers(files, 2)[0].load()


def test_the_snapshot_has_the_state_at_the_save(files):
    state = {"weights": bytearray(b"old" * 1000)}
    gate = threading.Event()
    original = files.batch_write
    files.batch_write = lambda writes: (gate.wait(10), original(writes))
    (manager,) = managers(files)
    handle = manager.save(1, state)
    state["weights"][:] = b"new" * 1000
    assert not handle.durable
    gate.set()
    handle.wait(20)
    assert manager.load().state["weights"] == b"old" * 1000


def test_the_newest_k_steps_are_kept(files, folder):
    ranks = managers(files, 2, keep=2)
    for step in (1, 2, 3, 4):
        save_all(ranks, step, {"x": bytes([step])})
    ranks[0].save(5, {"x": b"5"})
    ranks[1].save(5, {"x": b"5"}).wait(20)
    for thread in threading.enumerate():
        if thread.name.startswith("checkpoint-"):
            thread.join(10)
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000004", "step-00000005"]


def test_a_step_saved_again_replaces_the_old_one_which_is_removed_last(files, folder):
    (manager,) = managers(files)
    manager.save(4, {"x": b"first"}).wait(20)
    first = folder / "step-00000004"
    shutil.copytree(first, folder.parent / "kept")
    assert manager.save(4, {"x": b"second"}).wait(20) == f"{FOLDER}/step-00000004.2"
    assert manager.load().state == {"x": b"second"}
    # The clean-up ends, and is undone: so the old one is there, as it is until then.
    for thread in threading.enumerate():
        if thread.name.startswith("checkpoint-"):
            thread.join(10)
    assert not first.exists()
    shutil.copytree(folder.parent / "kept", first)
    (folder / "step-00000004.2" / "shard-0000.bin").write_bytes(b"secund")
    assert manager.load().state == {"x": b"first"}


def test_an_unavailable_server_is_an_error_and_no_older_checkpoint_is_loaded(files):
    (manager,) = managers(files)
    for step in (1, 2):
        manager.save(step, {"x": b"x"}).wait(20)

    def away(reads):
        raise TimeoutError("no answer")

    files.batch_read = away
    with pytest.raises(TimeoutError):
        manager.load()


def test_a_load_without_a_checkpoint_is_reported(files):
    (manager,) = managers(files)
    assert (manager.latest(), manager.load_latest()) == (None, None)
    with pytest.raises(CheckpointNotFoundError, match="no complete checkpoint"):
        manager.load()


def test_a_missing_rank_is_named_and_nothing_is_committed(files, folder):
    ranks = managers(files, 4, commit_seconds_max=0.2)
    handles = [rank.save(1, {"x": b"x" * 100}) for rank in ranks if rank._rank != 2]
    with pytest.raises(CheckpointError, match=r"no part of rank 2 after 0\.2 s"):
        handles[0].wait(20)
    for handle in handles[1:]:
        with pytest.raises(CheckpointError, match="gave this save up"):
            handle.wait(20)
    assert ranks[0].latest() is None
    assert list(folder.iterdir()) == []


def test_ranks_that_disagree_on_the_state_get_no_checkpoint(files):
    ranks = managers(files, 2, commit_seconds_max=0.3)
    handles = [rank.save(1, {"x": bytes(100 + rank._rank)}) for rank in ranks]
    with pytest.raises(CheckpointError, match="rank 1 has other tensors than rank 0"):
        handles[0].wait(20)
    assert ranks[0].latest() is None


def test_a_full_disk_is_reported_and_the_next_save_works(files):
    (manager,) = managers(files)
    original = files.batch_write

    def full(writes):
        raise OSError(28, "No space left on device")

    files.batch_write = full
    handle = manager.save(1, {"x": b"x"})
    with pytest.raises(CheckpointError, match="No space left"):
        handle.wait(20)
    assert not handle.durable
    files.batch_write = original
    manager.save(2, {"x": b"x"}).wait(20)
    assert manager.latest() == 2


def test_a_second_save_waits_for_the_first_for_a_limited_time(files):
    gate = threading.Event()
    original = files.batch_write
    files.batch_write = lambda writes: (gate.wait(10), original(writes))
    (manager,) = managers(files, busy_seconds_max=0.05)
    first = manager.save(1, {"x": b"1"})
    with pytest.raises(CheckpointBusyError, match="step 1 is still being written"):
        manager.save(2, {"x": b"2"})
    gate.set()
    first.wait(20)
    manager.save(3, {"x": b"3"}).wait(20)
    assert manager.load().state == {"x": b"3"}


def test_on_durable_runs_before_any_wait_returns_and_its_failure_is_only_logged(files):
    ranks = managers(files, 3)
    calls, gate = [], threading.Event()

    def on_durable(path):
        calls.append((path, ranks[0].latest()))
        gate.wait(10)
        raise RuntimeError("the scheduler is away")

    handles = [rank.save(9, {"x": b"x"}, on_durable=on_durable) for rank in ranks]
    for handle in handles:
        with pytest.raises(CheckpointError, match="not durable after"):
            handle.wait(0.1)
    gate.set()
    assert [handle.wait(20) for handle in handles] == [f"{FOLDER}/step-00000009"] * 3
    assert calls == [(f"{FOLDER}/step-00000009", 9)]


@pytest.mark.parametrize(
    ("state", "named"),
    [
        ({"a": {"b": object()}}, "`a/b` is a builtins.object"),
        ({"a": {1.5: 1}}, "`a` has the key 1.5"),
        ({"a": {1, 2}}, "`a` is a builtins.set"),
    ],
)
def test_unsupported_values_are_named_before_anything_is_written(files, folder, state, named):
    with pytest.raises(CheckpointError, match=named):
        managers(files)[0].save(1, state)
    assert not folder.exists()


def test_bad_arguments_are_named(files, monkeypatch):
    with pytest.raises(CheckpointError, match="rank 2"):
        CheckpointManager(files, FOLDER, 2, 2, attempt="a")
    with pytest.raises(CheckpointError, match="keep is 0"):
        CheckpointManager(files, FOLDER, keep=0)
    with pytest.raises(CheckpointError, match="attempt"):
        CheckpointManager(files, FOLDER, attempt="../x")
    for name in ("FLYER_CHAIN", "FLYER_ATTEMPT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(CheckpointError, match="pass `attempt`"):
        CheckpointManager(files, FOLDER, 0, 2)
    with pytest.raises(CheckpointError, match="step is -1"):
        managers(files)[0].save(-1, {})


def test_both_checksums_match_their_specifications():
    assert checksum("crc32c", b"123456789") == 0xE3069283
    assert checksum("crc32", b"123456789") == 0xCBF43926
    from threefs.checkpoint.checksum import _crc32c_slow

    assert _crc32c_slow(b"123456789") == 0xE3069283
    assert ALGORITHM in ("crc32c", "crc32")


def test_equal_digests_mean_equal_states():
    assert digest({"x": b"1", "y": 1}) == digest({"x": b"1"}, y=1)
    states = [{"x": b"1"}, {"x": b"2"}, {"y": b"1"}, {"x": b"1", "z": 0.1}, {"x": b"1", "z": 0.2}]
    assert len({digest(state) for state in states}) == len(states)


def test_a_path_cannot_leave_the_folder(files, tmp_path):
    files.write_file("/../../inside.txt", b"x")
    assert (tmp_path / "inside.txt").read_bytes() == b"x"
    assert Path(tmp_path).parent.joinpath("inside.txt").exists() is False


def test_a_process_exits_after_its_checkpoint_is_saved(files, tmp_path):
    script = f"""
from threefs.checkpoint import CheckpointManager, LocalFiles
import time
class Slow(LocalFiles):
    def batch_write(self, writes):
        time.sleep(0.3)
        super().batch_write(writes)
CheckpointManager(Slow({str(tmp_path)!r}), {FOLDER!r}).save(1, {{"x": b"x"}})
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    assert managers(files)[0].latest() == 1


def test_a_part_is_written_although_the_folder_is_renamed_at_once(files, folder, monkeypatch):
    """Rank 0 may commit as soon as it sees the last part, before its writer has synced."""
    files.mkdir("/ckpt/gpt/unfinished", parents=True)
    replace = Path.replace

    def replace_and_commit(self, target):
        replace(self, target)
        Path.rename(target.parent, folder / "final")

    monkeypatch.setattr(Path, "replace", replace_and_commit)
    files.write_file("/ckpt/gpt/unfinished/part", b"1")
    assert (folder / "final" / "part").read_bytes() == b"1"
