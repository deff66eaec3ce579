"""haiscale.ddp: the same bits with and without overlap, and as torch's DistributedDataParallel."""

import sys
from pathlib import Path

import pytest
import torch
from hfreduce.testing import Layout, run, values

sys.path.insert(0, str(Path(__file__).parent))
import training

pytestmark = pytest.mark.torch

LAYOUT = Layout.one_node(2)
STABLE = {"HFREDUCE_DETERMINISM": "stable"}


def results(kind, layout=LAYOUT, backend="hfreduce", **options):
    """Of all ranks: a digest of parameters, buffers and the optimizer's state; parameters."""
    names = ("optimizer_name", "steps", "micro_steps", "clip", "dtype", "schedule", "zero",
             "cap_mb", "levels")  # fmt: skip
    defaults = ("adamw", 4, 1, None, "float32", False, "before", 0.05, None)
    arguments = [options.pop(n, d) for n, d in zip(names, defaults, strict=True)]
    assert not options
    environment = STABLE if backend == "hfreduce" else {}
    outcomes = run(training.train, layout, kind, *arguments, backend=backend,
                   environment=environment)  # fmt: skip
    return values(outcomes)


def digests(kind, **options):
    return [result["digest"] for result in results(kind, **options)]


@pytest.mark.parametrize("name", sorted(training.OPTIMIZERS))
def test_steps_per_bucket_have_the_bits_of_one_step(name):
    late = results("late", optimizer_name=name)
    assert [result["whole"] for result in late] == [None, None]
    assert all(result["in_flight"] > 3 for result in late), "nothing was overlapped"
    expected = digests("barrier", optimizer_name=name)
    assert [result["digest"] for result in late] == expected
    assert digests("overlap", optimizer_name=name) == expected
    assert digests("torch", optimizer_name=name) == expected


@pytest.mark.parametrize(
    "options",
    [
        {"micro_steps": 3},
        {"clip": "torch"},
        {"clip": "own"},
        {"schedule": True},
        {"schedule": True, "optimizer_name": "momentum", "zero": "after"},
        {"zero": "inside", "micro_steps": 2},
        {"dtype": "bfloat16"},
        {"cap_mb": 0.001},
        {"cap_mb": 25.0},
        {"layout": Layout.one_node(4), "steps": 3},
        {"layout": Layout.two_zones(2, 1), "steps": 3, "levels": True},
    ],
    ids=str,
)
def test_bits_are_those_of_torch(options):
    """In the `stable` order bucket sizes do not matter, and two and four ranks divide exactly."""
    expected = digests("torch", **{k: v for k, v in options.items() if k != "levels"})
    assert digests("late", **options) == expected
    assert digests("overlap", **options) == expected
    assert digests("plain", **options) == expected


def test_clipping_reads_gradients_so_the_step_is_made_at_once():
    for clip in ("torch", "own"):
        (first, _) = results("overlap", clip=clip)
        assert first["whole"] == "GradientsRead"


def test_another_backend_equals_torch_with_it():
    """Of Gloo with one bucket, as its order depends on the place in the bucket."""
    options = {"backend": "gloo", "cap_mb": 25.0}
    for ours, torchs in zip(results("late", **options), results("torch", **options), strict=True):
        assert ours["whole"] is None
        torch.testing.assert_close(
            torch.tensor(ours["flat"]), torch.tensor(torchs["flat"]), rtol=1e-5, atol=1e-6
        )


def test_three_ranks_equal_torch_within_rounding():
    """torch multiplies by a third before it adds, HFReduce divides the sum."""
    layout = Layout.one_node(3)
    ours, torchs = (
        results(kind, layout=layout, optimizer_name="momentum") for kind in ("late", "torch")
    )
    torch.testing.assert_close(
        torch.tensor(ours[0]["flat"]), torch.tensor(torchs[0]["flat"]), rtol=1e-4, atol=1e-5
    )
    assert len({tuple(each["flat"]) for each in ours}) == 1


def test_every_rank_has_the_same_parameters():
    assert len({tuple(each["flat"]) for each in results("overlap")}) == 1


def test_a_test_can_tell_runs_apart():
    """The digest covers what the tests vary."""
    assert digests("overlap") != digests("overlap", steps=5)
    assert digests("overlap") != digests("overlap", schedule=True)
