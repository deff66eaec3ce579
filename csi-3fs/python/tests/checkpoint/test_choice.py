"""All ranks continue from one checkpoint: rank 0 chooses, the others follow or fail."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
from threefs.checkpoint import CheckpointError, CheckpointManager, LocalFiles

if TYPE_CHECKING:
    from pathlib import Path

FOLDER = "/c"


def ranks_of(files: Any, attempt: str, world_size: int = 3, **more: Any) -> list[CheckpointManager]:
    return [
        CheckpointManager(files, FOLDER, rank, world_size, attempt=attempt, **more)
        for rank in range(world_size)
    ]


def save(ranks: list[CheckpointManager], step: int, value: bytes) -> None:
    own = [{"mine": value * (rank + 1) * 5000} for rank in range(len(ranks))]
    state = {"x": value * 10_000}
    handles = [
        rank.save(step, state, sharded=shards) for rank, shards in zip(ranks, own, strict=True)
    ]
    for handle in handles:
        handle.wait(20)


def load_at_once(ranks: list[CheckpointManager]) -> list[Any]:
    results: list[Any] = [None] * len(ranks)

    def run(number: int) -> None:
        try:
            results[number] = ranks[number].load()
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(ranks))]
    for thread in reversed(threads):
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damaged", [0, 1, 2])
def test_damage_of_one_ranks_state_makes_all_ranks_load_the_previous_checkpoint(
    tmp_path: Path, damaged: int
) -> None:
    ranks = ranks_of(LocalFiles(tmp_path), "a")
    save(ranks, 1, b"1")
    save(ranks, 2, b"2")
    flip(tmp_path / f"c/step-00000002/shard-000{damaged}.bin", -1)
    loaded = load_at_once(ranks_of(LocalFiles(tmp_path), "b"))
    assert [result.step for result in loaded] == [1, 1, 1]
    assert [result.sharded["mine"][:1] for result in loaded] == [b"1"] * 3
    assert all(len(result.report.skipped) == 1 for result in loaded)


def test_a_rank_that_cannot_read_the_choice_fails_and_loads_no_other(tmp_path: Path) -> None:
    ranks = ranks_of(LocalFiles(tmp_path), "a")
    save(ranks, 1, b"1")
    save(ranks, 2, b"2")
    new = ranks_of(LocalFiles(tmp_path), "b")
    assert new[0].load().step == 2
    flip(tmp_path / "c/step-00000002/shard-0001.bin", -1)
    with pytest.raises(CheckpointError, match="wrong checksum"):
        new[1].load()
    assert new[2].load().step == 2


def test_a_concurrent_commit_does_not_split_the_ranks(tmp_path: Path) -> None:
    ranks = ranks_of(LocalFiles(tmp_path), "a")
    save(ranks, 1, b"1")
    new = ranks_of(LocalFiles(tmp_path), "b")
    assert new[0].load().step == 1
    save(ranks, 2, b"2")
    assert [rank.load().step for rank in new[1:]] == [1, 1]


def test_ranks_wait_for_the_choice_until_their_timeout(tmp_path: Path) -> None:
    ranks = ranks_of(LocalFiles(tmp_path), "a", load_seconds_max=0.05)
    save(ranks, 1, b"1")
    with pytest.raises(CheckpointError, match=r"rank 0 has not chosen .* after 0.05 s"):
        ranks[1].load()


def test_the_absence_of_a_checkpoint_is_also_a_choice(tmp_path: Path) -> None:
    ranks = ranks_of(LocalFiles(tmp_path), "a")
    assert ranks[0].load_latest() is None
    save(ranks_of(LocalFiles(tmp_path), "a"), 1, b"1")
    assert [rank.load_latest() for rank in ranks[1:]] == [None, None]


def test_the_error_of_rank_0_is_reported_on_every_rank(tmp_path: Path) -> None:
    ranks = ranks_of(LocalFiles(tmp_path), "a")
    save(ranks, 1, b"1")

    class UnavailableFiles(LocalFiles):
        def batch_read(self, reads: Any) -> list[bytes]:
            raise TimeoutError("no answer")

    with pytest.raises(TimeoutError):
        CheckpointManager(UnavailableFiles(tmp_path), FOLDER, 0, 3, attempt="b").load()
    with pytest.raises(CheckpointError, match="no answer"):
        CheckpointManager(LocalFiles(tmp_path), FOLDER, 1, 3, attempt="b").load()


def test_after_a_rollback_the_newer_commits_are_loaded_and_kept(tmp_path: Path) -> None:
    files = LocalFiles(tmp_path)
    (old,) = ranks_of(files, "a", 1, keep=2)
    for step in (10, 20, 30):
        old.save(step, {"x": b"old"}).wait(20)
    (new,) = ranks_of(files, "b", 1, keep=2)
    assert new.load(20).step == 20
    new.save(25, {"x": b"new"}).wait(20)
    assert new.latest() == 25
    assert new.load().state == {"x": b"new"}
    new.save(28, {"x": b"new"}).wait(20)
    new.save(29, {"x": b"new"}).wait(20)  # a commit waits for the removals of the previous one
    names = {path.name for path in (tmp_path / "c").glob("step-*")}
    assert {"step-00000028", "step-00000029"} <= names
    assert not names & {"step-00000020", "step-00000030"}, (
        "checkpoints of the abandoned timeline are removed"
    )


def test_files_of_a_load_are_removed_by_the_next_attempt(tmp_path: Path) -> None:
    ranks = ranks_of(LocalFiles(tmp_path), "a")
    save(ranks, 1, b"1")
    assert [result.step for result in load_at_once(ranks)] == [1, 1, 1]
    assert list((tmp_path / "c").glob("load.tmp-a-*"))
    save(ranks_of(LocalFiles(tmp_path), "b"), 2, b"2")
    assert not list((tmp_path / "c").glob("load.tmp-a-*"))


def test_choices_are_removed_with_the_next_commit(tmp_path: Path) -> None:
    ranks = ranks_of(LocalFiles(tmp_path), "a")
    save(ranks, 1, b"1")
    assert [result.step for result in load_at_once(ranks)] == [1, 1, 1]
    assert list((tmp_path / "c").glob("load.tmp-a-*"))
    save(ranks, 2, b"2")
    ranks[0]._finish()
    for thread in threading.enumerate():
        if thread.name.startswith("checkpoint-"):
            thread.join(20)
    assert not list((tmp_path / "c").glob("load.tmp-a-*"))
