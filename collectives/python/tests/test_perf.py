"""hfreduce-perf: the oracle, compared with independent arithmetic, and the command line."""

import json
import os
import re
import signal
import struct
import subprocess
import sys
import threading
from fractions import Fraction
from pathlib import Path

import pytest
from hfreduce._native import Rendezvous
from hfreduce.errors import RendezvousError, SettingError
from hfreduce.perf import cli, formats, options, oracle
from hfreduce.perf import ranks as local

LONG_SECONDS = 90
KEY = "0123456789abcdef0123456789abcdef"


def perf(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "hfreduce.perf", *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=LONG_SECONDS,
        check=False,
    )


def test_every_pattern_of_fp16_is_written_as_struct_reads_it():
    kind = formats.TYPES["float16"]
    for bits in range(0x7C00):
        pattern = bits.to_bytes(2, "little")
        (value,) = struct.unpack("<e", pattern)
        assert kind.encode(Fraction(value)) == pattern


@pytest.mark.parametrize(
    ("name", "value", "bits"),
    [
        ("float32", Fraction(2**24 + 1), 0x4B800000),  # a tie goes to the even one
        ("float32", Fraction(2**24 + 3), 0x4B800002),
        ("float32", Fraction(1, 3), 0x3EAAAAAB),
        ("bfloat16", Fraction(257), 0x4380),
        ("bfloat16", Fraction(-1, 3), 0xBEAB),
        ("float64", Fraction(1, 10), 0x3FB999999999999A),
        ("float8_e4m3fn", Fraction(448), 0x7E),
        ("float8_e4m3fn", Fraction(10**6), 0x7E),  # it has no infinity
        ("float8_e4m3fn", Fraction(-1, 512), 0x81),
        ("float8_e5m2", Fraction(57344), 0x7B),
        ("float8_e5m2", Fraction(10**6), 0x7C),
        ("float8_e5m2", Fraction(9), 0x48),
        ("int8", Fraction(-1), 0xFF),
        ("uint16", Fraction(65535), 0xFFFF),
    ],
)
def test_numbers_are_rounded_once_to_nearest_even(name, value, bits):
    kind = formats.TYPES[name]
    assert kind.encode(value) == bits.to_bytes(kind.item_bytes, "little")


@pytest.mark.parametrize("ranks", [1, 3, 8, 100])
@pytest.mark.parametrize("name", formats.TYPES)
def test_no_partial_sum_exceeds_the_type(name, ranks):
    kind = formats.TYPES[name]
    columns = zip(*(oracle.data(kind, "sum", rank, ranks) for rank in range(ranks)), strict=True)
    for column in columns:
        assert sum(abs(value) for value in column) <= kind.exact_max
    assert any(oracle.expected(kind, "sum", ranks))


def test_one_wrong_bit_is_one_wrong_element():
    kind = formats.TYPES["float32"]
    values = oracle.expected(kind, "sum", 4)
    memory = bytearray(4 * 1_000_000)
    oracle.fill(memoryview(memory), kind, values, start=17)
    assert oracle.wrong(memoryview(memory), kind, values, start=17) == 0
    memory[2_000_001] ^= 1
    memory[-1] ^= 0x80
    assert oracle.wrong(memoryview(memory), kind, values, start=17) == 2


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["-b", "8X"], "8X"),
        (["-b", "2M", "-e", "1M"], "-e"),
        (["-d", "fp4"], "fp4"),
        (["-d", "fp32", "-o", "bxor"], "bxor"),
        (["-f", "1"], "`1`"),
        (["-f", "2", "-i", "1K"], "-i"),
        (["allrelax"], "allrelax"),
        (["-g", "3", "--nodes", "2"], "--nodes"),
        (["--zones", "2"], "--zones"),
        (["broadcast", "--tensors", "2"], "--tensors"),
        (["-T", "0"], "`0`"),
        (["-n", "0"], "`0`"),
    ],
)
def test_errors_of_invalid_options_name_the_option(arguments, word, capsys):
    with pytest.raises(SystemExit) as ended:
        options.parse(arguments)
    assert ended.value.code == 2
    assert word in capsys.readouterr().err


def test_options_are_those_of_nccl_tests():
    sizes = ["-b", "8", "-e", "128M", "-f", "2"]
    rest = ["-d", "half", "-o", "avg", "-n", "7", "-w", "1"]
    parsed = options.parse(["all_reduce_perf", *sizes, *rest])
    assert (parsed.collective.name, parsed.kinds[0].name) == ("allreduce", "float16")
    assert (parsed.sizes[0], parsed.sizes[-1], len(parsed.sizes)) == (8, 128 << 20, 25)
    assert (parsed.iterations, parsed.warmup, parsed.ops) == (7, 1, ("avg",))
    assert options.parse(["reduce-scatter"]).collective.name == "reduce_scatter"
    assert options.parse(["all_to_all"]).collective.name == "alltoall"
    assert options.parse(["-b", "1K", "-e", "4K", "-i", "1KiB"]).sizes == (1024, 2048, 3072, 4096)


@pytest.mark.parametrize(
    "arguments",
    [
        ["allreduce", "-d", "all", "-o", "all"],
        ["allreduce", "--nodes", "3", "--zones", "3", "-d", "bf16", "--tensors", "5"],
        ["broadcast", "-r", "2"],
        ["reduce", "-r", "1", "-o", "max"],
        ["allgather", "-d", "fp8_e5m2"],
        ["reduce_scatter", "-d", "fp8_e4m3", "-o", "avg"],
        ["alltoall", "--nodes", "3"],
        ["gather"],
        ["scatter", "-d", "int64"],
        ["sendrecv"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_every_collective_is_right(arguments):
    sizes = ["-g", "3", "-b", "24", "-e", "60000", "-f", "2500", "-n", "1", "-w", "0"]
    result = perf(*arguments, *sizes, "-J", "-")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["summary"]["wrong"] == 0
    assert {row["wrong"] for row in report["rows"]} == {0}
    assert all(row["time_us"] > 0 and row["of_limit"] > 0 for row in report["rows"])


def test_the_table_and_the_trace(tmp_path):
    trace = tmp_path / "trace.json"
    sizes = ["-b", "1K", "-e", "4K", "-n", "6", "-w", "0"]
    result = perf("-g", "2", *sizes, "--trace", str(trace))
    assert result.returncode == 0, result.stderr
    rows = [line.split() for line in result.stdout.splitlines() if not line.startswith("#")]
    assert [row[:5] for row in rows] == [
        ["1024", "256", "float32", "sum", "-1"],
        ["4096", "1024", "float32", "sum", "-1"],
    ]
    assert [row[8] for row in rows] == ["0", "0"]
    events = [e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"]
    assert len(events) == 2 * 2 * 6
    assert {event["tid"] for event in events} == {0, 1}
    assert all(event["ts"] >= 0 and event["dur"] > 0 for event in events)


def alone(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("HFREDUCE_RENDEZVOUS", "127.0.0.1:0")


def test_wrong_results_are_counted_and_end_with_status_1(monkeypatch, capsys):
    alone(monkeypatch)
    twice = oracle.data(formats.TYPES["float32"], "sum", 0, 1)
    monkeypatch.setattr(oracle, "expected", lambda *_: tuple(value * 2 for value in twice))
    assert cli.main(["-b", "1K", "-e", "1K"]) == 1
    row = capsys.readouterr().out.splitlines()[3].split()
    assert int(row[8]) > 200


def test_in_a_launcher_no_ranks_are_started(monkeypatch, capsys):
    alone(monkeypatch)
    assert cli.main(["-g", "2"]) == 2
    assert "RANK" in capsys.readouterr().err
    assert cli.main(["-b", "1K", "-e", "1K", "-c", "0"]) == 0
    assert "N/A" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("environment", "word"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK='2'"),
        ({"RANK": "0", "WORLD_SIZE": "x"}, "WORLD_SIZE='x'"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR"),
        ({"RANK": "0", "WORLD_SIZE": "2", "HFREDUCE_RENDEZVOUS": "here"}, "HFREDUCE_RENDEZVOUS"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "KEY_FILE"),
    ],
)
def test_an_environment_that_cannot_be_used_is_named(environment, word, monkeypatch, capsys):
    for name in ("MASTER_ADDR", "MASTER_PORT", "HFREDUCE_KEY_FILE", "HFREDUCE_RENDEZVOUS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cli.main([]) == 2
    assert word in capsys.readouterr().err


def test_ranks_of_a_launcher_connect_through_one_address(tmp_path):
    key = tmp_path / "key"
    key.write_text(KEY)
    common = {"WORLD_SIZE": "2", "HFREDUCE_KEY_FILE": str(key), "HFREDUCE_ADDRESS": "127.0.0.1"}

    def meeting(rank, port):
        environment = common | {"RANK": str(rank), "HFREDUCE_RENDEZVOUS": f"127.0.0.1:{port}"}
        return Rendezvous(environment)

    first = meeting(0, 0)
    both = [first, meeting(1, first.port)]
    joined = {}

    def join(rendezvous):
        joined[rendezvous.rank] = rendezvous.join(LONG_SECONDS)

    threads = [threading.Thread(target=join, args=(rendezvous,)) for rendezvous in both]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_SECONDS)
    assert sorted(joined) == [0, 1]
    for communicator in joined.values():
        communicator.close()
    with pytest.raises(RendezvousError) as failed:
        first.exchange("no other rank", b"", 0.01)
    assert failed.value.absent == (1,)
    with pytest.raises(SettingError):
        Rendezvous(common | {"RANK": "5"})


def started(*arguments):
    """Starts a measurement of hours; returns the process and its ranks once it runs."""
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "hfreduce.perf",
            "-b",
            "4K",
            "-e",
            "4K",
            "-n",
            "9999999",
            *arguments,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert "hfreduce-perf" in process.stdout.readline(), process.stderr.read()
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return process, [int(child) for child in children]


def test_a_killed_rank_ends_the_others_and_is_named():
    process, ranks = started("-g", "3")
    os.kill(ranks[1], signal.SIGKILL)
    _, errors = process.communicate(timeout=LONG_SECONDS)
    assert process.returncode == 3
    assert re.search(r"rank 1 on node .*peer_died", errors), errors
    assert "signal 9" in errors


def faulty(environment, port):
    if environment["RANK"] == "1":
        raise LookupError("an unexpected error")
    return 0


def silent(environment, port):
    return local.FAILED


def absent(environment, port):
    if environment["RANK"] == "0":
        return local.FAILED
    return port.wait()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (absent, ["rank 0 exited before it listened"]),
        (faulty, ["rank 1 ended by a fault", "LookupError: an unexpected error"]),
        (silent, ["ended with status 3 without an error message"]),
    ],
)
def test_a_failed_rank_is_always_reported(body, words, capfd):
    assert local.run(options.parse(["-g", "2"]), 2, {}, body) == local.FAILED
    report = capfd.readouterr().err
    assert all(word in report for word in words), report


def test_an_interrupted_measurement_leaves_no_process():
    process, ranks = started("-g", "2")
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=LONG_SECONDS)
    assert process.returncode == 130
    assert not [rank for rank in ranks if Path(f"/proc/{rank}").exists()]
