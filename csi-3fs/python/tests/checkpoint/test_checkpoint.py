"""Saving and loading over a plain directory: round trips, damage, races, retention."""

import json
import math
import shutil
import subprocess
import sys
import threading
import zlib
from pathlib import Path

import pytest
from threefs.checkpoint import (
    CheckpointBusyError,
    CheckpointError,
    CheckpointManager,
    CheckpointNotFoundError,
    CheckpointSupersededError,
    LocalFiles,
    digest,
)
from threefs.checkpoint.checksum import ALGORITHM, checksum

FOLDER = "/ckpt/gpt"


@pytest.fixture
def files(tmp_path):
    return LocalFiles(tmp_path)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "ckpt" / "gpt"


def managers(files, world_size=1, attempt="a1", **options):
    return [
        CheckpointManager(files, FOLDER, rank, world_size, attempt=attempt, **options)
        for rank in range(world_size)
    ]


def save_all(ranks, step, state, **options):
    handles = [rank.save(step, state, **options) for rank in ranks]
    return [handle.wait(20) for handle in handles]


STATE = {
    "bytes": bytes(range(256)) * 40,
    "empty": b"",
    "numbers": {"one": 1, "half": 0.5, "nan": math.nan, "inf": -math.inf, "big": 2**70},
    "words": ["ü", "", None, True, False],
    "pair": (1, (2.5, [])),
    "keys": {0: "int", "0": "text", -1: b"x", "a/b": b"y"},
}


def same(left, right):
    if isinstance(left, float) and math.isnan(left):
        return isinstance(right, float) and math.isnan(right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        pairs = zip(left, right, strict=True)
        return type(left) is type(right) and all(same(one, other) for one, other in pairs)
    return type(left) is type(right) and left == right


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


def bad_shard(folder):
    (folder / "shard-0001.bin").write_bytes((folder / "shard-0001.bin").read_bytes()[:-1])


def longer_shard(folder):
    with (folder / "shard-0001.bin").open("ab") as file:
        file.write(b"x")


def missing_shard(folder):
    (folder / "shard-0000.bin").unlink()


def flipped_bit(folder):
    data = bytearray((folder / "shard-0001.bin").read_bytes())
    data[len(data) // 2] ^= 0x10
    (folder / "shard-0001.bin").write_bytes(data)


def torn_manifest(folder):
    data = (folder / "manifest.jsonl").read_bytes()
    (folder / "manifest.jsonl").write_bytes(data[: len(data) // 2])


def manifest_without_its_proof(folder):
    data = (folder / "manifest.jsonl").read_bytes()
    (folder / "manifest.jsonl").write_bytes(data.partition(b"\n")[0])


def altered_manifest(folder):
    data = (folder / "manifest.jsonl").read_bytes()
    (folder / "manifest.jsonl").write_bytes(data.replace(b'"world_size": 2', b'"world_size": 3'))


def missing_manifest(folder):
    (folder / "manifest.jsonl").unlink()


def empty_folder(folder):
    for path in folder.iterdir():
        path.unlink()


DAMAGES = [
    (bad_shard, "shard-0001.bin` has"),
    (longer_shard, "shard-0001.bin` has"),
    (missing_shard, "shard-0000.bin` is missing"),
    (flipped_bit, "wrong checksum"),
    (torn_manifest, "torn"),
    (manifest_without_its_proof, "torn"),
    (altered_manifest, "checksum is wrong"),
    (missing_manifest, "no manifest"),
    (empty_folder, "no manifest"),
]


@pytest.mark.parametrize(
    ("damage", "reason"), DAMAGES, ids=lambda value: getattr(value, "__name__", "")
)
def test_a_damaged_checkpoint_is_skipped_for_the_previous_one_and_reported(
    files, folder, caplog, damage, reason
):
    ranks = managers(files, 2)
    save_all(ranks, 1, {"x": b"1" * 10_000})
    save_all(ranks, 2, {"x": b"2" * 10_000})
    damage(folder / "step-00000002")
    for rank in ranks:
        loaded = rank.load()
        assert (loaded.step, loaded.state) == (1, {"x": b"1" * 10_000})
        (skipped,) = loaded.report.skipped
        assert skipped.path == f"{FOLDER}/step-00000002"
        assert reason in skipped.reason
    assert "step-00000002 is damaged" in caplog.text
    with pytest.raises(CheckpointNotFoundError, match=reason):
        ranks[0].load(2)
    damage(folder / "step-00000001")
    with pytest.raises(CheckpointNotFoundError, match="step-00000001"):
        ranks[0].load_latest()


@pytest.mark.parametrize("change", [
    lambda body: body["pieces"].pop(),
    lambda body: body["pieces"][0].update(length=1),
    lambda body: body["pieces"][0].update(shard="../../etc/passwd"),
    lambda body: body["pieces"][0].update(offset=-1),
    lambda body: body["entries"][0].update(length=2**62),
    lambda body: body["entries"][0].update(shape=[-1]),
    lambda body: body.update(tree={"kind": "leaf", "name": "unknown"}),
    lambda body: body.update(tree=[1]),
    lambda body: body.update(algorithm="md5"),
    lambda body: body.update(version=2),
    lambda body: body.update(entries=7),
])  # fmt: skip
def test_an_invalid_manifest_is_damage_even_with_a_valid_checksum(files, folder, change):
    (manager,) = managers(files)
    manager.save(1, {"x": b"1" * 100}).wait(20)
    manager.save(2, {"x": b"2" * 100}).wait(20)
    path = folder / "step-00000002" / "manifest.jsonl"
    body = json.loads(path.read_bytes().partition(b"\n")[0])
    change(body)
    text = json.dumps(body).encode()
    path.write_bytes(text + b'\n{"crc32": %d}\n' % zlib.crc32(text))
    assert manager.load().step == 1


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


def test_a_later_attempt_sweeps_files_of_an_earlier_one(files, folder):
    old = managers(files, 2, "a1", commit_seconds_max=0.01)
    save_all(managers(files, 2, "a0"), 1, {"x": b"1"})
    old[1].save(2, {"x": b"torn"})  # and rank 0 never came
    wait_for_threads()
    (folder / "trash.tmp-1234").mkdir()
    assert len(list(folder.iterdir())) == 3
    ranks = managers(files, 2, "a2")
    assert ranks[0].load().step == 1
    save_all(ranks, 2, {"x": b"2"})
    wait_for_threads()
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000001", "step-00000002"]


def attempt(files, monkeypatch, number, chain="job-1"):
    monkeypatch.setenv("FLYER_CHAIN", chain)
    monkeypatch.setenv("FLYER_ATTEMPT", str(number))
    return CheckpointManager(files, FOLDER)


def test_an_earlier_attempt_that_still_runs_commits_nothing(files, folder, monkeypatch):
    first = attempt(files, monkeypatch, 1)
    first.save(1, STATE).wait(10)
    second = attempt(files, monkeypatch, 2)
    first.save(2, STATE).wait(10)  # its successor has neither loaded nor saved yet
    assert second.load().step == 2
    # The successor continues from what it has loaded.
    with pytest.raises(CheckpointSupersededError, match="attempt 2 of this job has started"):
        first.save(3, STATE).wait(10)
    second.save(3, STATE).wait(10)
    with pytest.raises(CheckpointSupersededError, match="attempt 2 of this job has started"):
        first.save(4, STATE).wait(10)
    late = attempt(files, monkeypatch, 1)
    with pytest.raises(CheckpointSupersededError):
        late.save(5, STATE).wait(10)
    assert second.load().step == 3
    second.save(6, STATE).wait(10)
    assert second.load().step == 6
    assert not list(folder.glob("step-*.tmp-*"))
    assert [path.name for path in folder.glob("attempt-*")] == ["attempt-job_1-00000002"]


def test_a_read_only_folder_is_loaded_and_the_attempt_mark_is_retried(
    files, folder, monkeypatch, caplog
):
    attempt(files, monkeypatch, 1).save(1, STATE).wait(10)
    second = attempt(files, monkeypatch, 2)
    mkdir = type(files).mkdir

    def refused(self, path, **options):
        if "attempt-" in path:
            raise PermissionError(path)
        return mkdir(self, path, **options)

    with monkeypatch.context() as patched:
        patched.setattr(type(files), "mkdir", refused)
        assert second.load().step == 1
        assert "earlier attempts can still commit" in caplog.text
    second.save(2, STATE).wait(10)
    assert [path.name for path in folder.glob("attempt-*")] == ["attempt-job_1-00000002"]


def test_an_earlier_attempt_does_not_sweep_files_of_its_successor(files, folder, monkeypatch):
    attempt(files, monkeypatch, 1).save(1, STATE).wait(10)
    first = attempt(files, monkeypatch, 1)
    first.load()
    attempt(files, monkeypatch, 2).load()
    unfinished = folder / "step-00000002.tmp-job_1_2-1"
    unfinished.mkdir()
    for late in (first, attempt(files, monkeypatch, 1)):
        with pytest.raises(CheckpointSupersededError):
            late.save(2, STATE).wait(10)
        assert unfinished.exists()


def test_another_job_starts_with_its_first_attempt(files, monkeypatch):
    attempt(files, monkeypatch, 7).save(1, STATE).wait(10)
    attempt(files, monkeypatch, 1, chain="job-2").save(2, STATE).wait(10)
    assert attempt(files, monkeypatch, 2, chain="job-2").load().step == 2


def wait_for_threads():
    for thread in threading.enumerate():
        if thread.name.startswith("checkpoint-"):
            thread.join(10)


def test_two_concurrent_attempts_leave_only_complete_checkpoints(files, folder):
    for round_ in range(10):
        state = {name: {"x": name.encode() * 5000} for name in ("left", "right")}
        attempts = {
            name: managers(files, 2, f"{name}{round_}", commit_seconds_max=0.5) for name in state
        }
        start = threading.Barrier(4)
        handles = []

        def save(
            name, rank, round_=round_, start=start, attempts=attempts, handles=handles, state=state
        ):
            start.wait(10)
            handles.append(attempts[name][rank].save(round_, state[name]))

        threads = [
            threading.Thread(target=save, args=(name, rank)) for name in state for rank in (0, 1)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        wait_for_threads()
        kept = [handle for handle in handles if handle.durable]
        assert all(handle.done for handle in handles)
        if kept:
            loaded = managers(files)[0].load(round_)
            assert loaded.report.skipped == []
            assert loaded.state in state.values()
    assert managers(files)[0].latest() is not None


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
