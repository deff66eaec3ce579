"""The benchmark of training steps: its figures, and a run of its ranks."""

from typing import Any

import pytest
from hfreduce.testing import Layout

from bench import netns
from bench.collectives.harness import BenchError
from bench.rows import table
from bench.training import ddp, figures
from bench.training.models import Model
from bench.training.rank import Spec
from bench.training.session import Session

SECONDS = {
    "alone": [3.0, 6.0],
    "wire:gloo": [4.0, 8.0],
    "wire:hfreduce": [2.0, 4.0],
    "torch+gloo": [6.0, 12.0],
    "torch+hfreduce": [4.0, 8.0],
    "haiscale": [3.0, 6.0],
}
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
        turns = ddp.Turns(session.start(spec, Layout.one_node(2)))
        turns.run(["alone", "wire:gloo", "wire:hfreduce", "torch+gloo", "torch+hfreduce"], 1)
        assert all(len(values) == 1 for values in turns.seconds.values())
        with pytest.raises(BenchError, match="small: torch\\+mpi: KeyError: 'mpi'"):
            turns.once("torch+mpi")


@pytest.mark.torch
def test_different_parameters_end_the_measurement() -> None:
    with Session() as session:
        turns = ddp.Turns(session.start(Spec("small", SMALL, ("gloo",)), Layout.one_node(2)))
        with pytest.raises(BenchError, match="wrong parameters, which differ between ranks"):
            turns.once("alone", check=True)


@pytest.mark.torch
@pytest.mark.skipif(netns.missing() is not None, reason="namespaces need root, ip and tc")
def test_ranks_on_the_wire_use_the_link_of_their_node() -> None:
    with Session() as session:
        spec = Spec("small", SMALL, ("hfreduce", "gloo"))
        turns = ddp.Turns(session.start_on_wire(spec, (1, 1), 2, 1000))
        for name in ("torch+gloo", "torch+hfreduce"):
            before = session.networks[0].crossed()
            turns.once(name, 4, check=True)
            sent = [b - a for a, b in zip(before, session.networks[0].crossed(), strict=True)]
            assert min(sent) > 4 * 64 * 4, "each zone sent its gradients of four steps"
