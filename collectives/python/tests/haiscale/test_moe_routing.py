"""haiscale.moe.routing: choices, balance and limits, in one process."""

import pytest
import torch
from haiscale import moe
from haiscale.moe.routing import Router, Routing
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.torch


def router(experts=16, nodes=1, **options):
    torch.manual_seed(1)
    return Router(8, experts, Routing(**options), nodes)


def tokens(count=200):
    return torch.randn(count, 8, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("score", ["sigmoid", "softmax"])
def test_weights_sum_to_the_scale_and_experts_ascend(score):
    choice = router(top_k=4, score=score, scale=2.5)(tokens())
    choice.check(16, 200)
    torch.testing.assert_close(choice.weights.sum(1), torch.full((200,), 2.5))
    torch.testing.assert_close(choice.probabilities.sum(1), torch.ones(200))


def test_scores_are_float32_under_autocast():
    expected = router(top_k=4)(tokens())
    with torch.autocast("cpu", torch.bfloat16):
        choice = router(top_k=4)(tokens())
    for found, each in zip(choice, expected, strict=True):
        assert torch.equal(found, each)


def test_the_bias_changes_the_choice_and_not_the_weights():
    layer = router(top_k=2)
    before = layer(tokens())
    layer.bias[3] = 100.0
    after = layer(tokens())
    assert (after.experts == 3).any(1).all()
    both = (before.experts == after.experts).all(1)
    assert both.any()
    assert torch.equal(before.weights[both], after.weights[both])


def test_a_token_goes_to_at_most_as_many_nodes_as_allowed():
    limited = router(top_k=4, nodes_per_token=2, nodes=4)(tokens()).experts // 4
    free = router(top_k=4)(tokens()).experts // 4
    nodes = [len(set(row)) for row in limited.tolist()]
    assert max(nodes) == 2
    assert max(len(set(row)) for row in free.tolist()) == 4


def test_no_token_has_no_choice_with_a_limit_of_nodes():
    choice = router(top_k=4, nodes_per_token=2, nodes=4)(tokens(0))
    choice.check(16, 0)
    assert choice.experts.shape == choice.weights.shape == (0, 4)


def test_capacity_drops_late_tokens_and_nothing_is_dropped_without():
    assert (router(top_k=4)(tokens()).experts >= 0).all()
    choice = router(top_k=4, capacity_factor=1.0)(tokens())
    choice.check(16, 200)
    free = router(top_k=4)(tokens()).experts
    for expert in range(16):
        wanted = (free == expert).any(1).nonzero().flatten()
        kept = (choice.experts == expert).any(1).nonzero().flatten()
        assert kept.tolist() == wanted[:50].tolist()  # 200 tokens x 4 / 16 experts


def test_the_bias_balances_a_router_that_prefers_one_expert():
    torch.manual_seed(0)
    layer = moe.MoE(8, 8, 16, Routing(2, bias_step=0.02))
    layer.router.weight.data[5] += 1.0
    x = tokens(400) + 0.5
    layer(x)
    first = moe.balance(layer)[0]
    for _ in range(60):
        layer(x)
        last = moe.balance(layer)[0]
    assert first.sum() == last.sum() == 800
    assert first.max() > 3 * 50
    assert last.max() < 1.6 * 50
    assert layer.load.sum() == 0


def test_counts_of_micro_batches_add_up_and_evaluation_does_not_count():
    layer = moe.MoE(8, 8, 16, Routing(2))
    for _ in range(3):
        layer(tokens(10))
    layer.eval()
    layer(tokens(10))
    assert moe.balance(layer)[0].sum() == 60


def test_the_balance_loss_is_one_for_even_shares_and_moves_the_router():
    layer = moe.MoE(8, 8, 16, Routing(2, balance="loss"))
    layer(tokens(400))
    loss = moe.balance_loss(layer)
    assert 1.0 <= loss.item() < 2.0
    loss.backward()
    assert layer.router.weight.grad.norm() > 0


def test_the_balance_loss_of_a_layer_that_is_computed_again_is_trained_or_refused():
    gradients = []
    for again in (False, True):
        torch.manual_seed(4)
        layer = moe.MoE(8, 8, 16, Routing(2, balance="loss"))
        x = tokens().requires_grad_()
        y = checkpoint(layer, x, use_reentrant=False) if again else layer(x)
        (y.square().mean() + moe.balance_loss(layer)).backward()
        gradients.append(layer.router.weight.grad)
    assert torch.equal(*gradients)
    checkpoint(layer, x, use_reentrant=True)
    with pytest.raises(moe.MoEError, match=r"recorded no gradients.*: pass use_reentrant=False"):
        moe.balance_loss(layer)
    with torch.no_grad():
        assert moe.balance_loss(layer) > 0
    layer.router.requires_grad_(False)
    assert moe.balance_loss(layer) > 0


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"top_k": 0}, "invalid top_k 0: expected 1 to 16"),
        ({"top_k": 17}, "invalid top_k 17"),
        ({"top_k": 2, "score": "relu"}, "invalid score 'relu'"),
        ({"top_k": 2, "balance": "both"}, "invalid balance 'both'"),
        ({"top_k": 2, "capacity_factor": 0.0}, "invalid capacity_factor 0.0"),
        ({"top_k": 2, "nodes_per_token": 2, "nodes": 3}, "16 experts do not divide into 3 nodes"),
        ({"top_k": 2, "nodes_per_token": 5, "nodes": 4}, "invalid nodes_per_token 5"),
        ({"top_k": 5, "nodes_per_token": 1, "nodes": 4}, "top_k 5 is more than the 4 experts"),
    ],
)
def test_invalid_options_are_refused(options, match):
    with pytest.raises(ValueError, match=match):
        moe.MoE(8, 8, 16, Routing(**options))


@pytest.mark.parametrize(
    ("chosen", "match"),
    [
        ([[1, 1]], "not ascending"),
        ([[2, 1]], "not ascending"),
        ([[0, 16]], "outside of 0 to 15"),
        ([[-2, 0]], "outside of 0 to 15"),
        ([[0, 1], [0, 1]], "for 1 tokens"),
    ],
)
def test_an_invalid_choice_of_another_router_is_refused(chosen, match):
    experts = torch.tensor(chosen)
    with pytest.raises(ValueError, match=match):
        moe.Choice(experts, torch.ones(experts.shape), torch.empty(0)).check(16, 1)


def test_grouped_matrices_compute_what_the_loop_computes():
    """torch's grouped product, which is used on CUDA, against the loop over experts."""
    from haiscale.moe.experts import Experts, _grouped

    torch.manual_seed(3)
    experts = Experts(16, 32, 4).bfloat16()
    rows = torch.randn(40, 16, dtype=torch.bfloat16)
    counts = [8, 0, 24, 8]
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    grouped = _grouped(rows, [experts.gate, experts.up, experts.down], ends)
    torch.testing.assert_close(grouped, experts(rows, counts))


def test_first_values_do_not_depend_on_the_number_of_ranks():
    whole, parts = [], []
    for shares in (1, 4):
        for part in range(shares):
            torch.manual_seed(8)
            count = 16 // shares
            experts = moe.Experts(8, 8, count, first=count * part)
            (whole if shares == 1 else parts).append(experts.up)
    assert torch.equal(torch.cat(parts), whole[0])
