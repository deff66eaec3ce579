"""The bench of the collectives: its figures, and turns taken by ranks that are played here."""

import socket
import threading

import pytest

from bench.collectives import rows
from bench.collectives.stage import BenchError, Case, Stage, play

LONG = "8 ranks, 64 MiB fp32, registered: x better of all the MPIs that there are"


def test_a_ratio_is_taken_round_by_round():
    found = rows.times("a", ours=[1.0, 2.0, 10.0], theirs=[4.0, 8.0, 30.0], goal=4.0)
    assert (found.median, found.low, found.high, found.rounds) == (4.0, 3.0, 4.0, 3)
    assert found.reached
    assert rows.row("b", "µs", [1.3, 1.1, 1.2], 1.15).reached is False
    assert rows.absent("c", "peer not installed", 10.0, more=True).reached is None


def test_the_table_fits_a_hundred_columns():
    told = rows.table(
        [
            rows.row(LONG, "of limit", [0.123456, 1234567.0], 0.85, more=True),
            rows.absent(LONG, "a reason that goes on for longer than there is room for it", 0.85),
        ]
    )
    assert all(len(line) <= 100 for line in told.splitlines()), told
    assert "a reason that" in told


def rank(path, number, answer):
    """A rank that says what it was told to say, and leaves when its line ends."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.connect(str(path))
        line.sendall(f"played {number}\n".encode())
        for order in line.makefile():
            kind, _, memory, count, _ = order.split()
            known = (kind, memory) == ("float32", "private")
            line.sendall((answer(number, int(count)) if known else "no such memory\n").encode())


def played(tmp_path, answer, cases, rounds=3):
    with Stage(tmp_path) as stage:
        ranks = [
            threading.Thread(target=rank, args=(stage.path, number, answer), daemon=True)
            for number in range(2)
        ]
        for one in ranks:
            one.start()
        crew = stage.gather("played", 2, lambda: None)
        lanes = play([crew], cases, rounds, lambda: None)
    for one in ranks:
        one.join(timeout=60)
        assert not one.is_alive()
    return lanes["played"]


def test_the_slowest_rank_counts_and_unknown_memory_is_left_out(tmp_path):
    known, unknown = Case("float32", 4096), Case("float32", 4096, "registered")
    lane = played(
        tmp_path, lambda number, count: f"ok {0.001 * (number + 1) * count}\n", [known, unknown]
    )
    assert lane.counts == {known: 75}, "a round of 0.15 s"
    assert lane.seconds[known] == pytest.approx([0.002] * 3)


def test_a_wrong_sum_ends_the_measurement(tmp_path):
    with pytest.raises(BenchError, match="played: a wrong sum"):
        played(tmp_path, lambda number, count: "no right result\n", [Case("float32", 4096)])
