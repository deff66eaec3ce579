"""haiscale.fsdp: memory, reads of gradients, exceptions, models that differ, and state by name."""

import sys
from copy import deepcopy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from haiscale.ddp import DistributedDataParallel
from haiscale.fsdp import ModelMismatchError, fully_shard, overlap
from hfreduce.testing import Layout, run, values
from threefs.checkpoint import LocalFiles
from threefs.checkpoint.distributed import ThreeFSReader, ThreeFSWriter
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parent))
import sharding
import training

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300, func_only=True)]

FOUR = Layout.one_node(4)
NODES = Layout.two_zones(1, 2)
STABLE = {"HFREDUCE_DETERMINISM": "stable"}


def on(layout, function, *arguments):
    return values(run(function, layout, *arguments, environment=STABLE, deadline_seconds=200))


def step(model, optimizer, number):
    optimizer.zero_grad()
    training.loss_of(model, training.tokens_of(number, dist.get_rank())).backward()
    optimizer.step()


def shards_without_a_mesh(rank, size):
    layer = fully_shard(nn.Linear(8, 8))
    layer(torch.ones(2, 8)).sum().backward()
    return layer.weight.device_mesh.device_type, layer.weight.grad.full_tensor().unique().tolist()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="the default is the accelerator")
def test_without_a_mesh_all_ranks_are_shards_on_the_cpu():
    assert on(FOUR, shards_without_a_mesh) == [("cpu", [2.0])] * 4


def state_of_a_module(rank, size):
    layer = fully_shard(nn.Linear(8, 8))
    return fully_shard.state(layer) is torch_fully_shard.state(layer)


def test_scripts_that_replace_the_import_find_the_state_of_a_module():
    assert on(FOUR, state_of_a_module) == [True] * 4


# Memory


def takes_memory_once(rank, size, replicas, lazy):
    """Blocks after each step, and what a kept gradient holds at the end."""
    with sharding.lazily() if lazy else sharding.contextlib.nullcontext():
        model, optimizer, reducer = sharding.build("overlap", replicas=replicas)
        blocks = []
        for number in range(6):
            step(model, optimizer, number)
            if number == 3:
                with torch.no_grad():
                    model(training.tokens_of(9, rank)[:, :-1])  # an evaluation takes nothing, too
            blocks.append(reducer.communication_blocks)
        reducer.synchronize()
        shares = [p.to_local().numel() for p in model.parameters()]
        elements = sum(p.numel() for p in model.parameters())
        return blocks, reducer.communication_bytes, sum(shares), elements


@pytest.mark.parametrize("lazy", [False, True])
def test_communication_memory_is_taken_once(lazy):
    for layout, replicas in ((FOUR, 1), (NODES, 2)):
        for found in on(layout, takes_memory_once, replicas, lazy):
            blocks, size_bytes, share, all_elements = found
            assert blocks[0] > 0
            assert len(set(blocks[1:])) == 1, (replicas, blocks)
            assert share <= all_elements * replicas / 4 + 400  # what does not divide
            # At most 3 blocks for each of two sizes of groups, and the shards of the gradients.
            assert size_bytes < 4 * (3 * all_elements + all_elements * replicas / 4), size_bytes


def keeps_a_gradient(rank, size):
    """The script's reference to a gradient is not written by later steps."""
    model, optimizer, reducer = sharding.build("overlap")
    kept = []
    for number in range(4):
        optimizer.zero_grad()
        training.loss_of(model, training.tokens_of(number, rank)).backward()
        if number == 1:
            gradients = [p.grad for p in model.parameters()]  # waits
            kept = [(each, each.to_local().clone()) for each in gradients if each is not None]
        optimizer.step()
    reducer.synchronize()
    return len(kept), all(torch.equal(each.to_local(), copy) for each, copy in kept)


def test_a_kept_gradient_keeps_its_memory():
    for count, same in on(FOUR, keeps_a_gradient):
        assert count > 20
        assert same


# Groups


def shares_a_group(rank, size):
    """The script's allreduce starts before those of the gradients, or after them."""
    mesh = sharding.mesh_of(2)
    model, optimizer, reducer = sharding.build("overlap", mesh=mesh)
    step(model, optimizer, 0)
    if is_late := mesh.get_local_rank("dp") == 0:
        reducer.synchronize()
    total = torch.tensor([rank])
    work = dist.all_reduce(total, group=mesh.get_group("dp"), async_op=True)
    if not is_late:
        reducer.synchronize()
    work.wait()
    return total.item()


def test_a_script_may_use_the_group_of_the_replicas():
    """As layers of experts do, whose shards may be on the ranks of the replicas."""
    assert on(FOUR, shares_a_group) == [2, 4, 2, 4]


# Reading


def reads(rank, size):
    model, optimizer, reducer = sharding.build("overlap")
    held = list(nn.Module.parameters(model))
    training.loss_of(model, training.tokens_of(0, rank)).backward()
    assert len(reducer.in_flight) == 5
    hidden = all(bool(p.grad.to_local().isnan().all()) for p in held)
    with pytest.raises(RuntimeError, match="single memory location"):
        model.embed.weight.grad.to_local().mul_(2)
    still = len(reducer.in_flight) == 5
    list(model.parameters())
    revealed = all(bool(p.grad.to_local().isfinite().all()) for p in held)
    optimizer.step()
    whole = reducer.whole_step
    optimizer.zero_grad()
    training.loss_of(model, training.tokens_of(1, rank)).backward()
    optimizer.step()
    in_state = {name: sharding.whole(value) for name, value in model.state_dict().items()}
    after = {name: sharding.whole(p) for name, p in model.named_parameters()}
    same = all(torch.equal(in_state[name], value) for name, value in after.items())
    return hidden, still, revealed, whole, same, reducer.whole_step, len(reducer.in_flight)


def test_gradients_in_flight_are_hidden_until_they_are_read():
    for hidden, still, revealed, whole, same, later, in_flight in on(FOUR, reads):
        assert hidden
        assert still
        assert revealed
        assert whole == "GradientsRead"
        assert same
        assert later is None
        assert in_flight == 0


def evaluates(rank, size):
    """A pass without gradients after a step has the stepped parameters, prefetches included."""
    outputs = {}
    for kind in ("torch", "overlap"):
        model, optimizer, _ = sharding.build(kind, extra="unused")
        found = []
        for number in range(4):
            step(model, optimizer, number)
            with torch.inference_mode() if number == 0 else torch.no_grad():
                found.append(model(training.tokens_of(7, 0)[:, :-1]).clone())
                if number == 2:  # a block by itself, which another pass has prefetched
                    found.append(model(training.tokens_of(8, 0)[:, :-1]))
        outputs[kind] = training.digest(found)
    return outputs


def test_evaluation_sees_the_last_step():
    for outputs in on(FOUR, evaluates):
        assert outputs["overlap"] == outputs["torch"]


def evaluates_before_the_step(rank, size):
    """Modules that an evaluation left gathered do not keep the parameters of before the step."""
    digests = []
    for evaluates in (False, True):
        model, optimizer, _ = sharding.build("overlap")
        for number in range(4):
            optimizer.zero_grad()
            training.loss_of(model, training.tokens_of(number, rank)).backward()
            if evaluates:
                with torch.no_grad():
                    model(training.tokens_of(7, rank)[:, :-1])
            optimizer.step()
        digests.append(training.digest(*sharding.state_of(model, optimizer)))
    return digests


def test_an_evaluation_before_the_step_does_not_change_training():
    for without, with_evaluation in on(Layout.one_node(2), evaluates_before_the_step):
        assert with_evaluation == without


# Exceptions


class BrokenError(Exception):
    pass


def resumes(rank, size, where, resets):
    """Every rank raises once in its third step, resets, and repeats the step."""
    model, optimizer, reducer = sharding.build("overlap")
    expected, expected_optimizer, _ = sharding.build("torch")
    raises = False

    def hook(*_):
        if raises:
            raise BrokenError

    model.blocks[1].register_forward_pre_hook(lambda *_: hook() if where == "forward" else None)
    model.blocks[1].gate.register_full_backward_hook(
        lambda *_: hook() if where == "backward" else None
    )
    refused = None
    for number in range(5):
        raises = number == 2
        try:
            step(model, optimizer, number)
        except BrokenError:
            raises = False
            if resets:
                model.reset_iter_state()
            elif where == "backward":
                with pytest.raises(RuntimeError) as error:
                    step(model, optimizer, number)
                refused = str(error.value)
                model.reset_iter_state()
            step(model, optimizer, number)
        step(expected, expected_optimizer, number)
    pairs = ((model, optimizer), (expected, expected_optimizer))
    states = [sharding.state_of(*pair) for pair in pairs]
    return [training.digest(*state) for state in states], refused, reducer.whole_step


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_training_resumes_after_an_exception(where):
    for (ours, expected), _, whole in on(FOUR, resumes, where, True):
        assert ours == expected
        assert whole is None


def test_a_pass_after_a_failed_one_requires_a_reset():
    for (ours, expected), refused, _ in on(FOUR, resumes, "backward", False):
        assert "call reset_iter_state()" in refused
        assert ours == expected


# Models


def differs(rank, size, how, replicas):
    model = sharding.Net(layers=3 if how == "fewer layers" and rank == 1 else 4)
    if how == "other size" and rank == 1:
        model.blocks[2].gate = nn.Linear(sharding.WIDTH, 100)
    if how == "frozen" and rank == 1:
        model.blocks[3].requires_grad_(False)
    options = {"reshard_after_forward": not (how == "other option" and rank == 1)}
    try:
        sharding.shard(model, fully_shard, sharding.mesh_of(replicas), **options)
    except ModelMismatchError as error:
        return error.rank, error.name, str(error)
    return None


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(
    ("how", "name"),
    [
        ("fewer layers", "settings"), ("other size", "gate.weight"), ("frozen", "norm.weight"),
        ("other option", "settings"),
    ],
)  # fmt: skip
def test_a_rank_with_another_model_is_named_on_every_rank(how, name, replicas):
    found = on(FOUR, differs, how, replicas)
    for each in found:
        assert each is not None
        assert each[0] == 1
        assert each[1] == name
        assert "on rank 1" in each[2]
        assert "build the same model on every rank" in each[2]
    assert len(set(found)) == 1


def refuses(rank, size):
    model = sharding.Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"haiscale\.fsdp\.fully_shard") as error:
        overlap(model, optimizer)
    sharding.shard(model, fully_shard, sharding.mesh_of())
    with pytest.raises(ValueError, match="make the optimizer after fully_shard"):
        overlap(model, optimizer)
    with pytest.raises(ValueError, match=r"not a root of haiscale\.fsdp"):
        overlap(model.blocks, optimizer)
    return str(error.value)


def test_overlap_needs_the_root():
    assert "Net is not a root" in on(Layout.one_node(2), refuses)[0]


# State


def named_state(model, optimizer):
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def exchanges(rank, size, folder):
    """FSDP's state is loaded by DDP, and back, whole and through a checkpoint on 3FS."""
    torch.manual_seed(rank)
    options = StateDictOptions(full_state_dict=True)
    sharded, sharded_optimizer, _ = sharding.build("overlap")
    step(sharded, sharded_optimizer, 0)
    # torch hands out and loads `step` without a copy: two optimizers would count in one tensor.
    state, optimizer_state = deepcopy(get_state_dict(sharded, sharded_optimizer, options=options))
    whole = all(not isinstance(value, DTensor) for value in state.values())
    plain = sharding.Net()
    optimizer = training.OPTIMIZERS["adamw"](sharding.groups_of(plain))
    set_state_dict(plain, optimizer, model_state_dict=state, optim_state_dict=optimizer_state,
                   options=options)  # fmt: skip
    ddp = DistributedDataParallel(plain, optimizer=optimizer)
    step(ddp, optimizer, 1)
    step(sharded, sharded_optimizer, 1)
    same = [training.digest(*sharding.state_of(ddp, optimizer))]
    same.append(training.digest(*sharding.state_of(sharded, sharded_optimizer)))
    # Back, through storage: each rank writes and reads its shards.
    step(ddp, optimizer, 2)
    step(sharded, sharded_optimizer, 2)
    files = LocalFiles(folder)
    states = named_state(sharded, sharded_optimizer)
    dcp.save(states, storage_writer=ThreeFSWriter(files, "/run/3"))
    other, other_optimizer, _ = sharding.build("overlap", replicas=2)
    states = named_state(other, other_optimizer)
    dcp.load(states, storage_reader=ThreeFSReader(files, "/run/3"))
    set_state_dict(other, other_optimizer, model_state_dict=states["model"],
                   optim_state_dict=states["optimizer"])  # fmt: skip
    restored = [training.digest(*sharding.state_of(ddp, optimizer))]
    restored.append(training.digest(*sharding.state_of(other, other_optimizer)))
    step(ddp, optimizer, 3)
    step(other, other_optimizer, 3)
    continued = [training.digest(*sharding.state_of(ddp, optimizer))]
    continued.append(training.digest(*sharding.state_of(other, other_optimizer)))
    return whole, same, restored, continued, sorted(state)


def test_state_has_whole_names_and_moves_between_ddp_fsdp_and_hsdp(tmp_path):
    expected = sorted(name for name, _ in sharding.Net().state_dict().items())
    for whole, same, restored, continued, names in on(NODES, exchanges, str(tmp_path)):
        assert names == expected
        assert whole
        for pair in (same, restored, continued):
            assert len(set(pair)) == 1, (same, restored, continued)
