"""haiscale.state: a checkpoint of any layout loads in any other, and of another model in none."""

import itertools
import sys
from pathlib import Path

import pytest
import torch
from hfreduce.testing import Layout, run, values

sys.path.insert(0, str(Path(__file__).parent))
import states
from haiscale.state import TrainingState, digest
from threefs.checkpoint import LocalFiles
from threefs.checkpoint.distributed import ThreeFSReader, ThreeFSWriter, latest_checkpoint

pytestmark = [
    pytest.mark.torch,
    pytest.mark.timeout(600, func_only=True),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]

ENVIRONMENT = {"HFREDUCE_DETERMINISM": "stable"}
PATIENT = {"timeout_seconds": 250.0, "deadline_seconds": 280.0}
"""A run is several steps of several ranks, which may share two busy processors."""


@pytest.fixture
def reader(tmp_path):
    return ThreeFSReader(LocalFiles(tmp_path))


@pytest.fixture
def on(tmp_path):
    """Calls a function of states.py on some ranks; returns the value of each."""

    def on(ranks, function, *arguments, deadline_seconds=280.0):
        patient = PATIENT | {"deadline_seconds": deadline_seconds}
        layout = Layout.one_node(ranks)
        return values(run(function, layout, *arguments, environment=ENVIRONMENT, **patient))

    return on


@pytest.fixture
def visit(on, tmp_path):
    """Trains in layouts of the same number of ranks; returns the losses of each job."""

    def visit(visits, experts=False, **options):
        ranks = states.ranks_of(visits[0][0])
        losses = on(ranks, states.visit, experts, str(tmp_path), visits, **options)
        assert all(each == losses[0] for each in losses)
        return losses[0]

    return visit


CHAINS = {
    "dense": [
        ["dp=2,pp=2", "dp=2,tp=2", "shard=2,pp=2"],
        ["pp=2", "dp=2", "tp=2"],
        ["shard=3"],
        ["dp=1"],
    ],
    "experts": [["dp=2,pp=2,ep=2", "dp=2,shard=2,ep=2"], ["dp=2,ep=2", "dp=2"], ["ep=1"]],
}


@pytest.mark.parametrize("kind", CHAINS)
def test_a_job_continues_in_other_layouts(visit, reader, kind):
    """Each layout continues the one before: the losses of one process, and the same state."""
    experts, losses, saved = kind == "experts", [], []
    for layouts in CHAINS[kind]:
        visits = []
        for layout in layouts:
            before = f"/run/{len(saved) - 1}" if saved else None
            saved.append(layout)
            visits.append((layout, before, len(saved), f"/run/{len(saved) - 1}"))
        losses += visit(visits, experts)
    for number, layout in enumerate(saved[1:]):
        name = f"/run/{number}"
        assert digest(reader, states.again(name, layout)) == digest(reader, name), layout
    (expected,) = visit([(saved[-1], None, len(saved), None)], experts)
    assert [*itertools.chain(*losses)] == pytest.approx(expected, rel=1e-4)


@pytest.mark.soak
@pytest.mark.timeout(3600, func_only=True)
@pytest.mark.parametrize("kind", CHAINS)
def test_every_layout_loads_every_other(visit, reader, kind):
    """All ordered pairs: equal digests after a load in another layout and a save there."""
    experts = kind == "experts"
    layouts = states.EXPERT if experts else states.DENSE
    for layout in layouts:
        visit([(layout, None, 2, f"/first/{layout}")], experts)
    for layout in layouts:
        visits = [(layout, f"/first/{other}", 2, None) for other in layouts]
        visit(visits, experts, deadline_seconds=900.0)
    saved = {layout: digest(reader, f"/first/{layout}") for layout in layouts}
    wrong = [
        (one, other)
        for one, other in itertools.product(layouts, layouts)
        if digest(reader, states.again(f"/first/{one}", other)) != saved[one]
    ]
    assert not wrong


@pytest.mark.parametrize(
    ("ranks", "layouts"), [(2, ["dp=2", "tp=2", "dp=2,ep=2"]), (4, ["shard=2,pp=2"])]
)
def test_a_job_that_resumes_has_the_bits_of_one_that_was_not_interrupted(
    on, tmp_path, reader, ranks, layouts
):
    (first, *others) = on(ranks, states.resume, str(tmp_path), layouts)
    assert all(each == first for each in others)
    for layout, (alone, resumed) in zip(layouts, first, strict=True):
        assert resumed == alone[2:], layout
        assert digest(reader, f"/resumed/{layout}") == digest(reader, f"/alone/{layout}"), layout


@pytest.mark.parametrize(("victim", "change"), [(0, 3), (1, 0)])
def test_after_a_kill_in_a_save_the_previous_checkpoint_loads(tmp_path, reader, victim, change):
    """Rank 0 dies before its commit, or rank 1 in the middle of its shard."""
    outcomes = run(
        states.rewrite, Layout.one_node(2), "shard=2", str(tmp_path), victim, change,
        environment=ENVIRONMENT, **PATIENT,
    )  # fmt: skip
    assert not outcomes[victim].answered
    assert outcomes[1 - victim].value is not None, outcomes
    assert latest_checkpoint(LocalFiles(tmp_path), "/run") == "/run/step-1"
    digest(reader, "/run/step-1")  # reads and verifies every byte
    assert TrainingState(states.llama()).load(reader, "/run/step-1") == 1


def test_a_checkpoint_of_another_model_is_refused_on_every_rank(on, tmp_path):
    model = states.llama()
    model.layers[1].more = torch.nn.Linear(3, 2)
    TrainingState(model).save(ThreeFSWriter(LocalFiles(tmp_path)), "/run/step-1", 1)
    message = (
        "/run/step-1 is of another job: 'layers.1.more.bias': found shape 2 of float32, "
        "expected nothing: load a checkpoint of this model, or start with a new folder"
    )
    assert on(2, states.refused, "pp=2", str(tmp_path), "/run/step-1") == [(message, True)] * 2


def test_an_error_of_one_rank_is_raised_on_every_rank(on, tmp_path):
    for full, broken in on(2, states.fails_to_save, str(tmp_path), deadline_seconds=60.0):
        assert full.startswith("CheckpointException")
        assert "target 3 is full: remove files" in full
        assert broken == "TypeError: Object of type object is not JSON serializable"


def test_a_rank_reads_its_part_alone(on, tmp_path):
    ranks, whole = 2, 4 * 2048 * 1025
    for bytes_read, is_equal in on(ranks, states.share, str(tmp_path)):
        assert is_equal
        assert whole / ranks <= bytes_read < whole / ranks + 2**20
