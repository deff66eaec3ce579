"""haiscale.pipeline: the bits of one process that accumulates the same micro-batches."""

import sys
from pathlib import Path

import pytest
from hfreduce.testing import Layout, run, values

sys.path.insert(0, str(Path(__file__).parent))
import pipelines

pytestmark = pytest.mark.torch

STABLE = {"HFREDUCE_DETERMINISM": "stable"}
NAMES = ("GPipe", "1F1B", "Eager1F1B", "Interleaved1F1B", "ZBVZeroBubble", "csv")


@pytest.fixture(scope="module")
def outcomes():
    """One set of ranks for all schedules."""
    cases = [(name, 8, False) for name in NAMES]
    return values(run(pipelines.bits, Layout.one_node(4), cases, environment=STABLE))


@pytest.mark.parametrize("index", range(len(NAMES)), ids=NAMES)
def test_parameters_losses_and_norms_have_the_bits_of_one_process(outcomes, index):
    everything = set()
    for results in outcomes:
        name, differing, _, own, history, names = results[index]
        assert name == NAMES[index]
        assert differing == []
        assert own == history
        everything.update(names)
    expected, _ = pipelines.reference(8, steps=0)
    assert everything == set(expected)


def test_tied_embeddings_are_those_of_one_process_within_rounding():
    """One rank has both (V) or two ranks have a copy each; the copies stay equal."""
    cases = [(name, 8, True) for name in ("1F1B", "Interleaved1F1B", "ZBVZeroBubble")]
    outcomes = values(run(pipelines.bits, Layout.one_node(4), cases, environment=STABLE))
    for rank, results in enumerate(outcomes):
        for name, _, largest, own, history, names in results:
            assert largest < 1e-5, (rank, name)
            for (loss, norm), (expected_loss, expected_norm) in zip(own, history, strict=True):
                assert loss == pytest.approx(expected_loss, rel=1e-5)
                assert norm == pytest.approx(expected_norm, rel=1e-5)
            holds = {"embed.weight", "head.weight"} & set(names)
            assert bool(holds) == (rank in {0, 3} if name != "ZBVZeroBubble" else rank == 0)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["1F1B", "ZBVZeroBubble"])
def test_replicas_are_averaged_stage_by_stage(name, tied):
    """The second replica starts with other parameters: those of the first one reach it."""
    layout = Layout.one_node(4)
    for (differing, largest), own, history in values(
        run(pipelines.replicas, layout, name, 4, tied, environment=STABLE)
    ):
        if tied:
            assert largest < 1e-5
        else:
            assert differing == []
            assert [norm for _, norm in own] == [norm for _, norm in history]


def test_a_test_can_tell_runs_apart():
    first, _ = pipelines.reference(8)
    other, _ = pipelines.reference(4)
    assert any(not first[name].equal(other[name]) for name in first)


@pytest.mark.parametrize("tied", [False, True])
def test_steps_accumulate_and_the_scale_of_a_sum_over_tokens_is_exact(tied):
    """No gradient is divided, or added twice, by the next step."""
    for found in values(
        run(pipelines.accumulated, Layout.one_node(4), 4, tied, environment=STABLE)
    ):
        for name, (has_the_bits, error) in found.items():
            assert error < 1e-5, name
            assert has_the_bits or (tied and name in {"embed.weight", "head.weight"}), name
