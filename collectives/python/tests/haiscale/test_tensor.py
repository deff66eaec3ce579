"""haiscale.tensor: divided matrices train as whole ones, and plans that do not fit are refused."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hfreduce.testing import Layout, run, values
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
import tensor_ranks
from haiscale import tensor
from haiscale.tensor import plan

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300, func_only=True)]


@pytest.fixture(scope="module", params=["hfreduce", "gloo"])
def results(request):
    return values(run(tensor_ranks.modes, Layout.one_node(2), backend=request.param))


@pytest.fixture(scope="module")
def reference():
    torch.manual_seed(11)
    model = tensor_ranks.Llama()
    for layer in model.layers:
        nn.init.normal_(layer.ffn_norm.weight)
    whole = sum(p.numel() for p in model.parameters())
    return *tensor_ranks.train(model), whole


@pytest.mark.parametrize("divided", [False, True], ids=["logits whole", "logits divided"])
@pytest.mark.parametrize("sequence", [False, True], ids=["whole sequence", "sequence divided"])
def test_gradients_and_losses_are_those_of_one_process(results, reference, sequence, divided):
    first, expected_norm, losses, whole = reference
    for modes, _, _ in results:
        gradients, norm, found, own = modes[sequence, divided]
        assert gradients.keys() == first.keys()
        for name, expected in first.items():
            error = (torch.tensor(gradients[name]) - expected).norm() / expected.norm()
            assert error < 1e-5, (name, error)
        assert norm == pytest.approx(expected_norm, rel=1e-5)
        assert found == pytest.approx(losses, rel=1e-4)
        kept = (5 + 2) * tensor_ranks.WIDTH  # norms, and the biases of divided rows
        assert own == (whole - kept) / 2 + kept


def test_lengths_and_tokens_that_do_not_fit_are_named_on_every_rank(results):
    for _, errors, _ in results:
        assert errors == [
            "input: length 7 does not divide into 2 ranks: pad the sequences",
            "tokens from 96 to 96: the vocabulary has those from 0 to 95: check the tokenizer",
        ]


def test_a_copy_is_separate_and_a_failed_pass_changes_no_parameter(results):
    for _, _, copies in results:
        assert copies == (True, True)


def test_gradients_of_replicas_of_a_divided_model_are_averaged():
    for found in values(run(tensor_ranks.averaged, Layout.one_node(4))):
        assert found == (True, [1.0], [1.5])


def test_the_wrapper_of_plain_tensors_refuses_a_divided_model():
    for error in values(run(tensor_ranks.wrapped, Layout.one_node(2))):
        assert error.startswith("tok_embeddings.weight: a DTensor")
        assert "use haiscale.fsdp.fully_shard" in error


def test_norms_without_parameters_share_their_output_and_none_is_refused():
    torch.manual_seed(11)
    expected, _, _ = tensor_ranks.train(tensor_ranks.without_weights(tensor_ranks.Llama()), steps=1)
    for gradients, error in values(run(tensor_ranks.bare, Layout.one_node(2))):
        assert gradients.keys() == expected.keys()
        for name, each in expected.items():
            torch.testing.assert_close(torch.tensor(gradients[name]), each, rtol=1e-4, atol=1e-6)
        assert "gradients would be partial: layers.0.attention.wq: list the norm before" in error


MESH = SimpleNamespace(ndim=1, size=lambda: 2)
"""Checks need no group."""


def changed(**modules):
    model = tensor_ranks.Llama()
    for name, module in modules.items():
        setattr(model, name, module)
    return model


def with_norms_of_queries():
    model = tensor_ranks.Llama()
    for layer in model.layers:
        layer.attention.q_norm = nn.RMSNorm(tensor_ranks.HEAD)
    return model


def with_patterns(**patterns):
    """Meta's names with more of them."""
    return replace(
        tensor.LLAMA,
        **{part: getattr(tensor.LLAMA, part) + more for part, more in patterns.items()},
    )


@pytest.mark.parametrize(
    ("model", "options", "error", "match"),
    [
        (lambda: changed(extra=nn.Linear(2, 2)), {}, tensor.PlanError,
         "modules with parameters have no place in the plan: extra: name them in"),
        (lambda: changed(norm=None), {}, tensor.PlanError,
         "patterns of the plan match no module with parameters, and no norm: 'norm': correct"),
        (lambda: tensor_ranks.Llama(vocabulary=95), {}, tensor.SizeError,
         "tok_embeddings: num_embeddings 95 does not divide into 2 ranks: choose a multiple"),
        (lambda: changed(output=nn.Linear(64, 95)), {}, tensor.SizeError,
         "output: out_features 95 does not divide into 2 ranks"),
        (lambda: tensor_ranks.Llama(head=32), {"head_width": 32}, tensor.SizeError,
         r"layers.0.attention.wk: number of heads 1 does not divide into 2 ranks"),
        (lambda: changed(tok_embeddings=nn.Embedding(96, 64, max_norm=1.0)), {}, tensor.PlanError,
         "without max_norm, scale_grad_by_freq and sparse, and these are not: tok_embeddings"),
        (tensor_ranks.Llama, {"head_width": 5}, ValueError,
         "layers.0.attention.wq: out_features 64 is not a multiple of head_width 5"),
        (lambda: changed(output=nn.LayerNorm(64)), {}, tensor.PlanError,
         "head are linear layers, and these are not: output"),
        (tensor_ranks.Llama, {"plan": tensor.Plan(columns=("*",), rows=("*.wo",))},
         tensor.PlanError, "layers.0.attention.wo matches several parts of the plan: columns"),
        (tensor_ranks.Llama, {"plan": tensor.Plan(replicated=("*",)), "sequence": True},
         tensor.PlanError, "modules that are replicated would see a part of the sequence"),
        (with_norms_of_queries, {"plan": with_patterns(replicated=("*q_norm",))}, tensor.PlanError,
         "columns of one rank, which is not supported: layers.0.attention.q_norm"),
        (with_norms_of_queries, {"plan": with_patterns(norms=("*q_norm",))}, tensor.PlanError,
         "columns of one rank, which is not supported: layers.0.attention.q_norm"),
        (tensor_ranks.Llama, {"plan": tensor.HUGGING_FACE}, tensor.PlanError,
         "have no place in the plan: tok_embeddings, layers.0.attention.wq"),
    ],
)  # fmt: skip
def test_a_model_that_does_not_fit_the_plan_is_refused_unchanged(model, options, error, match):
    subject = model()
    before = {name: id(p) for name, p in subject.named_parameters()}
    with pytest.raises(error, match=match):
        tensor.parallelize(subject, MESH, **options)
    assert {name: id(p) for name, p in subject.named_parameters()} == before


def test_tied_weights_are_refused():
    model = tensor_ranks.Llama()
    model.output.weight = model.tok_embeddings.weight
    with pytest.raises(tensor.PlanError, match=r"share a parameter.*: tok_embeddings, output"):
        tensor.parallelize(model, MESH)


def test_one_rank_changes_nothing():
    model = tensor_ranks.Llama()
    mesh = SimpleNamespace(ndim=1, size=lambda: 1)
    assert tensor.parallelize(model, mesh, head_width=16) is model
    assert not any(hasattr(p, "placements") for p in model.parameters())


def test_hugging_faces_names_have_a_place():
    blocks = {
        "self_attn": {"q_proj", "k_proj", "v_proj", "o_proj"},
        "mlp": {"gate_proj", "up_proj", "down_proj"},
    }
    inner = nn.ModuleDict({"embed_tokens": nn.Embedding(8, 4), "norm": nn.RMSNorm(4)})
    layer = nn.ModuleDict(
        {part: nn.ModuleDict({n: nn.Linear(4, 4) for n in sorted(names)})
         for part, names in blocks.items()}
    )  # fmt: skip
    layer["input_layernorm"], layer["post_attention_layernorm"] = nn.RMSNorm(4), nn.RMSNorm(4)
    inner["layers"] = nn.ModuleList([layer])
    model = nn.ModuleDict({"model": inner, "lm_head": nn.Linear(4, 8, bias=False)})
    parts = plan.parts_of(model, tensor.HUGGING_FACE)
    assert parts["model.layers.0.self_attn.q_proj"] == "columns"
    assert parts["model.layers.0.mlp.down_proj"] == "rows"
    assert parts["model.norm"] == "norms"
    assert len(parts) == 12
