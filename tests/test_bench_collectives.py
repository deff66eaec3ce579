"""The bench of the collectives: its figures, and turns taken by ranks that are played here."""

import socket
import subprocess
import threading
from pathlib import Path

import pytest

from bench import rows
from bench.collectives import failures, machines, peers, speed
from bench.collectives.harness import BenchError, Case, Contender, Harness, RankGroup, run_rounds

LONG = "8 ranks, 64 MiB fp32, registered: x better of all the MPIs that there are"


def test_a_ratio_is_computed_per_round():
    ratio = rows.times("a", own=[1.0, 2.0, 10.0], peer=[4.0, 8.0, 30.0], goal=4.0)
    assert (ratio.median, ratio.low, ratio.high, ratio.rounds) == (4.0, 3.0, 4.0, 3)
    assert ratio.reached
    assert rows.row("b", "µs", [1.3, 1.1, 1.2], 1.15).reached is False
    assert rows.absent("c", "peer not installed", 10.0, more=True).reached is None


def test_the_table_fits_a_hundred_columns():
    text = rows.table(
        [
            rows.row(LONG, "of limit", [0.123456, 1234567.0], 0.85, more=True),
            rows.absent(
                LONG, "a reason that is much longer than the room that the table has for it", 0.85
            ),
        ]
    )
    assert all(len(line) <= 100 for line in text.splitlines()), text
    assert "a reason that" in text


def rank(path, number, answer):
    """A rank that sends given answers and exits when its connection ends."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.connect(str(path))
        line.sendall(f"played {number}\n".encode())
        for order in line.makefile():
            _, kind, _, memory, count, _ = order.split()
            supported = (kind, memory) == ("float32", "private")
            line.sendall((answer(number, int(count)) if supported else "no such memory\n").encode())


def played(tmp_path, answer, cases, rounds=3):
    with Harness(tmp_path) as harness:
        ranks = [
            threading.Thread(target=rank, args=(harness.path, number, answer), daemon=True)
            for number in range(2)
        ]
        for item in ranks:
            item.start()
        group = harness.gather("played", 2, lambda: None)
        lanes = run_rounds([group], cases, rounds, lambda: None)
    for item in ranks:
        item.join(timeout=60)
        assert not item.is_alive()
    return lanes["played"]


def test_the_slowest_rank_counts_and_unknown_memory_is_left_out(tmp_path):
    supported, unknown = Case("float32", 4096), Case("float32", 4096, "registered")
    lane = played(
        tmp_path, lambda number, count: f"ok {0.001 * (number + 1) * count}\n", [supported, unknown]
    )
    assert lane.counts == {supported: 75}, "a round of 0.15 s"
    assert lane.seconds[supported] == pytest.approx([0.002] * 3)


def test_a_wrong_sum_ends_the_measurement(tmp_path):
    with pytest.raises(BenchError, match="played: wrong result"):
        played(tmp_path, lambda number, count: "wrong result\n", [Case("float32", 4096)])


def test_ranks_with_a_core_each_neither_yield_nor_share_cores():
    for peer in peers.COMMANDS:
        for launch in peers.launches(peer, 2, 2):
            text = " ".join(launch.words) + " ".join(launch.environment)
            assert "core" in launch.words
            assert not {"yield", "oversubscribe"} & set(text.lower().replace("--", " ").split())
            assert "YIELD" not in text
        crowded = [(item.words, item.environment) for item in peers.launches(peer, 8, 2)]
        assert "yield" in str(crowded).lower()


def test_every_configuration_of_a_peer_has_a_name_that_the_protocol_can_carry():
    rank_groups = [
        launch.group
        for peer in peers.COMMANDS
        for ranks in (2, 8)
        for launch in peers.launches(peer, ranks, 2)
    ]
    assert all(" " not in group for group in rank_groups)
    for ranks in (2, 8):
        names = [item.group for peer in peers.COMMANDS for item in peers.launches(peer, ranks, 2)]
        assert len(set(names)) == len(names)


def test_the_fastest_configuration_of_a_peer_counts():
    fastest = peers.quickest({"a": [3.0, 3.0, 9.0], "b": [4.0, 1.0, 2.0], "c": None, "d": []})
    assert fastest == ("b", [4.0, 1.0, 2.0])
    assert peers.quickest({"c": None}) is None


SLOW, QUICK = Case("float32", speed.LARGE), Case("float32", speed.SMALL)


def measured(**seconds):
    lanes = {}
    for name, value in seconds.items():
        lane = Contender(RankGroup(name, []))
        for call in ("allreduce", *speed.CALLS):
            for size in speed.SIZES:
                lane.seconds[Case("float32", size, call=call)] = [value] * 3
        lanes[name.replace("_", ":")] = lane
    return speed.Measured(2, lanes, [1e9] * 3)


def test_torch_is_compared_with_torch_and_native_with_native():
    entries = measured(
        native=1.0, torch=10.0, gloo=50.0, openmpi_a=3.0, openmpi_b=2.0, mpich_default=4.0
    )
    result = [*speed.latency(entries, QUICK, 1.0, 1.0), *speed.large(entries, SLOW)]
    for call in speed.CALLS:
        result += speed.call_rows(entries, Case("float32", speed.SMALL, call=call))
    ratios = {row.name: (row.median, row.note) for row in result if row.unit == "x"}
    assert len(ratios) == 3 + 2 + 2 * len(speed.CALLS)
    for name, (median, note) in ratios.items():
        if "Gloo" in name:
            assert "torch" in name
            assert median == 5.0
        else:
            assert "native" in name
            expected = (4.0, "default") if "MPICH" in name else (2.0, "b")
            assert (median, note.split(":")[-1]) == expected


def test_a_round_that_fails_before_the_fault_misses_the_goal():
    observed = failures.Heard(seconds=[0.01] * 31)

    def missed():
        entry = failures.row("layout", "cut", 12, observed)
        return [row.name for row in machines.fault_rows(entry) if row.reached is False]

    assert not missed()
    observed.early = 1
    assert missed() == ["cut, layout, 0.7 s: failed before the fault"]
    observed.early, observed.silent, observed.seconds = 0, 1, [2.0] * 31
    assert [name.partition(": ")[2] for name in missed()] == ["p99 (p50 …)", "unnamed or silent"]


def test_each_rank_program_knows_every_call_and_checks_its_result(tmp_path):
    program = tmp_path / "check.c"
    header = Path(__file__).resolve().parents[1] / "bench/collectives/native/rank.h"
    program.write_text(
        f'#include "{header}"\n'
        """
    int main(int argc, char **argv) {
        struct order order = { "", "bfloat16", 64, "private", 1, 1 };
        char in[4][64], out[64];
        snprintf(order.call, sizeof order.call, "%s", argv[1]);
        if (argc != 2 || !known(&order)) return 2;
        for (unsigned rank = 0; rank < 4; rank++) fill(in[rank], &order, rank, 4);
        for (unsigned rank = 0; rank < 4; rank++) {
            if (is(&order, "broadcast")) memcpy(out, in[0], 64);
            else if (is(&order, "p2p")) memcpy(out, in[rank & ~1u], 64);
            else if (is(&order, "allgather") || (is(&order, "gather") && !rank))
                for (int from = 0; from < 4; from++) memcpy(out + 16 * from, in[from], 16);
            else if (is(&order, "alltoall"))
                for (int from = 0; from < 4; from++)
                    memcpy(out + 16 * from, in[from] + 16 * rank, 16);
            else if (is(&order, "scatter")) memcpy(out, in[0] + 16 * rank, 16);
            else continue;
            if (!right(out, &order, rank, 4)) return 3;
            out[15] ^= 1;
            if (right(out, &order, rank, 4)) return 4;
        }
        (void)orders; (void)next; (void)now; (void)in_place;
        return 0;
    }""",
        encoding="ascii",
    )
    binary = tmp_path / "check"
    subprocess.run(["cc", "-std=gnu11", "-o", str(binary), str(program)], check=True, timeout=60)
    for call in ("allreduce", *speed.CALLS):
        assert subprocess.run([str(binary), call], check=False, timeout=10).returncode == 0, call
    for call in ("ddp_step", "gradients"):
        assert subprocess.run([str(binary), call], check=False, timeout=10).returncode == 2, call
