"""haiscale.moe with unusual and wrong input, and with ranks that fail: named errors, no hang."""

import re
import sys
from pathlib import Path

import pytest
from hfreduce.testing import Layout, run, values

sys.path.insert(0, str(Path(__file__).parent))
import expert_ranks
from haiscale import moe

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300, func_only=True)]

LAYOUT = Layout((("n0", "A"), ("n1", "A")), 2)
NODES = {"TEST_NODES": "2"}
PATIENCE_SECONDS = 110


def test_unusual_choices_are_computed_as_in_one_process():
    for errors in values(run(expert_ranks.extremes, LAYOUT, environment=NODES)):
        assert len(errors) == 8
        assert max(errors.values()) < 1e-5, errors


@pytest.fixture(scope="module")
def reports():
    return values(run(expert_ranks.wrong, LAYOUT, environment=NODES))


@pytest.mark.parametrize(("name", "culprit"), [("NaN", 2), ("infinity", 0)])
def test_a_rank_whose_scores_are_not_finite_is_named_on_all_ranks(reports, name, culprit):
    for report in reports:
        kind, text, rank, layer = report[name]
        assert (kind, rank, layer) == ("NonFiniteError", culprit, "moe 0")
        assert f"scores of the router on rank {culprit} are NaN or infinite" in text


def test_a_rank_that_has_all_experts_is_named_too():
    named = values(run(expert_ranks.wrong_alone, Layout.one_node(2)))
    assert named == [[0, 0], [1, 1]]


@pytest.mark.parametrize("name", ["width", "expert"])
def test_a_rank_with_invalid_input_raises_its_error_and_the_others_name_it(reports, name):
    for rank, report in enumerate(reports):
        kind, text, culprit, _ = report[name]
        if rank == 1:
            assert kind == "ValueError"
            expected = "expected 48 as the last dimension" if name == "width" else "0 to 15"
            assert expected in text
        else:
            assert (kind, culprit) == ("ExchangeError", 1)
            assert "layer 'moe 0': rank 1 failed before its tokens were sent" in text


@pytest.mark.parametrize(
    ("name", "field"),
    [("top_k", "top_k is 3 on rank 3 and 2 on rank 0"),
     ("hidden", "hidden is 8 on rank 3 and 32 on rank 0"),
     ("experts", "the number of experts is 32 on rank 3 and 16 on rank 0"),
     ("order", "of layer 1, rank 0 in call")],
)  # fmt: skip
def test_another_layer_on_one_rank_is_an_error_on_all(reports, name, field):
    for report in reports:
        kind, text, culprit, _ = report[name]
        assert (kind, culprit) == ("ExpertMismatchError", 3)
        assert field in text


def test_experts_that_do_not_divide_into_the_ranks_are_refused():
    links = moe.Links(ranks=(0, 1, 2))
    with pytest.raises(ValueError, match="layer 'moe 0': 16 experts do not divide into 3 ranks"):
        moe.MoE(8, 8, 16, moe.Routing(2), links=links)


def test_a_wrapper_that_would_give_ranks_the_same_experts_is_refused_before_any_change():
    outcomes = values(run(expert_ranks.wrapped, Layout.one_node(4), 2))
    for error, is_kept, _ in outcomes:
        assert error is not None
        assert re.match(r"layers.0.experts: the ranks \[(0, 1|2, 3)\] have different", error)
        assert "call haiscale.moe.average_gradients" in error
        assert is_kept
    # Ranks with the same experts may be wrapped.
    experts = [each for _, _, each in outcomes]
    assert experts[:2] == experts[2:]
    assert experts[0] != experts[1]


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("kind", ["kill", "raise"])
def test_a_rank_that_fails_ends_the_waits_of_the_others(phase, kind):
    outcomes = run(
        expert_ranks.fails, LAYOUT, phase, kind, lost_ranks=[1],
        environment=NODES | {"HFREDUCE_LIVENESS_SECONDS": "6"},
        timeout_seconds=PATIENCE_SECONDS, deadline_seconds=PATIENCE_SECONDS,
    )  # fmt: skip
    for outcome in (outcomes[0], outcomes[2], outcomes[3]):
        assert outcome.failure is None, outcome
        step, error, text, layer, culprit, seconds = outcome.value
        assert (error, layer, culprit) == ("ExchangeError", "deep", 1), outcome.value
        # In the backward pass rank 1 may have sent all of its step's data when it fails.
        assert step == 2 or (step == 3 and phase == "backward")
        assert "rank 1 failed" in text
        assert seconds < PATIENCE_SECONDS / 2, "ended by its deadline alone"
