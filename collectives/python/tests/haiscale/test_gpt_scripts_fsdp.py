"""haiscale.fsdp's names of training scripts: a wrapper, policies of torch, and whole parameters."""

import contextlib
import inspect
import io
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from haiscale.fsdp import BackwardPrefetch, FullyShardedDataParallel, collectives, wrapper
from haiscale.unsupported import UnsupportedArgumentError
from hfreduce.testing import Layout, run, values
from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy

sys.path.insert(0, str(Path(__file__).parent))
import gpt_scripts as gpts

pytestmark = [pytest.mark.torch, pytest.mark.timeout(200, func_only=True)]

STEPS = 4
POLICY = partial(size_based_auto_wrap_policy, min_num_params=16_000)


def on_ranks(function, ranks, *arguments):
    return values(run(function, Layout.one_node(ranks), *arguments))


def wrapped(**options):
    """A model with other first values on each rank: those of rank 0 are used."""
    model = gpts.GPT(seed=7 + dist.get_rank())
    return FullyShardedDataParallel(model, auto_wrap_policy=POLICY, **options)


def steps_of(model, optimizer, steps):
    rank, size = dist.get_rank(), dist.get_world_size()
    history = []
    for step in steps:
        model.train()
        tokens = gpts.batch(step, rank, size)
        loss = gpts.Loss()(model(tokens), tokens)
        loss.backward()
        gpts.clip(model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss)
        history.append(loss.item() / size)
    return history


def trains(rank, size, resumes):
    """A script: trains, saves on rank 0 and, if it resumes, continues in a new model."""
    file, half = io.BytesIO(), STEPS // 2
    model = wrapped(backward_prefetch=BackwardPrefetch.BACKWARD_POST)
    optimizer = gpts.optimizer_of(model)
    history = steps_of(model, optimizer, range(half))
    if resumes:
        with model.summon_full_params():
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            if rank == 0:
                torch.save(state, file)
        content = [file.getvalue()]
        dist.broadcast_object_list(content, 0)
        state = torch.load(io.BytesIO(content[0]), map_location="cpu")
        model = wrapped()
        optimizer = gpts.optimizer_of(model)
        with model.summon_full_params():
            model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    history += steps_of(model, optimizer, range(half, STEPS))
    with torch.no_grad():
        tokens = gpts.batch(100)
        validation = gpts.Loss()(model.eval()(tokens), tokens).item()
    held = sum(p.to_local().numel() for p in model.parameters())
    with model.summon_full_params():
        names = [name for name, _ in model.named_parameters()]
        state = gpts.plain({k: v.clone() for k, v in model.module.state_dict().items()})
    return history, validation, state, held, names


@pytest.mark.parametrize("resumes", [False, True])
def test_shards_train_as_one_process_and_resume_from_the_first_ranks_file(resumes):
    losses, validation, expected = gpts.reference(STEPS, size=2)
    everything = sum(p.numel() for p in gpts.GPT().parameters())
    outcomes = on_ranks(trains, 2, resumes)
    assert sum(held for *_, held, _ in outcomes) == everything
    for history, own, state, held, names in outcomes:
        assert history == pytest.approx(losses, abs=1e-4)
        assert own == pytest.approx(validation, abs=1e-4)
        assert state.keys() == expected.keys()
        assert not gpts.differences(state, expected)
        assert held < 0.51 * everything
        assert names == [f"module.{name}" for name, _ in gpts.GPT().named_parameters()]


def resumed(rank, size):
    """The whole state of an optimizer, and what a second one has of it after load and step."""
    model = wrapped()
    optimizer = gpts.optimizer_of(model)
    steps_of(model, optimizer, range(2))
    before = {
        number: {name: value.clone() for name, value in values.items()}
        for number, values in optimizer.state_dict()["state"].items()
    }
    with model.summon_full_params():
        whole = optimizer.state_dict()
    kinds = {type(value).__name__ for each in whole["state"].values() for value in each.values()}
    content = [whole]
    dist.broadcast_object_list(content, 0)
    optimizer.load_state_dict(content[0])
    after = optimizer.state_dict()["state"]
    same = [
        torch.equal(_local(after[number][name]), _local(value))
        and type(after[number][name]) is type(value)
        for number, values in before.items()
        for name, value in values.items()
    ]
    return sorted(kinds), all(same), len(same)


def _local(value):
    return value.to_local() if hasattr(value, "to_local") else value


def test_the_first_rank_saves_whole_states_and_every_rank_loads_its_part():
    first, other = on_ranks(resumed, 2)
    count = 3 * len(list(gpts.GPT().parameters()))
    assert first == (["Tensor"], True, count)
    assert other == (["DTensor", "Tensor"], True, count)


def writes(rank, size):
    model = wrapped()
    with contextlib.suppress(ZeroDivisionError), model.summon_full_params():
        for number, parameter in enumerate(model.parameters()):
            torch.nn.init.constant_(parameter, number)
        raise ZeroDivisionError  # what was written stays
    return [bool((p.full_tensor() == number).all()) for number, p in enumerate(model.parameters())]


def test_what_is_written_inside_stays():
    for found in on_ranks(writes, 2):
        assert all(found)
        assert len(found) == len(list(gpts.GPT().parameters()))


def orders(rank, size, prefetch):
    """Gathers and scatters of backward, in the order of their start."""
    model = FullyShardedDataParallel(
        gpts.GPT(), auto_wrap_policy=ModuleWrapPolicy({gpts.Block}), backward_prefetch=prefetch
    )
    optimizer = gpts.optimizer_of(model)
    steps_of(model, optimizer, range(1))
    log = []

    def logged(letter, call):
        def start(*args, **kwargs):
            log.append(letter)
            return call(*args, **kwargs)

        return start

    collectives.Gather.__call__ = logged("g", collectives.Gather.__call__)
    collectives.Scatter.__call__ = logged("s", collectives.Scatter.__call__)
    tokens = gpts.batch(0)
    loss = gpts.Loss()(model(tokens), tokens)
    log.clear()
    loss.backward()
    return "".join(log)


@pytest.mark.parametrize(
    ("prefetch", "expected"),
    [(BackwardPrefetch.BACKWARD_PRE, "gsgsgsss"), (BackwardPrefetch.BACKWARD_POST, "sgsgsgss"),
     (None, "sgsgsgss")],
)  # fmt: skip
def test_backward_gathers_the_next_module_before_or_after_the_gradients(prefetch, expected):
    assert on_ranks(orders, 2, prefetch) == [expected] * 2


def misuses(rank, size, kind):
    model = gpts.GPT()
    if kind == "mixed precision":
        FullyShardedDataParallel(model, mixed_precision=torch.bfloat16)
    elif kind == "policy":
        FullyShardedDataParallel(model, auto_wrap_policy={gpts.Block})
    elif kind == "prefetch":
        FullyShardedDataParallel(model, backward_prefetch="post")
    elif kind == "groups":
        FullyShardedDataParallel(model, (dist.group.WORLD, dist.group.WORLD))
    elif kind == "other":
        FullyShardedDataParallel(model, limit_all_gathers=True)
    elif kind == "unknown":
        FullyShardedDataParallel(model, flatten=True)
    elif kind == "summon":
        FullyShardedDataParallel(model).summon_full_params(writeback=True, rank0_only=True)
    else:
        sharded = FullyShardedDataParallel(model)
        with sharded.summon_full_params():
            if kind == "forward":
                sharded(gpts.batch(0))
            elif kind == "twice":
                with sharded.summon_full_params():
                    pass


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        ("mixed precision", "UnsupportedArgumentError", "mixed_precision=torch.bfloat16: call ha"),
        ("policy", "UnsupportedArgumentError", "auto_wrap_policy={"),
        ("prefetch", "UnsupportedArgumentError", "backward_prefetch='post': pass a Backward"),
        ("groups", "UnsupportedArgumentError", "process_group=(<"),
        ("unknown", "UnsupportedArgumentError", "flatten=True: leave it out"),
        ("summon", "UnsupportedArgumentError", "rank0_only=True: leave it out, and save on one"),
        ("other", "UnsupportedArgumentError", "limit_all_gathers=True: leave it out"),
        ("forward", "FullParametersError", "a forward pass inside summon_full_params"),
        ("twice", "FullParametersError", "summon_full_params is active"),
    ],
)
def test_misuse_is_refused_on_every_rank(kind, error, words):
    for outcome in run(misuses, Layout.one_node(2), kind):
        assert outcome.failure is not None, outcome
        assert outcome.failure.type == error, outcome
        assert words in outcome.failure.text


OTHERS = {
    "sharding_strategy": (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD),
    "cpu_offload": (CPUOffload(),),
    "mixed_precision": (MixedPrecision(),),
    "ignored_modules": ([],),
    "ignored_states": ([],),
    "param_init_fn": (len,),
    "device_id": (0,),
    "sync_module_states": (False,),
    "use_orig_params": (False, 1),
    "forward_prefetch": (False,),
    "limit_all_gathers": (True, False),
    "device_mesh": ((2,),),
}


def test_every_argument_of_torchs_class_has_a_remedy_or_is_satisfied():
    """Refused before the module or the ranks are used."""
    known = {"module", "process_group", "auto_wrap_policy", "backward_prefetch"}
    assert {*inspect.signature(TorchFullyShardedDataParallel).parameters} - known == {*OTHERS}
    assert {*wrapper.REMEDIES} == {*OTHERS}
    summon = inspect.signature(TorchFullyShardedDataParallel.summon_full_params).parameters
    assert {*summon} - {"module"} == {*wrapper.SUMMON_REMEDIES}
    assert {n: (p.default,) for n, p in summon.items() if n != "module"} == wrapper.SUMMON_SATISFIED
    for name, refused in OTHERS.items():
        for value in refused:
            with pytest.raises(UnsupportedArgumentError) as caught:
                FullyShardedDataParallel(gpts.GPT(), **{name: value})
            assert f" {name}=" in str(caught.value)
            assert str(caught.value).endswith(f": {wrapper.REMEDIES[name]}")


def accumulates(rank, size):
    """Two batches for each step, and a norm that scales."""
    satisfied = {name: values[-1] for name, values in wrapper.SATISFIED.items()}
    model = wrapped(**satisfied)
    optimizer = gpts.optimizer_of(model)
    norms, scattered = [], []
    scatter = collectives.Scatter.__call__

    def counted(*args, **kwargs):
        scattered[-1] += 1
        return scatter(*args, **kwargs)

    collectives.Scatter.__call__ = counted
    for step in range(2):
        first, second = gpts.batch(step, rank, size, 2 * gpts.ROWS).chunk(2)
        criterion = gpts.Loss(chunks=2)
        scattered.append(0)
        with contextlib.suppress(ZeroDivisionError), model.no_sync():
            criterion(model(first), first).backward()
            raise ZeroDivisionError  # it ends the context
        scattered.append(0)
        criterion(model(second), second).backward()
        norms.append(model.clip_grad_norm_(gpts.MAX_NORM))
        optimizer.step()
        optimizer.zero_grad()
    with model.summon_full_params(recurse=True, rank0_only=False):
        state = gpts.plain({k: v.clone() for k, v in model.module.state_dict().items()})
    return [(type(n).__name__, n.item()) for n in norms], scattered, state


def test_gradients_accumulate_without_collectives_and_are_clipped_by_the_whole_norm():
    model = gpts.GPT()
    optimizer = gpts.optimizer_of(model)
    norms = []
    for step in range(2):
        tokens = gpts.batch(step, rows=4 * gpts.ROWS)
        gpts.Loss()(model(tokens), tokens).backward()
        norms.append(gpts.clip(model.parameters()).item())
        optimizer.step()
        optimizer.zero_grad()
    for own, (first, all_of_first, *later), state in on_ranks(accumulates, 2):
        assert own == [("Tensor", pytest.approx(norm, abs=1e-4)) for norm in norms]
        assert first == later[0] == 0
        assert all_of_first == later[1] > 1
        assert not gpts.differences(state, gpts.plain(model.state_dict()))


def satisfies(rank, size):
    model = wrapped(**{name: values[-1] for name, values in wrapper.SATISFIED.items()})
    with model.summon_full_params(recurse=True, rank0_only=False):
        return [p.shape for p in model.parameters()] == [p.shape for p in gpts.GPT().parameters()]


def test_values_that_ask_for_what_happens_in_any_case_are_accepted():
    assert on_ranks(satisfies, 2) == [True] * 2
