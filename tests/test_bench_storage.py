"""The bench of the storage: ratios, goals, its table, and what it reads from other programs."""

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bench.storage import idle, moosefs, namespaces, network, rows


def rounds(**further: float) -> dict[str, list[float]]:
    names = {rows.FIO_1: 6.0, rows.FIO_3: 9.0, rows.WRITE: 2.0, rows.CACHED: 8.0}
    return {name: [value, value / 2, value * 2] for name, value in {**names, **further}.items()}


def test_ratios_are_of_medians_of_the_same_run():
    figures = rounds(**{rows.TCP: 3.0, rows.IPERF3: 4.0, "mount: write": 6.0, "MooseFS: write": 2})
    assert rows.ratios_of(figures) == pytest.approx(
        {
            "write / (fio 3 writers / 3)": 2 / 3,
            "mount: write / (fio 3 writers / 3)": 2.0,
            "write / fio 1 writer": 1 / 3,
            f"{rows.TCP} / iperf3": 0.75,
            f"{rows.CACHED} / iperf3": 2.0,
            "mount / MooseFS: write": 3.0,
        }
    )


def test_a_ratio_without_one_of_its_sides_is_absent():
    assert not [name for name in rows.ratios_of(rounds()) if "iperf3" in name or "mount" in name]
    assert rows.ratios_of({}) == {}


def test_goals_bound_figures_from_below_or_above():
    tcp, memory = f"{rows.TCP} / iperf3", "idle, before the first round: 3FS: resident"
    assert [rows.reached(tcp, value) for value in (0.74, 0.75)] == [False, True]
    assert [rows.reached(memory, value) for value in (300e6, 301e6)] == [True, False]
    assert rows.reached("mount / GlusterFS: write", 9.0) is None


def test_the_document_names_goals_and_missing_figures():
    idle_figures = {"idle, before the first round: 3FS: processor": 0.03}
    figures = rounds(**{"mount: write": 6.0, "MooseFS: write": 1.5})
    result = rows.summary(figures, idle_figures, {rows.IPERF3: "not installed"})
    assert result["goals"] == {
        "mount / MooseFS: write": True,
        "idle, before the first round: 3FS: processor": False,
    }
    assert result["not_measured"] == {rows.IPERF3: "not installed"}
    assert json.loads(json.dumps(result)) == result


def test_the_table_marks_goals_and_fits_a_screen():
    name = "mount, write-back: creates with 4 KiB and fsync/s, 8 threads"
    figures = rounds(**{name: 123456.0, "client: stats/s, 16 threads": 79_999})
    idle_figures = {"idle, before the first round: 3FS: processor": 0.03}
    lines = rows.table(rows.summary(figures, idle_figures, {"MooseFS": "not installed"}))
    assert all(len(line) <= 116 for line in lines), lines
    by_name = {line.partition("  ")[0]: line for line in lines}
    assert by_name[name].endswith("≥ 3,000 yes")
    assert by_name["client: stats/s, 16 threads"].endswith("≥ 80,000 NO")
    assert by_name[next(iter(idle_figures))].endswith("≤ 2.0% NO")
    assert lines[-1] == "not measured: MooseFS: not installed"


def test_every_goal_is_one_of_a_figure_that_is_measured():
    measured = {f"{place}: write" for place in (*rows.MOUNTS, *rows.PEERS)} | {
        rows.TCP,
        rows.IPERF3,
    }
    ratios = rows.ratios_of(rounds(**dict.fromkeys(measured, 1.0)))
    assert {name for name in rows.GOALS_MIN if " / " in name} <= set(ratios)


def test_the_rate_of_iperf3_is_that_of_the_receiver():
    report = {
        "end": {
            "sum_sent": {"bits_per_second": 9e9},
            "sum_received": {"bits_per_second": 8e9},
        }
    }
    assert network.received(json.dumps(report)) == 1e9
    with pytest.raises(RuntimeError, match="unable to connect"):
        network.received(json.dumps({"error": "unable to connect to server"}))


def test_descendants_are_found_and_the_process_of_the_mount_is_not_counted():
    code = "import subprocess, sys; subprocess.run(['cat', '/dev/stdin'], stdin=sys.stdin)"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    try:
        while not idle.descendants(process.pid):
            assert process.poll() is None
        (child,) = idle.descendants(process.pid)
        while not idle.has_argument(child, "/dev/stdin"):
            assert process.poll() is None
        assert not idle.has_argument(child, "/dev")
        assert not idle.has_argument(child, "")
        assert idle.resident_bytes(process.pid) > 1 << 20
    finally:
        process.communicate()


@pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root")
def test_a_peer_ends_with_its_context_and_a_failed_script_is_reported(tmp_path):
    script = """
        mkdir "$1/mount" && mount -t tmpfs none "$1/mount"
        echo probe >"$1/mount/file" && echo mounted && exec cat
    """
    with namespaces.mounted(script, tmp_path / "peer", "a peer") as volume:
        assert (volume.path / "file").read_text() == "probe\n"
        assert not list((tmp_path / "peer" / "mount").iterdir()), "mounted outside the namespace"
    assert not volume.path.exists()
    with (
        pytest.raises(RuntimeError, match="a peer does not start"),
        namespaces.mounted("exit 1", tmp_path / "other", "a peer"),
    ):
        pass


@pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_program_leaves_no_process_and_no_mount(tmp_path, number):
    code = (
        "import subprocess, sys\n"
        "from bench.storage.namespaces import isolate\n"
        "isolate()\n"
        "subprocess.run(['mount', '-t', 'tmpfs', 'none', sys.argv[1]], check=True)\n"
        "child = subprocess.Popen(['cat', '/dev/stdin'], stdin=subprocess.PIPE)\n"
        "print('ready', flush=True)\n"
        "sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    assert str(tmp_path) not in Path("/proc/mounts").read_text()
    inside = idle.descendants(process.pid)
    assert len(inside) == 3, "unshare, the program and its child"
    process.send_signal(number)
    # End of file once no process has the other end, that is, once all of them have ended.
    assert select.select([process.stdout], [], [], 60)[0], "processes are left"
    assert process.stdout.read() == ""
    process.communicate()


def test_the_script_of_moosefs_is_valid_shell():
    subprocess.run(["sh", "-n", "-c", moosefs.SCRIPT], check=True)
