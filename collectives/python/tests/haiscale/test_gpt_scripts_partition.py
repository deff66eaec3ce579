"""Stages of training scripts whose layers are sliced, replaced, changed or in another order."""

import gc
import threading
import weakref
from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
from haiscale.ddp import DistributedDataParallel
from haiscale.pipeline import Interleaved1F1B, PipeDream, SequentialModel, partition
from haiscale.pipeline.errors import PartitionError, PipelineError
from haiscale.pipeline.sequential import all_layers
from hfreduce.testing import Layout, run, values
from torch import nn

pytestmark = [pytest.mark.torch, pytest.mark.timeout(200, func_only=True)]

CHUNKS = 2


def layers(count=4, seed=3):
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(count)))


def batch():
    return torch.rand(8, 4, generator=torch.Generator().manual_seed(1))


def squares(outputs):
    return outputs.square().sum()


def test_a_part_has_the_layers_of_the_model_and_describes_the_others():
    model = layers()
    model[3].weight = model[0].weight
    model[2].weight = model[1].weight
    part = partition(model, 0, 2, balance=[1, 3])
    assert list(part.state_dict()) == ["0.weight", "0.bias"]
    assert part[0] is model[0]
    described = all_layers([part])
    assert list(described) == ["0", "1", "2", "3"]
    assert described["0"] is model[0]
    assert described["3"].weight is model[0].weight
    assert described["2"].weight is described["1"].weight
    assert described["2"].weight.is_meta
    assert described["3"].bias.is_meta


def test_a_part_holds_no_memory_of_other_stages():
    model = layers()
    model[3].table = torch.zeros(8)  # neither a parameter nor a buffer
    model[3].lock = threading.Lock()  # cannot be copied
    table = weakref.ref(model[3].table)
    part = partition(model, 0, 2)
    assert not hasattr(all_layers([part])["3"], "table")
    del model
    gc.collect()
    assert table() is None


def test_layers_have_names_of_any_word():
    names = ["rank", "layers", "split", "stage"]
    model = nn.Sequential(OrderedDict((name, nn.Linear(4, 4)) for name in names))
    assert list(dict(partition(model, 0, 2).named_children())) == ["rank", "layers"]


def test_a_slice_has_the_layers_but_is_not_a_stage():
    part = partition(layers(), 1, 2)
    assert type(part[:1]) is SequentialModel
    assert list(part[:1].state_dict()) == ["2.weight", "2.bias"]
    assert part[1:][0] is part[-1]


@pytest.mark.parametrize(
    "add",
    [
        lambda part: part.append(nn.Linear(4, 4)),
        lambda part: part.insert(0, nn.Linear(4, 4)),
        lambda part: part.extend([nn.Linear(4, 4)]),
        lambda part: part.__iadd__(nn.Sequential(nn.Linear(4, 4))),
    ],
)
def test_no_layer_is_added_to_a_stage(add):
    """torch would give it the number of a layer that the stage has."""
    part = partition(layers(), 1, 2)
    with pytest.raises(PartitionError, match="cannot be added to stage 1: add layers to the model"):
        add(part)
    assert list(part.state_dict())[::2] == ["2.weight", "3.weight"]


def trains_with_others(rank, size):
    expected, others = layers(), layers(seed=4)
    part = partition(layers(), rank, size)
    for place in range(2):
        name = 2 * rank + place
        expected[name], part[place] = others[name], others[name]
    assert part[0] is others[2 * rank]
    losses, _ = PipeDream(part, CHUNKS).forward_backward(batch(), criterion=squares)
    found = {name: p.grad.clone() for name, p in part.named_parameters()}
    expected = nn.Sequential(*layers(seed=4))
    loss = squares(expected(batch()))
    loss.backward()
    gradients = dict(expected.named_parameters())
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, gradients[name].grad)
    return None if losses is None else (losses.sum().item(), loss.item())


def test_a_pipeline_uses_layers_that_were_replaced_before_it():
    first, (losses, expected) = values(run(trains_with_others, Layout.one_node(2)))
    assert first is None
    assert losses == pytest.approx(expected)


def changes(rank, size, kind):
    """Rank 1 alone changes its stage."""
    model = layers()
    if kind == "shared":
        model[3].weight = model[0].weight
    part = partition(model, rank, size)
    if rank == 1:
        if kind == "wrapped":
            part[0] = nn.Sequential(part[0], nn.ReLU())
        elif kind == "frozen":
            part[1].bias.requires_grad_(False)
        elif kind == "removed":
            del part[0]
        elif kind == "shared":
            part[1] = nn.Linear(4, 4)
    PipeDream(part, CHUNKS)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("wrapped", "partition: '2.weight' was (4, 4) torch.float32 trained, now missing: change"),
        ("frozen", "'3.bias' was (4,) torch.float32 trained, now (4,) torch.float32: change it"),
        ("removed", "stage 1 has the layers ['0'], but had ['2', '3']: add and remove layers of"),
        ("shared", "'shared' was 0.weight 3.weight, now nothing: change it before partition"),
    ],
)
def test_a_stage_that_other_ranks_do_not_know_is_refused_on_every_rank(kind, words):
    for outcome in run(changes, Layout.one_node(2), kind):
        assert outcome.failure is not None, outcome
        assert outcome.failure.type == "PartitionError", outcome
        assert words in outcome.failure.text
        assert "(rank 1)" in outcome.failure.text


def replaces_later(rank, size, evaluates):
    part = partition(layers(), rank, size)
    pipeline = PipeDream(part, CHUNKS)

    def computes():
        # The first stage may still be in this step, or be ahead of this evaluation, when the other
        # one fails.
        pipeline.forward_backward(batch(), criterion=squares)
        if rank == 1:
            part[0] = nn.Linear(4, 4)
        if evaluates:
            with torch.no_grad():
                pipeline(batch())
        pipeline.forward_backward(batch(), criterion=squares)

    with pytest.raises(PipelineError) as raised:
        computes()
    return str(raised.value)


@pytest.mark.parametrize("evaluates", [False, True])
def test_a_layer_that_is_replaced_later_ends_the_step_of_all_ranks(evaluates):
    for text in values(run(replaces_later, Layout.one_node(2), evaluates)):
        assert "layer '2' of stage 1 was replaced after PipeDream was constructed" in text


def replaces_in_a_wrapper(rank, size):
    alone = dist.new_group([rank], use_local_synchronization=True)
    part = partition(layers(), rank, size)
    data = DistributedDataParallel(part, process_group=alone)
    part[0] = nn.Linear(4, 4)
    PipeDream(data, CHUNKS)


def test_layers_that_a_wrapper_does_not_average_are_refused():
    for outcome in run(replaces_in_a_wrapper, Layout.one_node(2)):
        assert outcome.failure is not None, outcome
        assert outcome.failure.type == "PartitionError", outcome
        assert "stage 0 has parameters whose gradients its" in outcome.failure.text


def orders(rank, size, kind):
    first, second = partition(layers(), rank, size, num_model_chunks=2)
    others = partition(layers(5), rank, size, num_model_chunks=2)
    chosen = {
        "twice": [first, first],
        "reverse": [second, first],
        "empty": [],
        "models": [first, others[1]],
    }
    Interleaved1F1B(chosen[kind] if rank == 1 else [first, second], 2)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("twice", "module 1 of the list is stage 1, but expected is stage 3: pass the list in"),
        ("reverse", "module 0 of the list is stage 3, but expected is stage 1: pass the list in"),
        ("empty", "the list has no stages: pass the list that partition returns"),
        ("models", "the list has stages of different models: pass the list that partition"),
    ],
)
def test_other_lists_than_that_of_partition_are_refused_on_every_rank(kind, words):
    for outcome in run(orders, Layout.one_node(2), kind):
        assert outcome.failure is not None, outcome
        assert outcome.failure.type == "PartitionError", outcome
        assert words in outcome.failure.text
        assert "(rank 1)" in outcome.failure.text
