"""Simulated steps: values of an independent model, closed forms, and deadlocks.

The reference values are ratios to a step without transfers; computations vary by 2 %.
"""

import random

import pytest
from haiscale.model import (
    Collective,
    Compute,
    DeadlockError,
    Finish,
    Receive,
    Send,
    Sharing,
    Start,
    run,
)
from haiscale.model.data_parallel import Layer, replicated_step, sharded_step
from haiscale.model.pipelines import Pipeline, Sum, Times, random_schedule
from haiscale.pipeline.actions import Kind, ScheduleError, from_csv
from haiscale.pipeline.schedules import NAMES, build, eager_1f1b, gpipe, one_f_one_b
from haiscale.pipeline.timing import play

REFERENCE = {
    # stages, replicas, micro-batches, share of the card
    (4, 2, 16, 0.2): (1.165, 1.119, 1.072, 1.019, 1.014, 1.070),
    (4, 2, 16, 0.4): (1.349, 1.266, 1.148, 1.052, 1.033, 1.143),
    (4, 2, 16, 0.7): (1.618, 1.469, 1.263, 1.103, 1.061, 1.253),
    (4, 4, 16, 0.4): (1.206, 1.167, 1.078, 1.040, 1.018, 1.066),
    (4, 4, 16, 0.9): (1.496, 1.424, 1.204, 1.121, 1.048, 1.158),
    (8, 8, 32, 0.4): (1.131, 1.103, 1.049, 1.028, 1.007, 1.037),
}
# Schedule, sharing, blocking sends, and the relative difference that is allowed.
COLUMNS = (
    (one_f_one_b, Sharing.FAIR, True, 0.025),
    (one_f_one_b, Sharing.FAIR, False, 0.025),
    (one_f_one_b, Sharing.TURNS, False, 0.01),
    (eager_1f1b, Sharing.FAIR, False, 0.015),
    (eager_1f1b, Sharing.TURNS, False, 0.01),
    (one_f_one_b, Sharing.SEPARATE, False, 0.01),
)


def step(schedule, sharing, hop, *, stages, replicas, microbatches, blocking=False, **options):
    pipeline = Pipeline(
        schedule(stages, microbatches), replicas, Times(1, 2), hop, blocking, **options
    )
    actions, nodes, collectives = pipeline.build()
    return run(actions, nodes, sharing=sharing, collectives=collectives)


@pytest.mark.parametrize("case", REFERENCE, ids=str)
def test_pipelines_that_share_a_card(case):
    stages, replicas, microbatches, share = case
    size = {"stages": stages, "replicas": replicas, "microbatches": microbatches, "jitter": 0.02}
    hop = share * 3 / (2 * replicas)  # in steady state each rank sends twice in 3 units
    seeds = range(4 if stages == 4 else 1)
    plain = [step(one_f_one_b, Sharing.SEPARATE, 0.0, seed=seed, **size).seconds for seed in seeds]
    for (schedule, sharing, blocking, tolerance), expected in zip(
        COLUMNS, REFERENCE[case], strict=True
    ):
        times = [
            step(schedule, sharing, hop, blocking=blocking, seed=seed, **size).seconds
            for seed in seeds
        ]
        ratio = sum(a / b for a, b in zip(times, plain, strict=True)) / len(plain)
        assert ratio == pytest.approx(expected, rel=tolerance), (schedule.__name__, sharing)


@pytest.mark.parametrize(
    ("transfer", "with_barrier", "without"),
    [(2, 3.167, 3.167), (3, 4.167, 3.25), (4, 5.167, 4.25), (6, 7.167, 6.25)],
)
def test_sums_of_layers_with_a_barrier_and_without(transfer, with_barrier, without):
    layers = [Layer(1 / 12, 2 / 12, transfer / 12)] * 12
    assert replicated_step(layers, barrier=True) == pytest.approx(with_barrier, abs=1e-3)
    assert replicated_step(layers, barrier=False) == pytest.approx(without, abs=1e-3)


def test_a_sharded_step_hides_transfers_up_to_the_computation():
    def layers(transfer):
        return [Layer(1.0, 2.0, transfer)] * 8

    assert sharded_step(layers(0.0)) == pytest.approx(24)
    hidden = sharded_step(layers(0.5))
    assert hidden == pytest.approx(24 + 0.5 + 0.5)  # first gather, last scatter
    assert sharded_step(layers(10.0)) >= 3 * 8 * 10  # three passes over the card


@pytest.mark.parametrize("schedule", [one_f_one_b, eager_1f1b, gpipe])
def test_without_transfers_only_the_bubble_is_added(schedule):
    outcome = step(schedule, Sharing.TURNS, 0.0, stages=4, replicas=2, microbatches=16)
    assert outcome.seconds == pytest.approx((16 + 4 - 1) * 3)
    assert outcome.computed == dict.fromkeys(range(8), pytest.approx(48))


def test_the_parts_of_a_split_backward_pass_take_its_time():
    actions, nodes, _ = Pipeline(from_csv("0F0,0I0,0W0\n1F0,1I0,1W0"), 1, Times(1, 2), 0.5).build()
    outcome = run(actions, nodes, trace=True)
    assert outcome.seconds == pytest.approx(1 + 0.5 + 1 + 1 + 0.5 + 1 + 1)
    kinds = [span.name.kind for span in outcome.spans if span.rank == 1]
    assert kinds == [Kind.FORWARD, Kind.INPUT, Kind.WEIGHT]


def test_stages_of_one_rank_send_nothing_to_each_other():
    actions, _, _ = Pipeline(from_csv("0F0,1F0,1B0,0B0"), 1, Times(1, 2), 0.5).build()
    assert all(isinstance(action, Compute) for action in actions[0])
    with pytest.raises(ScheduleError, match="stage 0 is on the ranks 0 and 1"):
        Pipeline(from_csv("0F0\n0B0"), 1, Times(1, 2))


def test_sums_are_sent_during_the_last_backward_pass():
    size = {"stages": 2, "replicas": 2, "microbatches": 4}
    bare = step(one_f_one_b, Sharing.TURNS, 0.0, **size).seconds
    for pieces, added in ((1, 1.0), (4, 0.25)):
        outcome = step(one_f_one_b, Sharing.TURNS, 0.0, gradients=Sum(1.0, pieces), **size)
        assert outcome.seconds == pytest.approx(bare + added)
        assert outcome.sent == {0: pytest.approx(1.0), 1: pytest.approx(1.0)}


def test_a_deadlock_names_ranks_and_messages():
    with pytest.raises(DeadlockError) as raised:
        run([[Compute(1), Receive(1, "x")], [Receive(0, "y")]], [0, 1])
    assert raised.value.waiting == {
        0: "message 'x' from rank 1",
        1: "message 'y' from rank 0",
    }
    sums = {"sum": Collective((0, 1, 2), 1.0)}
    with pytest.raises(DeadlockError, match=r"collective 'sum', which ranks \[1, 2\] have not"):
        run([[Start("sum"), Finish("sum")], [], []], [0, 1, 1], collectives=sums)
    # A blocking send ends when the message is there, also if it is received later.
    assert run([[Send(1, "x", 2.0, blocking=True)], [Compute(9), Receive(0, "x")]], [0, 1]).ended


def test_a_run_is_repeatable():
    size = {"stages": 3, "replicas": 3, "microbatches": 7, "jitter": 0.3}
    outcomes = [step(one_f_one_b, Sharing.FAIR, 0.3, seed=seed, **size) for seed in (1, 1, 2)]
    assert outcomes[0] == outcomes[1]
    assert outcomes[0].seconds != outcomes[2].seconds


def test_programs_without_nodes_are_refused():
    with pytest.raises(ValueError, match="2 programs and 1 nodes"):
        run([[], []], [0])


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ([Compute(-1.0)], "expected at least 0"),
        ([Compute(float("nan"))], "expected at least 0"),
        ([Send(1, "x", -1.0)], "expected at least 0"),
        ([Send(2, "x", 1.0)], "unknown rank 2"),
        ([Send(-1, "x", 1.0)], "unknown rank -1"),
        ([Send(1, "x", 1.0), Send(1, "x", 1.0)], "is sent twice"),
        ([Start("y")], "unknown collective 'y'"),
        ([Finish("y")], "unknown collective 'y'"),
        ([Start("of rank 1")], "each of them starts it once"),
    ],
)
def test_invalid_actions_are_refused(program, message):
    collectives = {"of rank 1": Collective((1,), 1.0)}
    with pytest.raises(ValueError, match=message):
        run([program, []], [0, 1], collectives=collectives)


@pytest.mark.parametrize("seed", range(30))
def test_random_schedules_are_valid(seed):
    draw = random.Random(seed)
    ranks, chunks, microbatches = draw.randint(1, 4), draw.randint(1, 3), draw.randint(1, 6)
    schedule = random_schedule(draw, ranks, chunks, microbatches)
    pipeline = Pipeline(schedule, 2, Times(1, 2), 0.3, gradients=Sum(1.0, 2))
    assert len(pipeline.owners) == ranks * chunks
    actions, nodes, collectives = pipeline.build()
    outcome = run(actions, nodes, collectives=collectives)
    whole = chunks * microbatches * 3
    assert outcome.computed == dict.fromkeys(range(2 * ranks), pytest.approx(whole))


@pytest.mark.parametrize("name", NAMES)
def test_schedules_take_the_time_of_their_timeline(name):
    schedule = build(name, ranks=4, microbatches=8)
    for hop in (0.0, 0.3):
        actions, nodes, _ = Pipeline(schedule, 1, Times(1, 2), hop).build()
        outcome = run(actions, nodes, sharing=Sharing.SEPARATE)
        assert outcome.seconds == pytest.approx(play(schedule, hop=hop).end)
