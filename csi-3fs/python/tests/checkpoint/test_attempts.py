"""Attempts of one job that run at the same time: only the last one commits."""

import threading

import pytest
from threefs.checkpoint import CheckpointManager, CheckpointSupersededError

from .checkpoints import FOLDER, STATE, managers, save_all, wait_for_threads


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
        durable = [handle for handle in handles if handle.durable]
        assert all(handle.done for handle in handles)
        if durable:
            loaded = managers(files)[0].load(round_)
            assert loaded.report.skipped == []
            assert loaded.state in state.values()
    assert managers(files)[0].latest() is not None
