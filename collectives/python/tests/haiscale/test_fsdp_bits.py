"""haiscale.fsdp: the same bits as haiscale.ddp, as torch's FSDP2, and with and without overlap."""

import sys
from pathlib import Path

import pytest
import torch
from hfreduce.testing import Layout, run, values

sys.path.insert(0, str(Path(__file__).parent))
import sharding

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300, func_only=True)]

STABLE = {"HFREDUCE_DETERMINISM": "stable"}
OURS = {
    "plain": {"kind": "plain"},
    "overlap": {"kind": "overlap"},
    "lazy": {"kind": "overlap", "lazy": True},
    "plain and lazy": {"kind": "plain", "lazy": True},
}
FOUR = Layout.one_node(4)


def results(layout, runs, backend="hfreduce"):
    """By run; every rank has the same."""
    environment = STABLE if backend == "hfreduce" else {}
    ranks = values(
        run(sharding.train_all, layout, runs, environment=environment, backend=backend,
            deadline_seconds=250)
    )  # fmt: skip
    for other in ranks[1:]:
        for name, result in other.items():
            assert result["digest"] == ranks[0][name]["digest"], f"{name}: ranks differ"
    return ranks[0]


def digests(found, key="digest"):
    return {name: result[key] for name, result in found.items()}


def all_equal(found, key="digest"):
    wrong = {n: d for n, d in digests(found, key).items() if d != next(iter(found.values()))[key]}
    assert not wrong, f"{sorted(wrong)} differ from {next(iter(found))}"


def with_options(runs, **options):
    return {name: {**run_options, **options} for name, run_options in runs.items()}


PEERS = {"ddp": {"kind": "ddp"}, "torch": {"kind": "torch"}}


@pytest.mark.parametrize("optimizer", ["adamw", "momentum"])
def test_bits_are_those_of_ddp_and_of_torch(optimizer):
    found = results(FOUR, with_options({**PEERS, **OURS}, optimizer=optimizer))
    all_equal(found)
    for name in ("overlap", "lazy"):
        assert found[name]["whole"] is None, name
    assert found["lazy"]["in_flight"] == 5, "nothing was overlapped"
    assert found["plain"]["in_flight"] == 0


def test_bits_are_those_of_ddp_with_each_elementwise_optimizer():
    names = ("sgd", "adam", "foreach", "adagrad", "rmsprop")
    runs = {
        f"{name}, {kind}": {"kind": kind, "optimizer": name, "steps": 3, "lazy": kind != "ddp"}
        for name in names
        for kind in ("ddp", "overlap")
    }
    found = results(FOUR, runs)
    for name in names:
        all_equal({run: result for run, result in found.items() if run.startswith(name)})
        assert found[f"{name}, overlap"]["whole"] is None


def test_replicas_by_node_have_the_bits_of_ddp():
    """HSDP: shards in a node, replicas over nodes; two and four nodes in two zones."""
    for layout, replicas in ((Layout.two_zones(1, 2), 2), (Layout.two_zones(2, 1), 2)):
        runs = {**PEERS, **OURS}
        by_node = with_options({"torch HSDP": {"kind": "torch"}, **OURS}, replicas=replicas)
        found = results(layout, {**runs, **{f"{n}, replicas": o for n, o in by_node.items()}})
        if layout.ranks_per_node == 1:
            # Not by node: the order of the sum is another one.
            found = {n: r for n, r in found.items() if "replicas" in n}
        all_equal(found)


@pytest.mark.soak
@pytest.mark.timeout(1800, func_only=True)
def test_eight_ranks_have_the_bits_of_ddp():
    for layout in (Layout.one_node(8), Layout.two_zones(1, 4), Layout.two_zones(2, 2)):
        runs = {**PEERS, **OURS}
        if len(layout.nodes) > 1:
            runs |= {
                f"{name}, replicas": {**options, "replicas": len(layout.nodes)}
                for name, options in OURS.items()
            }
        for optimizer in ("momentum", "adamw"):
            all_equal(results(layout, with_options(runs, optimizer=optimizer, steps=6)))


VARIANTS = {
    "accumulated": {"micro_steps": 3},
    "scheduled": {"schedule": True},
    "frozen": {"extra": "frozen"},
    "unused": {"extra": "unused"},
    "computed again": {"extra": "again"},
}


def combined(variants, kinds):
    return {
        f"{variant}: {name}": {**kind, **options}
        for variant, options in variants.items()
        for name, kind in kinds.items()
    }


def one_variant(found, variant):
    return {n: result for n, result in found.items() if n.startswith(f"{variant}: ")}


def test_bits_are_those_of_ddp_whatever_the_loop_and_the_model():
    kinds = {"ddp": PEERS["ddp"], "torch": PEERS["torch"], "lazy": OURS["lazy"]}
    found = results(FOUR, combined(VARIANTS, kinds))
    for variant in VARIANTS:
        all_equal(one_variant(found, variant))
        assert found[f"{variant}: lazy"]["whole"] is None, variant


LOOPS = {
    # Averages are added, where haiscale.ddp averages a sum.
    "each": {"micro_steps": 2, "how": "each"},
    "clipped": {"clip": 0.1},
    "read": {"read": True},
    "zeros": {"keep_zeros": True},
    "manual": {"manual": True},
    "called twice": {"extra": "called twice"},
}
MODELS = {
    "own": {"optimizer": "own"},
    "own, elementwise": {"optimizer": "own", "independent": True},
    # torch's fused kernel rounds the last elements of a tensor in another way than the others, so
    # its bits depend on how a parameter is split.
    "fused": {"optimizer": "fused"},
    "bfloat16": {"dtype": "bfloat16"},
    "kept": {"reshard_after_forward": False},
    "kept by pairs": {"reshard_after_forward": 2},
}
REPLICAS = {
    "replicas, clipped": {"replicas": 2, "clip": 0.1},
    "replicas, accumulated": {"replicas": 2, "micro_steps": 2},
    "replicas, by shards": {"replicas": 2, "micro_steps": 3, "how": "shards"},
    "replicas alone": {"replicas": 4},
}
WHOLE = {
    "clipped": "GradientsRead", "read": "GradientsRead", "replicas, clipped": "GradientsRead",
    "own": "NotIndependent", "own, elementwise": None, "replicas alone": "TorchCollectives",
}  # fmt: skip


@pytest.mark.parametrize("variants", [LOOPS, MODELS, REPLICAS], ids=["loops", "models", "replicas"])
def test_bits_are_those_of_torch(variants):
    kinds = {"torch": PEERS["torch"], **{name: OURS[name] for name in ("overlap", "lazy")}}
    found = results(FOUR, combined(variants, kinds))
    for variant in variants:
        own = one_variant(found, variant)
        all_equal(own)
        norms = digests(own, "norms")
        assert norms[f"{variant}: overlap"] == norms[f"{variant}: torch"]
        if variant in WHOLE:
            assert own[f"{variant}: overlap"]["whole"] == WHOLE[variant], variant


def test_mixed_precision_has_the_bits_of_torch():
    found = results(FOUR, MIXED)
    for policy in POLICIES:
        all_equal({name: result for name, result in found.items() if name.startswith(f"{policy},")})
    assert len({result["parameters"] for result in found.values()}) == len(POLICIES)


POLICIES = {
    "float32": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
    "bfloat16": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16},
    "float16": {"param_dtype": torch.float16, "reduce_dtype": torch.float16},
}
MIXED = {
    f"{policy}, {name}": {**options, "policy": terms}
    for policy, terms in POLICIES.items()
    for name, options in {"torch": PEERS["torch"], "lazy": OURS["lazy"]}.items()
}


def test_gloo_equals_torch_with_it():
    """Without HFReduce: the scatters' sums are Gloo's, in its order."""
    runs = {"torch": PEERS["torch"], **OURS}
    found = results(Layout.one_node(2), with_options(runs, optimizer="momentum"), backend="gloo")
    for result in found.values():
        torch.testing.assert_close(
            torch.tensor(result["flat"]), torch.tensor(found["torch"]["flat"]), rtol=1e-5, atol=1e-6
        )
    assert found["lazy"]["whole"] is None


def test_a_test_can_tell_runs_apart():
    """The digest covers what the tests vary."""
    found = results(Layout.one_node(2), {
        "one": {"kind": "overlap"}, "two": {"kind": "overlap", "steps": 5},
        "three": {"kind": "overlap", "clip": 0.1}, "four": {"kind": "overlap", "schedule": True},
    })  # fmt: skip
    assert len(set(digests(found).values())) == 4
