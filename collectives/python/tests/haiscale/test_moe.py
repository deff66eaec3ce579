"""haiscale.moe: experts on several ranks and nodes train as those of one process."""

import sys
from math import comb
from pathlib import Path

import pytest
import torch
from hfreduce.testing import Layout, run, values

sys.path.insert(0, str(Path(__file__).parent))
import expert_ranks
from haiscale import moe
from haiscale.clip import grad_norm

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300, func_only=True)]

STABLE = {"HFREDUCE_DETERMINISM": "stable"}
EXPERTS = 16


def layout(nodes, ranks_per_node):
    """Nodes of one zone: an expert group stays inside a zone."""
    return Layout(tuple((f"n{n}", "A") for n in range(nodes)), ranks_per_node)


def on_ranks(function, nodes, ranks_per_node, *arguments):
    return values(
        run(function, layout(nodes, ranks_per_node), *arguments,
            environment=STABLE | {"TEST_NODES": str(nodes)})
    )  # fmt: skip


def alone(parts, options, factor=0.0, steps=4):
    """One process with the tokens of all ranks."""
    torch.manual_seed(5)
    model = expert_ranks.Net(EXPERTS, moe.Routing(**options))
    first, losses, _ = expert_ranks.train(model, steps, parts, factor=factor)
    return first, losses, [layer.router.bias.tolist() for layer in model.layers]


def compare(results, reference, ep):
    first, losses, bias = reference
    for result in results:
        share = EXPERTS // ep
        own = slice(share * result["position"], share * (result["position"] + 1))
        assert result["gradients"].keys() == first.keys()
        for name, gradient in result["gradients"].items():
            expected = first[name][own] if ".experts." in name else first[name]
            error = (torch.tensor(gradient) - expected).norm() / expected.norm()
            assert error < 1e-5, (name, error)
        assert result["losses"] == pytest.approx(losses, rel=1e-4)
        assert result["bias"] == bias
        once, again, without_overlap = result["digests"]
        assert once == again
        assert once == without_overlap


@pytest.mark.parametrize(
    ("nodes", "ranks_per_node", "ep"),
    [(1, 2, 2), (2, 1, 2), (1, 4, 4), (2, 2, 4), (4, 1, 4), (2, 4, 8), (4, 2, 8),
     (1, 1, 1), (1, 4, 2)],
)  # fmt: skip
def test_gradients_and_losses_are_those_of_one_process(nodes, ranks_per_node, ep):
    """1e-5 of each gradient's norm in the first step, and the losses of four steps within 1e-4."""
    options = {"top_k": 3}
    results = on_ranks(expert_ranks.trained, nodes, ranks_per_node, ep, EXPERTS, options, 0.0)
    compare(results, alone(nodes * ranks_per_node, options), ep)


@pytest.mark.parametrize(
    ("options", "factor"),
    [
        ({"top_k": 4, "balance": "loss", "score": "softmax"}, 0.05),
        ({"top_k": 4, "nodes_per_token": 1, "nodes": 2, "scale": 2.5}, 0.0),
        ({"top_k": 1, "balance": None}, 0.0),
        ({"top_k": EXPERTS}, 0.0),
    ],
    ids=str,
)
def test_every_way_to_route_is_that_of_one_process(options, factor):
    results = on_ranks(expert_ranks.trained, 2, 2, 4, EXPERTS, options, factor)
    compare(results, alone(4, options, factor), 4)


def test_a_token_leaves_its_node_once_for_each_destination_node():
    """64 experts, top 6, 4 nodes: 2.51 copies for a token instead of 4.50."""
    experts, top_k, nodes, tokens, width = 64, 6, 4, 2000, 512
    results = on_ranks(expert_ranks.traffic, nodes, 2, 8, experts, top_k, tokens, width)
    model = (nodes - 1) * (1 - comb(experts - experts // nodes, top_k) / comb(experts, top_k))
    assert model == pytest.approx(2.51, abs=0.005)
    counted = {key: sum(result[key] for result in results) for key in results[0]}
    assert counted["tokens"] == 8 * tokens
    assert counted["copies"] / counted["tokens"] == pytest.approx(model, rel=0.02)
    assert counted["pairs"] / counted["tokens"] == pytest.approx(4.5, rel=0.02)
    # Tokens, results and the gradients of both; experts and weights, and the weights' gradients.
    payload = 4 * counted["copies"] * width * 4 + 2 * counted["pairs"] * 12
    assert counted["sent"] == counted["bytes"] == payload
    assert counted["exchanges"] == 8 * 6
    naive = 4 * counted["pairs"] * width * 4
    assert counted["sent"] / naive == pytest.approx(model / 4.5, rel=0.02)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_layer_that_is_computed_again_in_backward_trains_as_without(reentrant):
    for kept, again in on_ranks(expert_ranks.recomputed, 2, 1, reentrant):
        assert again == kept


def test_a_gradient_that_some_ranks_have_is_averaged_with_zeros():
    for gradients in on_ranks(expert_ranks.heads, 1, 2):
        assert gradients == [[0.5, 0.5], [1.0, 1.0], None]


@pytest.mark.parametrize("ep", [2, 4])
def test_gradients_are_clipped_by_one_norm_over_all_experts(ep):
    torch.manual_seed(5)
    model = expert_ranks.Net(EXPERTS, moe.Routing(2))
    expert_ranks.loss_of(model, expert_ranks.batch(0, 4), 0.0).backward()
    expected = grad_norm(model)
    outcomes = on_ranks(expert_ranks.norms, 1, 4, ep)
    assert len(set(outcomes)) == 1, outcomes
    norm, clipped, _ = outcomes[0]
    assert norm == pytest.approx(expected, rel=1e-5)
    assert clipped == pytest.approx(0.01, rel=1e-3)
