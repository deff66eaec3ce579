"""DCP's writer and reader in one process: damage, wrong models, names, concurrent saves."""

import pickle
import re
import threading
from pathlib import Path

import pytest
from threefs.checkpoint import (
    CheckpointBusyError,
    CheckpointError,
    CheckpointManager,
    CheckpointNotFoundError,
    LocalFiles,
)

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]

import torch.distributed.checkpoint as dcp  # noqa: E402  after importorskip
from threefs.checkpoint.distributed import (  # noqa: E402
    ThreeFSReader,
    ThreeFSWriter,
    latest_checkpoint,
)
from threefs.checkpoint.distributed import folder as folder_module  # noqa: E402
from threefs.checkpoint.distributed import writer as writer_module  # noqa: E402
from torch.distributed.checkpoint import CheckpointException  # noqa: E402

ID = "/ckpt/gpt/step-1"


def make_state(seed=1):
    generator = torch.Generator().manual_seed(seed)
    return {"a": torch.randn(700, 1000, generator=generator), "b": torch.ones(3), "step": seed}


def save(files, seed=1, path=ID, **options):
    dcp.save(make_state(seed), checkpoint_id=path, storage_writer=ThreeFSWriter(files, **options))


def load(files, path=ID, state=None):
    state = state if state is not None else make_state(1000)
    dcp.load(state, checkpoint_id=path, storage_reader=ThreeFSReader(files))
    return state


def is_state(state, seed):
    expected = make_state(seed)
    tensors = all(torch.equal(state[name], expected[name]) for name in ("a", "b"))
    return tensors and state["step"] == seed


def shard_of(folder):
    (shard,) = (folder / "step-1").glob("shard-*")
    return shard


def flip(path, offset):
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_a_flipped_bit_is_reported_with_its_file_and_bytes(files, folder):
    save(files)
    flip(shard_of(folder), 1_500_000)
    name = shard_of(folder).name
    message = f"/step-1/{name}: wrong checksum of bytes 1048576 to 2097152, part of `a`"
    with pytest.raises(CheckpointException, match=message):
        load(files)
    assert "b" in load(files, state={"b": torch.zeros(3)})  # the rest is whole


def test_a_flipped_bit_of_an_object_is_reported(files, folder):
    save(files)
    flip(shard_of(folder), shard_of(folder).stat().st_size - 1)
    with pytest.raises(CheckpointException, match=r"wrong checksum of bytes .* part of `step`"):
        load(files)


def test_a_short_or_missing_shard_is_reported(files, folder):
    save(files)
    shard = shard_of(folder)
    with shard.open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(CheckpointException, match=f"{shard.name} ends at byte 1000, inside of `a`"):
        load(files)
    shard.unlink()
    with pytest.raises(CheckpointException, match=f"/ckpt/gpt/step-1/{shard.name} is missing"):
        load(files)


def test_any_flipped_byte_of_the_manifest_is_damage(files, folder):
    save(files)
    manifest = folder / "step-1" / "manifest.dcp"
    data = manifest.read_bytes()
    for offset in [0, 20, 60, 300, len(data) // 2, len(data) - 1]:
        flip(manifest, offset)
        with pytest.raises(CheckpointException, match=r"step-1/manifest.dcp: the manifest"):
            load(files)
        with pytest.raises(CheckpointNotFoundError, match=r"step-1: the manifest.* start anew"):
            latest_checkpoint(files, "/ckpt/gpt")
        manifest.write_bytes(data)
    assert is_state(load(files), 1)


def test_the_latest_checkpoint_is_one_that_a_load_finds(files, folder, monkeypatch):
    """A replaced checkpoint is still there, and the one that replaced it is damaged."""
    save(files, 5, "/ckpt/gpt/step-0")
    save(files, 6)
    with monkeypatch.context() as patch:
        patch.setattr(folder_module.Save, "_clean", lambda *_: None)
        save(files, 7)
    assert latest_checkpoint(files, "/ckpt/gpt") == ID
    flip(folder / "step-1@2" / "manifest.dcp", 300)
    latest = latest_checkpoint(files, "/ckpt/gpt")
    assert latest == "/ckpt/gpt/step-0"
    assert is_state(load(files, latest), 5)


def test_a_checkpoint_of_another_model_is_named(files):
    save(files)
    with pytest.raises(CheckpointException, match="Missing key in checkpoint state_dict: other"):
        load(files, state={"other": torch.zeros(3)})
    with pytest.raises(CheckpointException, match=r"Size mismatch .*\[3\].*\[4\].* for b"):
        load(files, state={"b": torch.zeros(4)})
    message = "no complete checkpoint /ckpt/gpt/step-2; the last ones in /ckpt/gpt are step-1"
    with pytest.raises(CheckpointException, match=message):
        load(files, "/ckpt/gpt/step-2")


def test_another_dtype_and_strides_are_converted(files):
    save(files)
    state = {"a": torch.zeros(1000, 700, dtype=torch.float64).T}
    assert torch.equal(load(files, state=state)["a"], make_state(1)["a"].double())


def test_a_save_with_the_same_id_replaces_the_checkpoint(files, folder):
    for seed in (1, 2, 3):
        save(files, seed)
        assert is_state(load(files), seed)
    assert [path.name for path in folder.iterdir()] == ["step-1@3"]


def test_a_folder_of_another_writer_is_not_replaced(files, folder):
    dcp.save(make_state(), checkpoint_id=folder / "step-1", storage_writer=None)
    with pytest.raises(CheckpointException, match="step-1 exists and was not written by Three"):
        save(files)
    assert (folder / "step-1" / ".metadata").exists()
    (folder / "step-2").mkdir()  # empty, as training scripts make it
    save(files, path="/ckpt/gpt/step-2")
    assert is_state(load(files, "/ckpt/gpt/step-2"), 1)


@pytest.mark.parametrize(
    "path",
    ["", "/", "/x", "/a/b@2", "/a/../b", "/a/b.saving-1", "/a/x.tmp-1", "/a/attempt-x-00000001"],
)
def test_an_invalid_id_is_refused(files, path):
    assert not ThreeFSWriter.validate_checkpoint_id(path)
    with pytest.raises(CheckpointException, match=r"invalid checkpoint_id .* or have the form att"):
        save(files, path=path)


def test_saves_of_single_ranks_are_refused(files):
    with pytest.raises(CheckpointError, match="use_collectives=False is not supported"):
        dcp.save(
            make_state(), checkpoint_id=ID, storage_writer=ThreeFSWriter(files),
            use_collectives=False,
        )  # fmt: skip


def test_keep_removes_the_checkpoints_that_were_committed_first(files, folder):
    for step in (5, 9, 2, 3):
        save(files, step, f"/ckpt/gpt/step-{step}", keep=2)
    assert sorted(path.name for path in folder.iterdir()) == ["step-2", "step-3"]
    with pytest.raises(CheckpointError, match="keep is 0"):
        ThreeFSWriter(files, keep=0)


def test_a_save_finishes_the_removal_that_a_dead_process_started(files, folder, monkeypatch):
    save(files)
    with monkeypatch.context() as patch:
        patch.setattr(files, "rmtree", lambda *_args, **_options: None)  # dies after the rename
        save(files, 2)
    assert len(list(folder.glob("trash.tmp-*/manifest.dcp"))) == 1
    save(files, path="/ckpt/gpt/step-2")
    assert sorted(path.name for path in folder.iterdir()) == ["step-1@2", "step-2"]


def test_an_abandoned_timeline_never_wins(files, monkeypatch):
    """The last commit is the latest, not the highest step, and an earlier attempt commits none."""
    monkeypatch.setenv("FLYER_CHAIN", "job")
    monkeypatch.setenv("FLYER_ATTEMPT", "1")
    save(files, 50, "/ckpt/gpt/step-50")
    monkeypatch.setenv("FLYER_ATTEMPT", "2")
    save(files, 30, "/ckpt/gpt/step-30")
    assert latest_checkpoint(files, "/ckpt/gpt") == "/ckpt/gpt/step-30"
    monkeypatch.setenv("FLYER_ATTEMPT", "1")
    with pytest.raises(CheckpointException, match="attempt 2 of this job has started"):
        save(files, 60, "/ckpt/gpt/step-60")
    assert latest_checkpoint(files, "ckpt/gpt/") == "/ckpt/gpt/step-30"
    assert sorted(files.listdir("/ckpt/gpt")) == ["attempt-job-00000002", "step-30", "step-50"]


def test_a_later_attempt_removes_unfinished_saves_of_an_earlier_one(files, folder, monkeypatch):
    monkeypatch.setenv("FLYER_CHAIN", "job")
    monkeypatch.setenv("FLYER_ATTEMPT", "3")
    for name in ("job.2", "job.4", "other.1"):
        (folder / f"step-7.saving-{name}.0123456789ab").mkdir(parents=True)
    save(files)
    names = [path.name for path in folder.glob("*.saving-*")]
    assert sorted(name.split("-")[2] for name in names) == [
        "job.4.0123456789ab",
        "other.1.0123456789ab",
    ]


class BlockedFiles(LocalFiles):
    """Writes wait for an event."""

    def __init__(self, root):
        super().__init__(root)
        self.may_write = threading.Event()
        self.writes = threading.Event()

    def batch_write(self, writes):
        self.writes.set()
        assert self.may_write.wait(20)
        super().batch_write(writes)


@pytest.fixture
def blocked(tmp_path):
    files = BlockedFiles(tmp_path)
    yield files
    files.may_write.set()


def test_training_continues_while_an_asynchronous_save_is_written(blocked):
    state = make_state(1)
    future = dcp.async_save(state, checkpoint_id=ID, storage_writer=ThreeFSWriter(blocked))
    assert blocked.writes.wait(20)
    state["a"].zero_()  # the next step
    assert latest_checkpoint(blocked, "/ckpt/gpt") is None
    blocked.may_write.set()
    future.result(20)
    assert is_state(load(blocked), 1)


def test_the_next_asynchronous_save_waits_for_the_previous_one(blocked):
    writer = ThreeFSWriter(blocked, busy_seconds_max=0.05)
    first = dcp.async_save(make_state(1), checkpoint_id=ID, storage_writer=writer)
    with pytest.raises(CheckpointBusyError, match="still being written after"):
        dcp.async_save(make_state(2), checkpoint_id=f"{ID}0", storage_writer=writer)
    blocked.may_write.set()
    first.result(20)
    second = dcp.async_save(make_state(2), checkpoint_id=f"{ID}0", storage_writer=writer)
    second.result(20)
    assert is_state(load(blocked), 1)
    assert is_state(load(blocked, f"{ID}0"), 2)


def test_a_save_in_between_does_not_end_the_wait_for_the_asynchronous_one(files, monkeypatch):
    """The thread of the asynchronous save starts later than a save by the training thread."""
    writer = ThreeFSWriter(files, busy_seconds_max=0.05)
    training, may_start, original = threading.current_thread(), threading.Event(), writer.reset

    def reset(checkpoint_id=None):
        assert threading.current_thread() is training or may_start.wait(20)
        original(checkpoint_id)

    monkeypatch.setattr(writer, "reset", reset)
    first = dcp.async_save(make_state(1), checkpoint_id=ID, storage_writer=writer)
    try:
        dcp.save(make_state(2), checkpoint_id=f"{ID}0", storage_writer=writer)
        with pytest.raises(CheckpointBusyError, match="still being written after"):
            dcp.async_save(make_state(3), checkpoint_id=f"{ID}1", storage_writer=writer)
    finally:
        may_start.set()
    first.result(20)
    assert is_state(load(files), 1)
    dcp.async_save(make_state(4), checkpoint_id=f"{ID}1", storage_writer=writer).result(20)
    assert is_state(load(files, f"{ID}1"), 4)


def test_two_saves_of_one_id_at_once_are_refused(blocked):
    first = dcp.async_save(make_state(1), checkpoint_id=ID, storage_writer=ThreeFSWriter(blocked))
    assert blocked.writes.wait(20)
    with pytest.raises(CheckpointException, match="step-1 is still being written by this process"):
        save(blocked, 2)
    blocked.may_write.set()
    first.result(20)
    save(blocked, 3)
    assert is_state(load(blocked), 3)


@pytest.fixture
def other_process(monkeypatch):
    """A save by another process, as far as the writer can see."""

    def save_elsewhere(files, seed):
        with monkeypatch.context() as patch:
            patch.setattr(folder_module, "process_key", lambda: "0123456789ab")
            patch.setattr(writer_module, "_saves", {})
            save(files, seed)

    return save_elsewhere


def test_a_save_of_the_same_id_by_another_process_supersedes_this_one(
    blocked, tmp_path, other_process
):
    first = dcp.async_save(make_state(1), checkpoint_id=ID, storage_writer=ThreeFSWriter(blocked))
    assert blocked.writes.wait(20)
    other_process(LocalFiles(tmp_path), 2)
    blocked.may_write.set()
    with pytest.raises(CheckpointException, match="removed by a later save of /ckpt/gpt/step-1"):
        first.result(20)
    assert is_state(load(blocked), 2)
    assert blocked.listdir("/ckpt/gpt") == ["step-1"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("finish", "another process has started a save of /ckpt/gpt/step-1"),
        ("_rename", "another process has committed /ckpt/gpt/step-1 since this save started"),
    ],
)
def test_a_save_that_another_process_overtakes_commits_nothing(
    files, monkeypatch, other_process, call, message
):
    """Before the commit, and between the start of the commit and the rename."""
    owner = ThreeFSWriter if call == "finish" else folder_module.Save
    original = getattr(owner, call)

    def overtaken(self, *args, **options):
        monkeypatch.setattr(owner, call, original)
        other_process(files, 2)
        return original(self, *args, **options)

    monkeypatch.setattr(owner, call, overtaken)
    with pytest.raises(CheckpointException, match=message):
        save(files, 1)
    assert is_state(load(files), 2)
    assert files.listdir("/ckpt/gpt") == ["step-1"]


def test_a_failed_save_is_repeated(files, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(files, "batch_write", full)
        with pytest.raises(CheckpointException, match="No space left"):
            save(files, 1)
        with pytest.raises(CheckpointException, match="No space left"):
            save(files, 1, "/ckpt/gpt/step-2")
    save(files, 1)
    assert files.listdir("/ckpt/gpt") == ["step-1"]


def test_both_kinds_of_checkpoints_share_a_folder(files):
    """The manager neither loads, counts nor removes checkpoints of DCP, and vice versa."""
    path = "/ckpt/gpt/step-00000007"
    save(files, 7, path)
    manager = CheckpointManager(files, "/ckpt/gpt", attempt="a", keep=1)
    assert manager.latest() is None
    assert manager.load_latest() is None
    for step in (3, 4):
        manager.save(step, {"x": b"1"}).wait(10)
    save(files, 8, "/ckpt/gpt/step-8", keep=2)
    assert manager.latest() == 4
    assert manager.load().step == 4
    assert is_state(load(files, path), 7)
    assert latest_checkpoint(files, "/ckpt/gpt") == "/ckpt/gpt/step-8"


def test_a_client_is_not_sent_to_another_process(files):
    path = pickle.loads(pickle.dumps(ThreeFSWriter("/run/cluster.json", ID)))
    assert path.checkpoint_id == ID
    pickle.loads(pickle.dumps(ThreeFSWriter(files)))
    with pytest.raises(CheckpointError, match="give ThreeFSWriter the path of"):
        pickle.dumps(ThreeFSWriter(object()))


def test_the_example_of_checkpoints_md_runs(cluster, monkeypatch):
    page = Path(__file__).resolve().parents[4] / "docs" / "concepts" / "checkpoints.md"
    blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    (example,) = [block for block in blocks if "ThreeFSWriter" in block]
    monkeypatch.setenv("THREEFS_CLUSTER", str(cluster.file))
    state = make_state(1)
    for run in range(2):  # the second one loads what the first one has saved
        trained = []
        exec(example, {"state": state, "steps": 5, "train": trained.append})
        assert trained == list(range(5)), run
        state["a"].zero_()
    with cluster.client() as client:
        assert latest_checkpoint(client, "/ckpt/gpt") == "/ckpt/gpt/step-4"
        assert len([name for name in client.listdir("/ckpt/gpt") if "step" in name]) == 3
        assert is_state(load(client, "/ckpt/gpt/step-4"), 1)
        client.rmtree("/ckpt")
