"""Jobs from submission to end: success, failure, hang, preemption and resumption."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress

import pytest


def test_a_job_runs_to_its_end_and_flyer_ends_with_its_status(bench):
    run = bench.flyer("run", bench.manifest(steps=6), "--cluster", bench.cluster())
    assert run.returncode == 0, run.stderr
    assert "step 6" in run.stdout.splitlines()
    assert "default/job Succeeded, step 6, 1 attempt" in run.stderr
    assert bench.survivors() == []


def test_the_traceback_of_the_failed_rank_is_printed_last(bench):
    manifest = bench.manifest(steps=50, fail_at=2, fail_rank=3)
    run = bench.flyer("run", manifest, "--cluster", bench.cluster())
    assert run.returncode == 1
    *_, head, first, _, _, last = run.stderr.rstrip("\n").splitlines()
    assert head == "rank 3 on node a1: exit status 1"
    assert first == "Traceback (most recent call last):"
    assert last == "ValueError: bad batch at step 2"


@pytest.mark.parametrize(("code", "expected"), [(7, 7), (99, 99), (110, 100)])
def test_the_exit_status_of_a_job_is_returned_if_it_is_unambiguous(bench, code, expected):
    manifest = bench.manifest(steps=50, fail_at=1, exit_with=code)
    run = bench.flyer("run", manifest, "--cluster", bench.cluster())
    assert run.returncode == expected
    assert run.stderr.rstrip().splitlines()[-2].startswith("rank 0 on node a0: exit status")


def test_a_rank_that_is_killed_restarts_the_gang_from_the_last_checkpoint(bench):
    manifest = bench.manifest(steps=12, kill_self_at=8, fail_rank=1)
    run = bench.flyer("run", manifest, "--cluster", bench.cluster(), "--logs", "0")
    assert run.returncode == 0, run.stderr
    # at step 5, or later if rank 0 had the time to save when its peers were ended
    assert int(run.stdout.split("rank 0 attempt 2 starts at step ")[1].split()[0]) >= 5


def test_a_hung_job_is_restarted_by_the_progress_deadline(bench):
    manifest = bench.manifest(steps=7, silent_at=6, spec__progressDeadline="5s")
    run = bench.flyer("run", manifest, "--cluster", bench.cluster())
    assert run.returncode == 0, run.stderr
    assert "ProgressDeadlineExceeded" in run.stderr
    assert "rank 0 attempt 2 starts at step 5" in run.stdout


def test_a_job_that_always_hangs_fails_with_the_reason(bench):
    manifest = bench.manifest(
        steps=7, silent_at=2, silent_attempts=9, spec__progressDeadline="1s", spec__maxRestarts=1
    )
    run = bench.flyer("run", manifest, "--cluster", bench.cluster())
    assert run.returncode == 100, run.stderr
    assert "ProgressDeadlineExceeded" in run.stderr
    assert "MaxRestartsExceeded" in run.stderr


def test_log_lines_alone_extend_the_progress_deadline(bench):
    # 160 lines over 8 s, no progress report, and a progress deadline that is shorter than the job
    manifest = bench.manifest(script="talk.py", lines=160, spec__progressDeadline="7s")
    run = bench.flyer("run", manifest, "--cluster", bench.cluster())
    assert run.returncode == 0, run.stderr
    assert "ProgressDeadlineExceeded" not in run.stderr


def test_suspend_and_resume_lose_no_step(bench):
    driver = bench.drive(bench.manifest(steps=40, hold_at=30, save_every=100))
    bench.step("job", 3)
    suspend = bench.flyer("suspend", "job", "--reason", "lunch")
    assert suspend.returncode == 0, suspend.stderr
    line = suspend.stdout.strip()
    assert line.startswith("signal 0.")
    assert line.endswith("lost 0 steps")
    assert "2 nodes free" in line
    suspended = bench.client().job("job")
    assert suspended.state == "Suspended"
    assert suspended.suspended
    assert all(not node.pids for node in bench.client().nodes())
    assert bench.flyer("resume", "job").returncode == 0
    bench.go()
    assert bench.ended(driver) == 0, bench.err()
    # with steps saved only by the suspension, every step appears exactly once over both attempts
    steps = [line for line in bench.out().splitlines() if line.startswith("step ")]
    assert steps == [f"step {number}" for number in range(1, 41)]


def test_a_job_that_never_answers_is_killed_at_the_deadline_and_restarts(bench):
    grace = "{checkpointGracePeriod: 1s, maxCheckpointGracePeriod: 1s, minRuntime: 0s}"
    driver = bench.drive(
        bench.manifest(steps=14, hold_at=12, deaf=True, spec__preemption=grace, pause=0.05)
    )
    bench.step("job", 6)
    suspend = bench.flyer("suspend", "job")
    assert "no answer, killed 1." in suspend.stdout, suspend.stdout
    bench.go()
    bench.flyer("resume", "job")
    assert bench.ended(driver) == 0, bench.err()
    saved = bench.out().split("attempt 2 starts at step ")[1].split()[0]
    assert int(saved) in (5, 10)


def test_a_high_job_preempts_and_the_victim_resumes(bench):
    whole = "4"
    driver = bench.drive(
        bench.manifest("low", steps=30, hold_at=25, spec__nodes=whole, spec__priority="low")
    )
    bench.step("low", 3)
    high = bench.manifest("high", steps=3, spec__nodes=whole, spec__priority="high")
    follow = bench.flyer("run", high)
    assert follow.returncode == 0, follow.stderr
    assert "default/high Succeeded" in follow.stderr
    bench.go("low")
    assert bench.ended(driver) == 0, bench.err()
    view = json.loads(bench.flyer("show", "low", "-o", "json").stdout)["job"]
    assert [item["outcome"] for item in view["attempts"]] == ["Preempted", "Succeeded"]
    assert view["attempts"][0]["lostSteps"] == 0
    assert view["attempts"][1]["sameZoneLayout"] is True


def test_a_dead_node_is_replaced_in_its_zone_and_ranks_keep_their_places(bench):
    driver = bench.drive(
        bench.manifest(steps=30, hold_at=20, spec__nodes=4, pause=0.02), nodeReturnSeconds=2
    )
    before = bench.step("job", 7)
    victim = next(node for node in bench.client().nodes() if node.name == "a1")
    assert victim.supervisor_pid == victim.pids[0]
    for pid in victim.pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    after = bench.job("job", lambda job: job.attempt == 2 and job.state == "Running", "restart")
    places = [(node.name, node.first_rank) for node in after.placement]
    assert [(node.name, node.first_rank) for node in before.placement] == [
        ("a0", 0), ("a1", 2), ("b0", 4), ("b1", 6),
    ]  # fmt: skip
    assert places == [("a0", 0), ("a2", 2), ("b0", 4), ("b1", 6)]
    assert after.attempts[-1].same_zone_layout is True
    lost_nodes = [node for node in bench.client().nodes() if node.state == "Lost"]
    assert [node.name for node in lost_nodes] == ["a1"]
    assert str(victim.supervisor_pid) in lost_nodes[0].reason
    bench.until(
        "the node's return",
        lambda: all(node.state != "Lost" for node in bench.client().nodes()),
    )
    bench.go()
    assert bench.ended(driver) == 0, bench.err()


def test_stop_ends_a_job_for_good(bench):
    driver = bench.drive(bench.manifest(steps=50, hold_at=3))
    bench.step("job", 3)
    assert bench.flyer("stop", "job", "--reason", "wrong data").returncode == 0
    assert bench.ended(driver) == 103
    assert "wrong data" in bench.err()


def test_requeue_releases_the_nodes_and_starts_a_new_attempt(bench):
    driver = bench.drive(bench.manifest(steps=20, hold_at=15))
    bench.step("job", 3)
    assert bench.flyer("requeue", "job").returncode == 0
    bench.job("job", lambda job: job.attempt == 2 and job.state == "Running", "second attempt")
    bench.go()
    assert bench.ended(driver) == 0, bench.err()


def test_logs_of_all_attempts_are_printed_once(bench):
    driver = bench.drive(bench.manifest(steps=20, hold_at=15))
    bench.step("job", 1)
    follow = bench.start("logs", "-f", "job", "--rank", "0")
    bench.step("job", 3)
    bench.flyer("suspend", "job")
    bench.flyer("resume", "job")
    bench.job("job", lambda job: job.attempt == 2 and job.state == "Running", "second attempt")
    bench.go()
    assert bench.ended(driver) == 0, bench.err(0)
    bench.ended(follow)
    steps = [line for line in bench.out(1).splitlines() if line.startswith("step ")]
    assert steps == [f"step {number}" for number in range(1, 21)]
    again = bench.flyer("logs", "job", "--rank", "0").stdout
    assert [line for line in again.splitlines() if line.startswith("step ")] == steps


def test_stopping_the_last_waiting_job_ends_the_driver(bench):
    driver = bench.drive(bench.manifest("runs", steps=12, hold_at=4, spec__nodes=4))
    bench.step("runs", 4)
    bench.start("run", bench.manifest("waits", steps=3, spec__nodes=4))
    bench.job("waits", lambda job: job.state == "Queued", "queued")
    client = bench.client()
    client.suspend("waits")
    bench.go("runs")
    client.wait("runs", timeout_seconds=100)
    bench.until("empty nodes", lambda: all(node.state == "Ready" for node in client.nodes()))
    assert driver.poll() is None, "a suspended job keeps its driver"
    client.stop("waits")
    assert bench.ended(driver) == 0


def test_a_watching_program_may_submit_its_next_job_when_the_last_one_has_ended(bench):
    driver = bench.drive(bench.manifest("first", steps=5, hold_at=4))
    bench.step("first", 4)
    client = bench.client()
    submitted = False
    for item in client.watch(timeout_seconds=100):
        if item.job is None:
            continue
        if item.job.name == "first" and item.job.state == "Running":
            bench.go("first")
        if item.job.name == "first" and item.job.finished and not submitted:
            submitted = True
            # every node is empty: without a watcher the driver would be ending by now
            bench.until("empty", lambda: all(node.state == "Ready" for node in client.nodes()))
            client.run(bench.manifest("second", steps=3))
        if item.job.name == "second" and item.job.finished:
            assert item.job.state == "Succeeded"
            break
    else:
        raise AssertionError("the second job did not run")
    assert bench.ended(driver) == 0


def test_a_job_without_flyer_job_is_suspended_by_sigterm(bench):
    driver = bench.drive(bench.manifest(script="talk.py", lines=1000))
    bench.job("job", lambda job: job.state == "Running", "running")
    bench.until("a line", lambda: list(bench.client().logs("job", rank=3)))
    suspend = bench.flyer("suspend", "job")
    assert suspend.returncode == 0, suspend.stderr
    assert "ack" in suspend.stdout
    assert bench.client().job("job").state == "Suspended"
    assert bench.flyer("stop", "job").returncode == 0
    assert bench.ended(driver) == 103


def test_a_client_reports_the_result_after_the_driver_has_ended(bench):
    driver = bench.drive(bench.manifest(steps=6, hold_at=4))
    bench.step("job", 4)
    client = bench.client()
    bench.go()
    assert client.wait("job", timeout_seconds=60).state == "Succeeded"
    assert bench.ended(driver) == 0
    assert client.job("job").state == "Succeeded"
    assert [line.text for line in client.logs("job", rank=0)][-1] == "rank 0 done"
    assert [event.reason for event in client.events(job="job")][-1] == "Succeeded"
    assert client.document("job")["status"]["phase"] == "Succeeded"


@pytest.mark.parametrize("cause", ["fail", "die"])
def test_earlier_errors_of_peers_do_not_hide_the_cause(bench, cause):
    manifest = bench.manifest(script="peers.py", spec__maxRestarts=0)
    manifest.write_text(manifest.read_text().replace("'--folder'", f"'{cause}', '--folder'"))
    run = bench.flyer("run", manifest, "--cluster", bench.cluster())
    assert "rank 0 on node a0" not in run.stderr
    if cause == "fail":
        assert run.returncode == 1
        assert run.stderr.rstrip().endswith("ValueError: the cause")
    else:
        assert "lost node a1" in run.stderr
        assert "MaxRestartsExceeded" in run.stderr
        assert run.returncode == 100


def test_the_master_port_is_held_until_rank_0_listens(bench):
    run = bench.flyer("run", bench.manifest(script="held_port.py"), "--cluster", bench.cluster())
    assert run.returncode == 0, run.stderr
    assert "held: Address already in use" in run.stdout


@pytest.mark.torch
def test_the_error_names_an_occupied_master_port_and_the_next_attempt_has_another(bench):
    run = bench.flyer(
        "run", bench.manifest(script="stolen_port.py", spec__ranksPerNode=1),
        "--cluster", bench.cluster(),
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    ports = [int(line.split(" port ")[1]) for line in run.stdout.splitlines() if " port " in line]
    stolen, *other_ports = dict.fromkeys(ports)
    assert len(other_ports) == 1
    (evicted,) = [line for line in run.stderr.splitlines() if "Restarted" in line]
    assert f"MASTER_PORT {stolen} is in use by another program on node a0" in evicted
    assert "a restart of the job gets another port" in evicted
