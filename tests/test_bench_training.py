"""The benchmark of training steps: its figures, and a run of its ranks."""

from typing import Any

import pytest
from hfreduce.testing import Layout

from bench import netns
from bench.collectives.harness import BenchError
from bench.rows import table
from bench.training import (
    ddp,
    figures,
    fsdp,
    moe,
    moe_rank,
    pipeline,
    pipeline_figures,
    pipeline_rank,
    sharded,
    tensor,
    tensor_rank,
)
from bench.training.models import Model
from bench.training.pipeline_models import PipelineModel
from bench.training.rank import Spec
from bench.training.session import Session
from bench.training.turns import Turns

SECONDS = {
    "alone": [3.0, 6.0],
    "wire:gloo": [4.0, 8.0],
    "wire:hfreduce": [2.0, 4.0],
    "torch+gloo": [6.0, 12.0],
    "torch+hfreduce": [4.0, 8.0],
    "haiscale": [3.0, 6.0],
}
SMALL_LLAMA = Model("llama", width=32, layers=3, context=4)
SMALL = Model("timed", width=4, layers=2, context=2, parameters=64, bucket_mebibytes=1.0)


def medians(rows: Any) -> dict[str, float | None]:
    return {row.name.removeprefix("x: "): row.median for row in rows}


def test_the_exposed_share_is_what_the_step_takes_beyond_computation() -> None:
    figure = medians(figures.ddp_rows("x", SECONDS, {}, on_wire=True))
    assert figure["torch, Gloo, exposed"] == 75.0
    assert figure["torch, HFReduce, exposed"] == 50.0
    assert figure["haiscale, exposed"] == 0.0
    assert figure["haiscale / larger part"] == 1.0
    assert figure["torch, HFReduce / larger part"] == pytest.approx(4 / 3)


def test_goals_are_compared_in_each_round() -> None:
    rows = figures.ddp_rows("x", SECONDS, {}, on_wire=False)
    goals = {row.name: (row.median, row.goal, row.reached) for row in rows if row.goal}
    assert goals == {
        "x: haiscale / torch, Gloo": (0.5, 0.6, True),
        "x: haiscale / torch, HFReduce": (0.75, 0.9, True),
    }
    slow = SECONDS | {"haiscale": [5.9, 11.8]}
    missed = figures.ddp_rows("x", slow, {}, on_wire=True)
    assert [row.name for row in missed if row.reached is False] == ["x: haiscale / larger part"]


@pytest.mark.parametrize("on_wire", [True, False])
def test_a_missing_wrapper_is_named_with_the_reason(on_wire: bool) -> None:
    seconds = {name: values for name, values in SECONDS.items() if name != "haiscale"}
    why = {"haiscale": "haiscale.ddp is not installed"}
    rows = figures.ddp_rows("x", seconds, why, on_wire=on_wire)
    absences = [row for row in rows if row.median is None]
    assert {row.note for row in absences} == {why["haiscale"]}
    assert any(row.goal for row in absences)
    assert all(row.reached is None for row in absences)
    assert "haiscale.ddp is not installed" in table(rows)


def test_names_of_all_rows_fit_the_table() -> None:
    titles = [*ddp.GPT_LAYOUTS, *ddp.COMPUTE]
    rows = [
        row
        for title in titles
        for row in figures.ddp_rows(title, SECONDS, {}, on_wire=title in ddp.COMPUTE)
    ]
    assert all(row.name in table([row]) for row in rows)


@pytest.mark.torch
def test_ranks_train_with_each_backend_and_agree_on_the_parameters() -> None:
    with Session() as session:
        spec = Spec("small", SMALL, ("hfreduce", "gloo"))
        turns = Turns(session.start(spec, Layout.one_node(2)))
        turns.run(["alone", "wire:gloo", "wire:hfreduce", "torch+gloo", "torch+hfreduce"], 1)
        assert all(len(values) == 1 for values in turns.seconds.values())
        with pytest.raises(BenchError, match="small: torch\\+mpi: KeyError: 'mpi'"):
            turns.once("torch+mpi")


@pytest.mark.torch
def test_different_parameters_end_the_measurement() -> None:
    with Session() as session:
        turns = Turns(session.start(Spec("small", SMALL, ("gloo",)), Layout.one_node(2)))
        with pytest.raises(BenchError, match="wrong parameters, which differ between ranks"):
            turns.once("alone", check=True)


@pytest.mark.torch
@pytest.mark.skipif(netns.missing() is not None, reason="namespaces need root, ip and tc")
def test_ranks_on_the_wire_use_the_link_of_their_node() -> None:
    with Session() as session:
        spec = Spec("small", SMALL, ("hfreduce", "gloo"))
        turns = Turns(session.start_on_wire(spec, (1, 1), 2, 1000))
        for name in ("torch+gloo", "torch+hfreduce"):
            before = session.networks[0].crossed()
            turns.once(name, 4, check=True)
            sent = [b - a for a, b in zip(before, session.networks[0].crossed(), strict=True)]
            assert min(sent) > 4 * 64 * 4, "each zone sent its gradients of four steps"


def test_bubbles_are_shares_of_the_step_and_compared_with_theory() -> None:
    work = pipeline_figures.work_seconds(16, 0.01)
    seconds = {
        "1F1B": [work / (1 - 0.16)],
        "Interleaved1F1B": [work / (1 - 0.11)],
        "ZBVZeroBubble": [work / (1 - 0.05)],
        pipeline_figures.TORCH: [work * 2],
    }
    rows = pipeline_figures.bubble_rows(4, 16, 0.01, seconds)
    assert [row.median for row in rows] == pytest.approx([16, 11, 5, 50])
    assert [row.reached for row in rows] == [True, False, False, None]
    assert [row.name.split("theory ")[1] for row in rows] == [
        "15.8 %)",
        "8.6 %)",
        "3.0 %)",
        "15.8 %)",
    ]
    assert all(row.name in table([row]) for row in rows)


def test_steps_on_the_wire_are_multiples_of_the_step_without() -> None:
    ideal = pipeline_figures.ideal_seconds(4, 16, 0.01)
    assert ideal == pytest.approx(19 * 0.06)
    seconds = {"Eager1F1B": [1.05 * ideal, 1.2 * ideal], pipeline_figures.TORCH: [1.4 * ideal] * 2}
    unlimited = {"Eager1F1B": [ideal, ideal]}
    rows = pipeline_figures.wire_rows(pipeline.names()[0], ideal, seconds, unlimited, 1.1)
    assert [row.median for row in rows] == pytest.approx([1.125, 1.4, 1.125, (0.75 + 6 / 7) / 2])
    assert [row.reached for row in rows] == [None, None, False, None]
    assert all(row.name in table([row]) for row in rows)


def test_layers_take_the_time_with_which_the_card_is_busy() -> None:
    """At 500 Mb/s four messages of 512 KiB take 33.6 ms; at 40 % that is a slot of 83.9 ms."""
    assert 6 * pipeline.layer_seconds(0.4) == pytest.approx(0.0839, abs=1e-4)


@pytest.mark.torch
def test_pipelines_of_all_variants_have_the_same_gradients() -> None:
    with Session(pipeline_rank.rank_main) as session:
        model = PipelineModel(2, 2, 4, rows=2, width=4)
        spec = Spec("pipelines", model, ("hfreduce", "gloo"))
        turns = Turns(session.start(spec, Layout.one_node(4)), compute_seconds=1e-4)
        turns.run(pipeline.SCHEDULES, 1, once=True)
        assert set(turns.seconds) == set(pipeline.SCHEDULES)


def test_experts_are_compared_with_one_copy_for_each_expert_over_gloo() -> None:
    seconds = {moe.OURS: [1.0, 4.0], moe.PLAIN_GLOO: [2.0, 5.0]}
    rows = moe.moe_rows("x", seconds, {moe.OURS: 5.5e6, moe.PLAIN_GLOO: 10e6})
    goals: dict[str, tuple[object, ...]] = {
        row.name: (row.median, row.goal, row.reached) for row in rows if row.goal
    }
    assert goals == {
        "x: bytes / copy per expert": (pytest.approx(0.55), 0.57, True),
        "x: step / all-to-all, Gloo": (pytest.approx(0.65), 0.6, False),
    }


def test_divided_matrices_are_compared_with_gloo_and_with_one_rank() -> None:
    seconds = {name: [4.0] for name in tensor.VARIANTS} | {"hfreduce": [1.0], "alone": [2.0]}
    rows = {row.name: row for row in tensor.tensor_rows("x", 512, seconds)}
    assert rows["x: HFReduce / Gloo"].reached
    assert rows["x: the same, sequence"].reached is False
    assert rows["x: HFReduce / one rank"].median == 0.5
    assert rows["x: HFReduce / one rank"].goal is None
    wide = {row.name: row for row in tensor.tensor_rows("x", 1024, seconds)}
    assert wide["x: HFReduce / Gloo"].goal is None
    assert wide["x: HFReduce / one rank"].goal == 1.0


@pytest.mark.alone
@pytest.mark.torch
def test_ranks_with_experts_and_divided_matrices_run_every_variant() -> None:
    layer = moe_rank.Layer(
        width=16, hidden=8, experts=8, top_k=2, tokens=12, nodes=2, ranks_per_node=1
    )
    with Session(moe_rank.rank_main) as session:
        spec = Spec("moe", layer, ("hfreduce", "gloo"))
        turns = Turns(session.start(spec, Layout((("n0", "A"), ("n1", "A")), 1)))
        for name in moe.VARIANTS:
            assert turns.once(name, check=True) > 0
    with Session(tensor_rank.rank_main) as session:
        spec = Spec("tensor", None, ("hfreduce", "gloo"))
        turns = Turns(session.start(spec, Layout.one_node(2)), batch=32)
        for name in tensor.VARIANTS:
            assert turns.once(name, check=name != "alone") > 0


def test_the_hidden_share_is_what_the_step_does_not_take_beyond_computation() -> None:
    seconds = {"alone": [3.0], "wire": [4.0], fsdp.OURS: [3.4], fsdp.HFREDUCE: [7.0]}
    rows = fsdp.wire_rows("x", seconds, "wire", [fsdp.OURS, fsdp.HFREDUCE])
    figure = medians(rows)
    assert figure["haiscale.fsdp, hidden"] == pytest.approx(90.0)
    assert figure["torch FSDP2, HFReduce, hidden"] == pytest.approx(0.0)
    assert [row.reached for row in rows if row.goal] == [True]


@pytest.mark.torch
def test_sharded_variants_train_and_their_state_is_counted() -> None:
    with Session() as session:
        spec = Spec("small", SMALL_LLAMA, ("hfreduce", "gloo"))
        turns = Turns(session.start(spec, Layout.one_node(2)))
        turns.run(["alone", *fsdp.TITLES, f"{sharded.WIRE}hfreduce"], 1)
        state = {name: turns.once(f"{sharded.MEMORY}{name}") for name in fsdp.TITLES}
    parameters = 4 * sum(p.numel() for p in SMALL_LLAMA.build().parameters())
    # Parameters and two states; gradients are released bucket by bucket.
    assert 3 * parameters <= state["haiscale"] < 4.1 * parameters
    assert 2 * parameters <= state[fsdp.OURS] < 3 * parameters
