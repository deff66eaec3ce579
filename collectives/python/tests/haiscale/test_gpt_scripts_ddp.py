"""haiscale.ddp's names of training scripts, and checkpoints that a suspended job continues from."""

import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
import torch.distributed as dist
from haiscale.ddp import CheckpointError, DistributedDataParallel, init_checkpoint, saving
from hfreduce.testing import Layout, run, values
from torch.optim.lr_scheduler import ConstantLR

sys.path.insert(0, str(Path(__file__).parent))
import gpt_scripts as gpts

pytestmark = [pytest.mark.torch, pytest.mark.timeout(200, func_only=True)]

STEPS = 4


def on_ranks(function, ranks, *arguments):
    return values(run(function, Layout.one_node(ranks), *arguments))


class SuspendedError(Exception):
    """In place of the end of the process."""


def suspends_at(step):
    """HAI's module in a job that is asked to suspend in a step."""
    asked = {"calls": 0}

    def receive_suspend_command():
        asked["calls"] += 1
        return asked["calls"] > step

    def go_suspend():
        raise SuspendedError

    sys.modules["hfai"] = ModuleType("hfai")
    client = sys.modules["hfai.client"] = ModuleType("hfai.client")
    client.receive_suspend_command, client.go_suspend = receive_suspend_command, go_suspend


def script(rank, size, path):
    """Trains until the end or the suspension; returns the losses and the parameters."""
    torch.manual_seed(1)
    model = gpts.GPT(seed=7 + rank)
    model = DistributedDataParallel(model, device_ids=[0], process_group=dist.group.WORLD)
    optimizer = gpts.optimizer_of(model)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    _, start, others = init_checkpoint(model, optimizer, scheduler, ckpt_path=path)
    history = list(others or [])
    try:
        for step in range(start, STEPS):
            tokens = gpts.batch(step, rank, size)
            loss = gpts.Loss()(model(tokens), tokens)
            optimizer.zero_grad()
            loss.backward()
            gpts.clip(model.parameters())
            optimizer.step()
            scheduler.step()
            dist.all_reduce(loss)
            history.append(loss.item() / size)
            model.try_save(0, step + 1, others=history)
        with torch.no_grad():
            tokens = gpts.batch(100)
            validation = gpts.Loss()(model.eval()(tokens), tokens).item()
    except SuspendedError:
        validation = "suspended"
    model.reducer.stop()
    dist.barrier()
    return history, validation, gpts.plain(model.module.state_dict()), scheduler.last_epoch


def trains(rank, size, path, suspends):
    if not suspends:
        return script(rank, size, path)
    suspends_at(2)
    first = script(rank, size, path)
    assert first[1] == "suspended"
    assert len(first[0]) == 3
    suspends_at(STEPS)
    return script(rank, size, path)


@pytest.mark.parametrize("suspends", [False, True])
def test_replicas_train_as_one_process_and_resume_after_a_suspension(suspends, tmp_path):
    losses, validation, expected = gpts.reference(STEPS, size=2)
    for history, own, state, scheduled in on_ranks(trains, 2, tmp_path / "latest.pt", suspends):
        assert history == pytest.approx(losses, abs=1e-4)
        assert own == pytest.approx(validation, abs=1e-4)
        assert not gpts.differences(state, expected)
        assert scheduled == STEPS
    assert [each.name for each in tmp_path.iterdir()] == (["latest.pt"] if suspends else [])


def forces(rank, size, path):
    model = DistributedDataParallel(gpts.GPT())
    with pytest.raises(CheckpointError, match=r"call haiscale.ddp.init_checkpoint"):
        model.try_save(0, 1)
    optimizer = gpts.optimizer_of(model)
    first = init_checkpoint(model, optimizer, ckpt_path=str(path))
    model.try_save(3, 5, others=(0.5, torch.ones(2)), force=True)
    epoch, step, (best, extra) = init_checkpoint(model, optimizer, ckpt_path=path)
    return first, (epoch, step, best, extra.tolist())


def test_a_forced_checkpoint_is_there_for_every_rank(tmp_path):
    expected = ((0, 0, None), (3, 5, 0.5, [1.0, 1.0]))
    assert on_ranks(forces, 2, tmp_path / "latest.pt") == [expected] * 2


def stages(rank, size, folder):
    """Two stages on two nodes: the request is known on the first node alone."""
    suspends_at(1 if rank < 2 else STEPS)
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    stage = rank // 2
    model = DistributedDataParallel(torch.nn.Linear(2, 2), process_group=groups[stage])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path = folder / f"stage{stage}.pt"
    init_checkpoint(model, optimizer, ckpt_path=path)
    for step in range(STEPS):
        try:
            model.try_save(0, step)
        except SuspendedError:
            return step, sorted(each.name for each in folder.iterdir())
    return None


def test_all_stages_of_a_pipeline_are_saved_before_the_job_is_suspended(tmp_path):
    layout = Layout((("a0", "A"), ("a1", "A")), 2)
    expected = (1, ["stage0.pt", "stage1.pt"])
    assert values(run(stages, layout, tmp_path)) == [expected] * 4


def small():
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def keeps(rank, size, path):
    others = {"best": np.float64(0.5), "loss": np.arange(3), "args": Namespace(lr=1), "at": path}
    model, optimizer = small()
    init_checkpoint(model, optimizer, ckpt_path=path)
    model.try_save(1, 2, others=others, force=rank == 0)  # the first rank decides
    _, step, found = init_checkpoint(model, optimizer, ckpt_path=path)
    return step, found["best"], found["loss"].tolist(), found["args"], found["at"]


def test_other_values_of_any_type_are_loaded_again(tmp_path):
    path = tmp_path / "latest.pt"
    assert on_ranks(keeps, 2, path) == [(2, 0.5, [0, 1, 2], Namespace(lr=1), path)] * 2


def fails(rank, size, kind, folder):
    model, optimizer = small()
    if kind == "directory":
        init_checkpoint(model, optimizer, ckpt_path=folder / "none" / "latest.pt")
    if kind == "client" and rank == 0:
        suspends_at(STEPS)
        del sys.modules["hfai.client"].receive_suspend_command
    if kind in {"groups", "client"}:
        groups = [dist.new_group([each]) for each in range(size)]
        model = DistributedDataParallel(torch.nn.Linear(2, 2), process_group=groups[rank])
        path = folder / f"{rank if kind == 'client' else 0}.pt"
        init_checkpoint(model, optimizer, ckpt_path=path)
        model.try_save(3, 5)
    if kind == "one rank":
        if rank == 0:
            model.checkpoint = saving.Checkpoint(folder / "latest.pt", {})
            saving._BOUND[folder / "latest.pt"] = model.checkpoint
        model.try_save(3, 5, force=True)
    if kind == "scheduler":
        path = folder / "latest.pt"
        init_checkpoint(model, optimizer, ckpt_path=path)
        model.try_save(3, 5, force=True)
        init_checkpoint(model, optimizer, ConstantLR(optimizer), ckpt_path=path)
    if kind == "content":
        path = folder / f"{rank}.pt"
        path.write_bytes(b"no file of torch" if rank else b"")
        if rank == 0:
            path.unlink()
        init_checkpoint(model, optimizer, ckpt_path=path)
    path = folder / f"node{rank if kind == 'local' else 0}.pt"
    init_checkpoint(model, optimizer, ckpt_path=path)
    model.try_save(3, 5, others=(lambda: None) if kind == "others" else None, force=True)
    init_checkpoint(model, optimizer, ckpt_path=path)


@pytest.mark.parametrize(
    ("kind", "words", "files"),
    [
        ("directory", "none: create it first", []),
        ("content", "1.pt on rank 1: ", ["1.pt"]),
        ("groups", "0.pt is the file of ranks [0] and of ranks [1]: use a different", []),
        ("client", "try_save on rank 0: AttributeError(", []),
        ("one rank", "try_save on rank 1: ValueError('the model has no checkpoint: call", []),
        ("scheduler", "the file has no scheduler: pass the path of", ["latest.pt"]),
        ("local", "node1.pt, rank 0 has epoch 3, step 5 at ", ["node0.pt"]),
        ("others", "node0.pt on rank 0: ", []),
    ],
)
def test_a_rank_that_cannot_save_or_load_fails_on_every_rank(kind, words, files, tmp_path):
    for outcome in run(fails, Layout.one_node(2), kind, tmp_path):
        assert outcome.failure is not None, outcome
        assert outcome.failure.type == "CheckpointError", outcome
        assert words in outcome.failure.text
    assert [each.name for each in tmp_path.iterdir()] == files


def partly_loads(rank, size, path):
    """A file whose first parameter fits and whose second does not."""
    model, optimizer = small()
    init_checkpoint(model, optimizer, ckpt_path=path)
    other = DistributedDataParallel(torch.nn.Linear(2, 2, bias=False))
    init_checkpoint(other, torch.optim.SGD(other.parameters()), ckpt_path=path)
    other.try_save(3, 5, force=True)
    before = path.read_bytes()
    errors = []
    for call in (
        lambda: init_checkpoint(model, optimizer, ckpt_path=path),
        lambda: model.try_save(3, 6, force=True),
    ):
        with pytest.raises(CheckpointError) as caught:
            call()
        errors.append(str(caught.value))
    return errors, before == path.read_bytes()


def test_a_model_that_is_loaded_partly_is_not_saved(tmp_path):
    for (loading, saving_), same in on_ranks(partly_loads, 2, tmp_path / "latest.pt"):
        assert "Missing key" in loading
        assert "the model has no checkpoint" in saving_
        assert same


def shares(rank, size, path):
    """Two models with one file: the later one has it."""
    first, optimizer = small()
    init_checkpoint(first, optimizer, ckpt_path=path)
    second, other = small()
    init_checkpoint(second, other, ckpt_path=path)
    second.try_save(3, 5, force=True)
    with pytest.raises(CheckpointError) as caught:
        first.try_save(3, 6, force=True)
    return str(caught.value), init_checkpoint(second, other, ckpt_path=path)


def test_a_file_of_a_later_wrapper_is_not_replaced(tmp_path):
    path = tmp_path / "latest.pt"
    path.with_name("latest.pt.tmp").write_bytes(b"a part, of a process that was killed")
    for error, found in on_ranks(shares, 2, path):
        assert "latest.pt is the file of another wrapper" in error
        assert found == (3, 5, None)
    assert [each.name for each in tmp_path.iterdir()] == ["latest.pt"]


def looks(rank, size, path):
    """A step in flight, and try_save without a request."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = DistributedDataParallel(model, optimizer=optimizer)
    init_checkpoint(model, optimizer, ckpt_path=path)
    waits = []
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    model.reducer.synchronize = lambda: waits.append("try_save")
    model.reducer.in_flight.append(None)  # one at least, whatever has landed
    model.reducer.on_change(True)
    model.try_save(0, 1)
    return waits


def test_a_save_without_a_request_waits_for_no_step(tmp_path):
    assert on_ranks(looks, 2, tmp_path / "latest.pt") == [[]] * 2


def test_a_broken_client_is_not_taken_for_a_missing_one(tmp_path, monkeypatch):
    assert saving._client() is None
    (tmp_path / "hfai").mkdir()
    (tmp_path / "hfai" / "client.py").write_text("import dependency_of_hfai\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="dependency_of_hfai"):
        saving._client()
    monkeypatch.delitem(sys.modules, "hfai")
