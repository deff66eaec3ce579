"""Schedules of pipelines: each pass once, no deadlock, bounded activations, the theory's bubble."""

import subprocess
import sys
from collections import Counter
from xml.etree import ElementTree as ET

import pytest
from haiscale.pipeline import picture, schedules
from haiscale.pipeline.actions import Action, Kind, Schedule, ScheduleError, from_csv, to_csv
from haiscale.pipeline.check import check
from haiscale.pipeline.timing import in_flight, play

F, B, W = Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT
RANKS = (1, 2, 3, 4, 8)


def every(ranks_of=RANKS, rounds=(1, 2, 3, 5)):
    """All schedules for several sizes."""
    for p in ranks_of:
        for name in schedules.NAMES:
            for chunks in (1, 2, 3) if name == "Interleaved1F1B" else (1,):
                least = 2 * p - 1 if name == "ZBVZeroBubble" else p
                for k in rounds:
                    m = p * k if name == "Interleaved1F1B" else least + 2 * (k - 1)
                    yield schedules.build(name, ranks=p, microbatches=m, stages_per_rank=chunks)


ALL = list(every())


def label(schedule):
    return f"{schedule.name}-{len(schedule.ranks)}-{schedule.stages}-{schedule.microbatches}"


@pytest.mark.parametrize("schedule", ALL, ids=label)
def test_every_pass_is_there_once_and_the_order_is_possible(schedule):
    check(schedule, ranks=len(schedule.ranks))
    counts = Counter(action for actions in schedule.ranks for action in actions)
    assert set(counts.values()) == {1}
    split = schedule.name == "ZBVZeroBubble"
    passes = schedule.stages * schedule.microbatches
    assert sum(counts.values()) == passes * (3 if split else 2)


@pytest.mark.parametrize("schedule", ALL, ids=label)
def test_gradients_of_a_stage_are_added_in_the_order_of_the_micro_batches(schedule):
    """The order of one process that accumulates them: the bits are the same."""
    for actions in schedule.ranks:
        order = {}
        for action in actions:
            if action.kind in {B, W}:
                order.setdefault(action.stage, []).append(action.microbatch)
        assert all(each == list(range(schedule.microbatches)) for each in order.values())


@pytest.mark.parametrize("schedule", ALL, ids=label)
def test_activations_in_flight_are_bounded_as_stated(schedule):
    p, m, v = len(schedule.ranks), schedule.microbatches, schedule.stages // len(schedule.ranks)
    for k in range(p):
        bound = {
            "GPipe": m,
            "1F1B": p - k,
            "Eager1F1B": 2 * (p - k) - 1,
            "Interleaved1F1B": (v - 1) * p + 2 * (p - k) - 1,
            "ZBVZeroBubble": 2 * p,
        }[schedule.name]
        assert in_flight(schedule, k) == min(bound, m * v), (k, bound)


@pytest.mark.parametrize("schedule", ALL, ids=label)
def test_the_bubble_is_that_of_the_theory(schedule):
    p, m, v = len(schedule.ranks), schedule.microbatches, schedule.stages // len(schedule.ranks)
    work = {"Interleaved1F1B": v * m, "ZBVZeroBubble": 6 * m}.get(schedule.name, m)
    assert play(schedule).bubble == pytest.approx((p - 1) / (work + p - 1))


def test_the_bubbles_of_the_goals():
    sizes = {"ranks": 4, "microbatches": 16}
    bubbles = {
        name: play(schedules.build(name, **sizes, stages_per_rank=v)).bubble
        for name, v in (("1F1B", 1), ("Eager1F1B", 1), ("Interleaved1F1B", 2), ("ZBVZeroBubble", 2))
    }
    assert bubbles["1F1B"] == bubbles["Eager1F1B"] == pytest.approx(3 / 19)
    assert bubbles["Interleaved1F1B"] == pytest.approx(3 / 35)
    assert bubbles["ZBVZeroBubble"] == pytest.approx(3 / 99)


def test_a_transfer_of_one_forward_pass_delays_only_1f1b():
    """In steady state: the transfers of the first and last micro-batch are always in the way."""
    for p in (2, 4, 8):
        m = 8 * p
        alone, eager, plain = (
            play(schedule, hop=hop).end
            for schedule, hop in (
                (schedules.one_f_one_b(p, m), 0.0),
                (schedules.eager_1f1b(p, m), 1.0),
                (schedules.one_f_one_b(p, m), 1.0),
            )
        )
        assert eager == alone + 2 * (p - 1), p
        assert plain > eager + m / 2, p


@pytest.mark.parametrize(
    ("name", "sizes", "words"),
    [
        ("1F1B", {"ranks": 4, "microbatches": 3}, "at least 4: use 4 micro-batches or more"),
        ("GPipe", {"ranks": 2, "microbatches": 0}, "at least 2"),
        ("Eager1F1B", {"ranks": 8, "microbatches": 7}, "at least 8"),
        ("ZBVZeroBubble", {"ranks": 4, "microbatches": 6}, "at least 7"),
        ("1F1B", {"ranks": 0, "microbatches": 3}, "use 1 rank or more"),
        ("Interleaved1F1B", {"ranks": 4, "microbatches": 3, "stages_per_rank": 2}, "at least 4"),
        ("Interleaved1F1B", {"ranks": 4, "microbatches": 10, "stages_per_rank": 2},
         "use 12 micro-batches"),
        ("Interleaved1F1B", {"ranks": 4, "microbatches": 8, "stages_per_rank": 0}, "to 2 or more"),
        ("1F1B", {"ranks": 4, "microbatches": 8, "stages_per_rank": 2}, "choose Interleaved1F1B"),
        ("2F2B", {"ranks": 4, "microbatches": 8}, "unknown schedule '2F2B': choose one of GPipe"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_fit_are_refused_with_a_remedy(name, sizes, words):
    with pytest.raises(ScheduleError, match=words):
        schedules.build(name, **sizes)


def test_names_are_found_in_any_case():
    assert schedules.build("zbvzerobubble", ranks=2, microbatches=4, stages_per_rank=2).stages == 4
    for name in schedules.NAMES:
        assert schedules.build(name.upper(), ranks=2, microbatches=4).name == name


@pytest.mark.parametrize("schedule", list(every((1, 3), (1, 2))), ids=label)
def test_csv_is_read_back(schedule):
    again = from_csv(to_csv(schedule), schedule.name)
    assert again == schedule
    assert again.digest() == schedule.digest()


def test_digests_tell_schedules_apart():
    assert len({schedule.digest() for schedule in ALL}) == len({to_csv(s) for s in ALL})


def test_csv_of_others_is_read():
    """Empty cells are idle slots; overlapped actions are executed one after the other."""
    schedule = from_csv(" 0F0 ,0F1,,,0B0,0B1\n,1F0,(1F1;1I0)OVERLAP_F_B,1W0,1B1\n")
    first, second = Action(1, F, 1), Action(1, Kind.INPUT, 0)
    assert schedule.ranks[1] == (Action(1, F, 0), first, second, Action(1, W, 0), Action(1, B, 1))
    assert (schedule.stages, schedule.microbatches) == (2, 2)
    check(schedule)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no actions"),
        (",,\n", "has no actions"),
        ("0F0,0X0", "invalid action '0X0'"),
        ("0F", "invalid action '0F'"),
        ("F0", "invalid action 'F0'"),
        ("0F0 0B0", "invalid action"),
        ("-1F0", "invalid action"),
        ("0F0,0SEND_F0", "added to a schedule when it is lowered"),
        ("0F0,0UNSHARD", "added to a schedule when it is lowered"),
        ("(0F0;0B0)OVERLAP", "invalid action"),
    ],
)
def test_damaged_csv_is_refused(text, words):
    with pytest.raises(ScheduleError, match=words):
        from_csv(text)


def changed(schedule, rank, change):
    """The schedule with one row changed."""
    rows = [list(actions) for actions in schedule.ranks]
    rows[rank] = change(rows[rank])
    return Schedule("changed", schedule.stages, schedule.microbatches, tuple(map(tuple, rows)))


@pytest.mark.parametrize(
    ("rank", "change", "words"),
    [
        (1, lambda row: row[:-1], "stage 1, micro-batch 3: has F"),
        (1, lambda row: [*row, row[-1]], "stage 1, micro-batch 3: has F, B, B"),
        (0, lambda row: [*row, Action(1, F, 0)], "on the ranks 0 and 1"),
        (1, lambda row: [*row, Action(1, W, 2)], "stage 1, micro-batch 2: has F, B, W"),
        (1, lambda row: [*row, Action(2, F, 0)], "outside of 2 stages"),
        (1, lambda row: [*row, Action(1, F, 4)], "outside of 2 stages and 4 micro-batches"),
        (1, lambda row: [], "rank 1 has no actions"),
        (0, lambda row: row[::-1], "deadlocks: rank 0 at 0B3, rank 1 at 1F0"),
        (1, lambda row: [row[1], row[0], *row[2:]], "deadlocks: .*rank 1 at 1B0"),
    ],
)
def test_invalid_schedules_are_refused(rank, change, words):
    schedule = changed(schedules.one_f_one_b(2, 4), rank, change)
    with pytest.raises(ScheduleError, match=words):
        check(schedule)


def test_forward_passes_of_the_last_stage_in_another_order_are_refused():
    """The runtime pairs losses with micro-batches by order; other stages may use any order."""
    swap = lambda row: [row[1], row[0], *row[2:]]  # noqa: E731
    check(changed(schedules.gpipe(2, 4), 0, swap))
    with pytest.raises(ScheduleError, match="stage 1: the forward pass of micro-batch 1 is in pl"):
        check(changed(schedules.gpipe(2, 4), 1, swap))


def test_a_schedule_for_other_ranks_is_refused():
    with pytest.raises(ScheduleError, match="has 2 ranks, but the pipeline has 4"):
        check(schedules.gpipe(2, 4), ranks=4)


@pytest.mark.parametrize("schedule", list(every((1, 4), (2,))), ids=label)
def test_pictures_have_a_bar_for_each_action(schedule):
    root = ET.fromstring(picture.svg(schedule, hop=0.25))
    titles = [
        element.text.split(":")[0] for element in root.iter() if element.tag.endswith("title")
    ]
    expected = [str(action) for actions in schedule.ranks for action in actions]
    assert titles == expected


def test_the_command_draws_names_and_files(tmp_path, capsys):
    file = tmp_path / "theirs.csv"
    file.write_text(to_csv(schedules.zb_v(2, 4)))
    assert picture.main([str(file), "--times", "1,2,0.5", "--output", str(tmp_path / "a.svg")]) == 0
    assert "theirs, 2 ranks" in (tmp_path / "a.svg").read_text()
    assert picture.main(["1f1b", "--ranks", "2", "--microbatches", "3"]) == 0
    assert "bubble 25.0 %" in capsys.readouterr().out
    assert picture.main(["1f1b", "--microbatches", "3"]) == 2
    assert "use 4 micro-batches or more" in capsys.readouterr().err
    assert picture.main([str(tmp_path / "missing.csv")]) == 2


def test_schedules_load_no_torch():
    code = (
        "import sys, haiscale.pipeline.picture, haiscale.pipeline.schedules;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
