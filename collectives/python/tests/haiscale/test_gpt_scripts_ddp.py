"""haiscale.ddp's names of training scripts, and checkpoints that a suspended job continues from."""

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from haiscale.ddp import DistributedDataParallel, init_checkpoint
from hfreduce.testing import Layout, run, values

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
    with pytest.raises(RuntimeError, match=r"call haiscale.ddp.init_checkpoint"):
        model.try_save(0, 1)
    optimizer = gpts.optimizer_of(model)
    first = init_checkpoint(model, optimizer, ckpt_path=str(path))
    model.try_save(3, 5, others=(0.5, torch.ones(2)), force=True)
    epoch, step, (best, extra) = init_checkpoint(model, optimizer, ckpt_path=path)
    return first, (epoch, step, best, extra.tolist())


def test_a_forced_checkpoint_is_there_for_every_rank(tmp_path):
    expected = ((0, 0, None), (3, 5, 0.5, [1.0, 1.0]))
    assert on_ranks(forces, 2, tmp_path / "latest.pt") == [expected] * 2
