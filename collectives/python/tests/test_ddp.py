"""DistributedDataParallel: correct results, with the same bits on every rank and in every run."""

import hashlib
import warnings

import pytest
import torch
import torch.distributed as dist
from hfreduce.testing import Layout, run
from torch import nn
from torch.nn.parallel import DistributedDataParallel

pytestmark = pytest.mark.torch

LAYOUT = Layout.two_zones(2, 1)


def train(rank, size, bucket_mb):
    """Five steps of a small network; returns the digest and the parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 300), nn.Tanh(), nn.BatchNorm1d(300), nn.Linear(300, 10))
    ddp = DistributedDataParallel(model, bucket_cap_mb=bucket_mb)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(100 + rank)
    for _ in range(5):
        optimizer.zero_grad()
        loss = ddp(torch.randn(16, 64, generator=data)).square().mean()
        loss.backward()
        optimizer.step()
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest(), flat.tolist()


def results(**options):
    bucket_mb = options.pop("bucket_mb", 0.01)
    outcomes = run(train, LAYOUT, bucket_mb, **options)
    assert all(outcome.failure is None and outcome.answered for outcome in outcomes), outcomes
    return [outcome.value for outcome in outcomes]


def test_training_equals_gloo_within_rounding_and_itself_in_every_bit():
    runs = [results(), results()]
    gloo = results(backend="gloo")
    digests = {digest for results_of_run in runs for digest, _ in results_of_run}
    assert len(digests) == 1, "ranks or runs differ"
    torch.testing.assert_close(
        torch.tensor(runs[0][0][1]), torch.tensor(gloo[0][1]), rtol=1e-4, atol=1e-5
    )


def test_results_do_not_depend_on_the_instruction_set():
    reference = {digest for digest, _ in results(environment={"HFREDUCE_ISA": "scalar"})}
    assert reference == {digest for digest, _ in results()}


def bucketed(rank, size):
    """One allreduce as a whole and in five buckets: whether the bits are equal."""
    whole = torch.randn(200_001, generator=torch.Generator().manual_seed(rank))
    buckets = [bucket.clone() for bucket in whole.tensor_split([7, 50_000, 50_001, 120_000])]
    for tensor in (whole, *buckets):
        dist.all_reduce(tensor)
    return torch.equal(whole, torch.cat(buckets))


@pytest.mark.parametrize("stable", [True, False])
def test_bucket_sizes_do_not_matter_in_stable_mode(stable):
    """Without the mode they do, which shows that the test detects a difference."""
    environment = {"HFREDUCE_CHUNK_BYTES": "16384"}
    if stable:
        environment["HFREDUCE_DETERMINISM"] = "stable"
    layout = Layout(tuple((f"a{node}", "A") for node in range(5)), 1)
    outcomes = run(bucketed, layout, environment=environment)
    assert [outcome.value for outcome in outcomes] == [stable] * 5, outcomes


def train_with_a_death(rank, size):
    model = DistributedDataParallel(nn.Linear(1000, 1000))
    for step in range(20):
        if step == 3 and rank == size - 1:
            raise SystemExit
        model(torch.randn(4, 1000)).sum().backward()
    return "trained"


def test_a_rank_that_exits_is_reported_by_all_others():
    outcomes = run(train_with_a_death, LAYOUT, environment={"HFREDUCE_LIVENESS_SECONDS": "6"})
    for outcome in outcomes[:-1]:
        assert outcome.failure is not None, f"rank {outcome.rank}: {outcome.value}"
        assert "rank 3" in outcome.failure.text or outcome.failure.fields.get("peer") == 3, outcome


def functional(rank, size):
    """The functional collectives that compiled programs and FSDP use."""
    import torch.distributed._functional_collectives as collectives

    warnings.simplefilter("ignore", FutureWarning)
    group = dist.group.WORLD
    total = collectives.all_reduce(torch.full((8,), float(rank)), "sum", group)
    gathered = collectives.all_gather_tensor(torch.full((2,), float(rank)), 0, group)
    shared = collectives.reduce_scatter_tensor(torch.ones(2 * size), "sum", 0, group)
    return total.tolist(), gathered.tolist(), shared.tolist()


def test_functional_collectives():
    outcomes = run(functional, LAYOUT)
    for outcome in outcomes:
        assert outcome.failure is None, outcome
        total, gathered, shared = outcome.value
        assert total == [6.0] * 8
        assert gathered == [0, 0, 1, 1, 2, 2, 3, 3]
        assert shared == [4.0, 4.0]
