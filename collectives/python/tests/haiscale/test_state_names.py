"""haiscale.state in one process: names, optimizers, refusals, and loads that fail."""

import re
from pathlib import Path

import pytest
import torch
from haiscale.data import Order
from haiscale.state import StateMismatchError, TrainingState, digest
from threefs.checkpoint import LocalFiles
from threefs.checkpoint.distributed import ThreeFSReader, ThreeFSWriter
from torch import nn, optim
from torch.distributed.checkpoint import CheckpointException

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]

PAGE = Path(__file__).parents[4] / "docs/guides/save-and-load-any-layout.md"
ID = "/run/step-4"
ORDER = Order(samples=64, batch=8, seed=1)


@pytest.fixture
def files(tmp_path):
    return LocalFiles(tmp_path)


class Net(nn.Module):
    """Batch norm, and one weight under two names."""

    def __init__(self):
        super().__init__()
        self.output = nn.Linear(6, 12, bias=False)
        self.norm = nn.BatchNorm1d(6)
        self.embed = nn.Embedding(12, 6)
        self.output.weight = self.embed.weight
        self.table = nn.Linear(6, 6)

    def forward(self, tokens):
        return self.output(self.norm(self.table(self.embed(tokens))))


OPTIMIZERS = {
    "sgd": lambda p: optim.SGD(p, lr=0.1),
    "momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda p: optim.AdamW(p, lr=1e-2, amsgrad=True),
    "nadam": lambda p: optim.NAdam(p, lr=1e-2),
    "adafactor": lambda p: optim.Adafactor(p, lr=1e-2),
    "tensor rate": lambda p: optim.AdamW(p, lr=torch.tensor(1e-2)),
    "two groups": lambda p: optim.AdamW(
        [{"params": p[:1], "lr": 0.1}, {"params": p[1:], "weight_decay": 0.5}], betas=(0.8, 0.9)
    ),
}


def job(seed, make=OPTIMIZERS["adamw"], dtype=torch.float32):
    torch.manual_seed(seed)
    model = Net().to(dtype)
    return model, make(list(model.parameters()))


def train(model, optimizer, steps):
    for step in steps:
        tokens = torch.randint(12, (8,), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens), tokens).backward()
        optimizer.step()


def save(files, model, optimizer=(), path=ID, data=None):
    TrainingState(model, optimizer, data=data).save(ThreeFSWriter(files), path, 4)


def load(files, model, optimizer=(), data=None):
    return TrainingState(model, optimizer, data=data).load(ThreeFSReader(files), ID)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_loaded_job_continues_with_the_same_bits(files, kind):
    first, second = job(1, OPTIMIZERS[kind]), job(2, OPTIMIZERS[kind])
    train(*first, range(3))
    save(files, *first)
    assert load(files, *second) == 4
    for model, optimizer in (first, second):
        train(model, optimizer, range(3, 6))
    save(files, *first, "/run/first")
    save(files, *second, "/run/second")
    reader = ThreeFSReader(files)
    assert digest(reader, "/run/first") == digest(reader, "/run/second")
    assert second[0].output.weight is second[0].embed.weight
    assert torch.equal(first[0].norm.running_var, second[0].norm.running_var)


def test_states_keep_their_type_where_their_parameter_has_another(files):
    first, second = (job(seed, OPTIMIZERS["nadam"], torch.bfloat16) for seed in (1, 2))
    train(*first, range(3))
    save(files, *first)
    load(files, *second)
    save(files, *second, "/run/again")
    reader = ThreeFSReader(files)
    assert digest(reader, ID) == digest(reader, "/run/again")


def test_names_that_torch_keeps_in_a_group_are_not_saved(files):
    models = [nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4))]
    optimizers = [optim.AdamW(model.named_parameters()) for model in models]
    optimizers[1].param_groups[0]["param_names"] = ["other", "names"]
    save(files, models[0], optimizers[0])
    load(files, models[1], optimizers[1])
    assert optimizers[1].param_groups[0]["param_names"] == ["other", "names"]


def test_a_scheduler_that_is_made_after_the_load_continues(files):
    rates = []
    for steps in (range(6), range(4), range(4, 6)):
        model, optimizer = job(1)
        start = load(files, model, optimizer) if steps.start else 0
        scheduler = optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: 1 / (1 + step), last_epoch=start - 1
        )
        for step in steps:
            train(model, optimizer, [step])
            rates.append(optimizer.param_groups[0]["lr"])
            scheduler.step()
        if steps.stop == 4:
            save(files, model, optimizer)
    assert rates[:6] == rates[6:]


def test_a_state_with_a_dot_in_its_name_is_refused(files):
    model, optimizer = job(1)
    train(model, optimizer, range(1))
    optimizer.state[model.table.weight]["ema.slow"] = torch.zeros(6, 6)
    with pytest.raises(TypeError, match=r"the state 'ema\.slow' of AdamW: names with a dot"):
        save(files, model, optimizer)


def test_a_tensor_that_a_module_computes_for_its_state_is_refused(files):
    class Scaled(nn.Linear):
        def get_extra_state(self):
            return torch.tensor(7.0)

        def set_extra_state(self, state):
            raise AssertionError

    with pytest.raises(TypeError, match=r"'0\._extra_state' .* neither a parameter nor a buffer"):
        save(files, nn.Sequential(Scaled(3, 3)))


def test_a_rate_that_a_scheduler_has_changed_is_kept(files):
    model, optimizer = job(1, OPTIMIZERS["two groups"])
    optimizer.param_groups[1]["lr"] = 0.03
    save(files, model, optimizer)
    other = job(2, OPTIMIZERS["two groups"])
    other[1].param_groups[1]["foreach"] = False
    load(files, *other)
    assert [group["lr"] for group in other[1].param_groups] == [0.1, 0.03]
    assert other[1].param_groups[0]["betas"] == (0.8, 0.9)
    assert other[1].param_groups[1]["foreach"] is False  # how steps are computed is the script's


def test_an_optimizer_may_be_saved_before_its_first_step_and_left_out(files):
    model, optimizer = job(1)
    save(files, model, optimizer)
    other = job(2)
    train(*other, range(2))
    load(files, *other)
    assert other[1].state_dict()["state"] == {}
    load(files, job(3)[0])  # the model alone


def mismatches():
    """Checkpoint, job and text of each row of the page."""

    def net(width, bias=True):
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(width, 96), nn.GELU(), nn.Linear(96, 32, bias=bias))

    def adamw(model):
        return optim.AdamW(model.parameters())

    small, large, no_bias = net(32), net(64), net(32, bias=False)
    other = Order(samples=64, batch=16, seed=1)
    return [
        (small, adamw(small), ORDER, large, adamw(large), ORDER),
        (no_bias, adamw(no_bias), ORDER, small, adamw(small), ORDER),
        (small, optim.SGD(small.parameters()), ORDER, small, adamw(small), ORDER),
        (small, adamw(small), ORDER, small, adamw(small), other),
    ]


@pytest.mark.parametrize("row", range(4))
def test_the_messages_of_the_page_are_those_of_the_errors(files, row):
    shown = re.findall(r"^\| [a-z ]+ \| `(.*)` \|$", PAGE.read_text(), re.MULTILINE)
    assert len(shown) == 4
    saved, optimizer, data, model, own, expected = mismatches()[row]
    save(files, saved, optimizer, data=data)
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(StateMismatchError) as raised:
        load(files, model, own, data=expected)
    pattern = ".*".join(re.escape(part) for part in re.split(" ?… ?", shown[row].strip("…: ")))
    assert re.search(pattern, str(raised.value)), raised.value
    assert all(map(torch.equal, before, model.parameters()))


def test_a_checkpoint_of_another_type_is_refused(files):
    """Nothing is rounded silently."""
    model, optimizer = job(1)
    save(files, model, optimizer)
    text = r"'embed.weight': found shape 12x6 of float32, expected shape 12x6 of bfloat16"
    with pytest.raises(StateMismatchError, match=text):
        load(files, model.bfloat16(), optimizer)


def test_a_parameter_that_is_not_in_the_model_is_named(files):
    model, _ = job(1)
    other = optim.AdamW(nn.Linear(3, 5).parameters())
    with pytest.raises(ValueError, match=r"a parameter of AdamW of shape \(5, 3\) is not in the"):
        save(files, model, other)


def test_a_load_that_fails_changes_nothing(files, tmp_path):
    first, second = job(1), job(2)
    train(*first, range(2))
    save(files, *first)
    train(*second, range(1))
    (shard,) = tmp_path.glob("run/step-4/shard-*")
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    save(files, *second, "/run/before")
    with pytest.raises(CheckpointException, match="wrong checksum"):
        load(files, *second)
    save(files, *second, "/run/after")
    reader = ThreeFSReader(files)
    assert digest(reader, "/run/before") == digest(reader, "/run/after")
