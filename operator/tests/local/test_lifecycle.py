"""Driver lifecycle: interrupts, kills and double starts; no process survives, ids continue."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from flyer.engine.decision_log import replay


def test_after_kill_9_no_process_survives_and_the_next_run_continues_the_history(bench):
    manifest = bench.manifest(steps=20, hold_at=13)
    driver = bench.drive(manifest)
    before = bench.step("job", 12)
    assert len(bench.survivors()) >= 6  # fork server, two supervisors, four ranks at least
    driver.kill()
    driver.wait()
    bench.until("every process gone", lambda: not bench.survivors(), 5)
    result = bench.flyer("ps", "-o", "json")
    assert '"reason": "NoDriver"' in result.stdout, result.stderr
    bench.go()
    again = bench.flyer("run", manifest, "--logs", "0")
    assert again.returncode == 0, again.stderr
    start = int(again.stdout.split("rank 0 attempt 2 starts at step ")[1].split()[0])
    assert start == 10, "the last durable checkpoint"
    assert before.history_id in (bench.state / "jobs" / "default.job.json").read_text()


def test_flyer_run_without_a_manifest_resumes_unfinished_jobs(bench):
    driver = bench.drive(bench.manifest(steps=20, hold_at=13))
    bench.step("job", 12)
    driver.kill()
    driver.wait()
    bench.go()
    again = bench.flyer("run")
    assert again.returncode == 0, again.stderr
    assert "DriverRestarted" in again.stderr
    nothing = bench.flyer("run")
    assert nothing.returncode == 0
    assert "no unfinished job" in nothing.stderr
    lines = (bench.state / "decisions.jsonl").read_text().splitlines()
    assert sum('"rebuild":' in line for line in lines) == 3
    assert list(replay(lines)) == [], "the log replays to the same decisions, over all drivers"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_driver_leaves_no_process_and_prints_how_to_resume(bench, number, status):
    driver = bench.drive(bench.manifest(steps=20, hold_at=13, deaf=True))
    bench.step("job", 12)
    driver.send_signal(number)
    assert bench.ended(driver) == status
    assert bench.survivors() == []
    assert "continues it from step 10" in bench.err()
    assert not (bench.state / "run" / "control.sock").exists()


def test_the_driver_may_be_killed_while_it_starts(bench):
    manifest = bench.manifest(steps=4)
    driver = bench.drive(manifest)
    bench.until("its lock", lambda: (bench.state / "lock").exists())
    driver.kill()
    driver.wait()
    bench.until("every process gone", lambda: not bench.survivors(), 5)
    again = bench.flyer("run", manifest, "--cluster", bench.cluster())
    assert again.returncode == 0, again.stderr


def test_two_concurrent_first_runs_start_one_driver_and_one_client(bench):
    cluster = bench.cluster()
    first = bench.start("run", bench.manifest("one", steps=10, pause=0.1), "--cluster", cluster)
    second = bench.start("run", bench.manifest("two", steps=10, pause=0.1), "--cluster", cluster)
    assert (bench.ended(first), bench.ended(second)) == (0, 0), bench.err(0) + bench.err(1)
    text = bench.flyer("ps").stdout
    assert text.count("Succeeded") == 2


def test_a_second_driver_without_a_job_is_refused_and_names_the_first(bench):
    driver = bench.drive(bench.manifest(steps=20, hold_at=3))
    bench.step("job", 2)
    second = bench.flyer("run")
    assert second.returncode == 2
    assert f"process {driver.pid} already drives" in second.stderr


def test_the_same_manifest_attaches_and_a_changed_one_is_refused(bench):
    driver = bench.drive(bench.manifest(steps=12, hold_at=6))
    bench.step("job", 6)
    changed = bench.flyer("run", bench.manifest(steps=13, hold_at=6))
    assert changed.returncode == 2
    assert "differs in spec.template" in changed.stderr
    follow = bench.start("run", bench.manifest(steps=12, hold_at=6))
    bench.until("it follows", lambda: "default/job is Running" in bench.err())
    bench.go()
    assert bench.ended(follow) == 0
    assert bench.ended(driver) == 0


def test_a_client_that_is_interrupted_detaches(bench):
    driver = bench.drive(bench.manifest(steps=12, hold_at=6))
    bench.step("job", 6)
    follow = bench.start("run", bench.manifest(steps=12, hold_at=6))
    bench.until("it follows", lambda: "step 6" in bench.out())
    follow.send_signal(signal.SIGINT)
    assert bench.ended(follow) == 130
    assert "detached" in bench.err()
    bench.go()
    assert bench.ended(driver) == 0


def test_the_driver_stays_for_the_jobs_of_others(bench):
    driver = bench.drive(bench.manifest("mine", steps=8, hold_at=4))
    bench.step("mine", 4)
    other = bench.start("run", bench.manifest("other", steps=8, hold_at=4))
    bench.step("other", 4)
    bench.go("mine")
    bench.job("mine", lambda job: job.finished, "its end")
    bench.until("it says so", lambda: "default/other (Running)" in bench.err(0))
    assert driver.poll() is None
    bench.go("other")
    assert bench.ended(driver) == 0
    assert bench.ended(other) == 0


def test_a_client_reports_a_driver_that_ends_before_its_job(bench):
    driver = bench.drive(bench.manifest("mine", steps=8, hold_at=4))
    bench.step("mine", 4)
    other = bench.start("run", bench.manifest("other", steps=8, hold_at=4))
    bench.step("other", 4)
    driver.send_signal(signal.SIGTERM)
    assert bench.ended(driver) == 143
    assert bench.ended(other) == 101
    assert "`flyer run` restarts it" in bench.err(1)


def test_an_ended_job_runs_again_with_a_new_history_and_keeps_the_old_logs(bench):
    manifest = bench.manifest(steps=3)
    bench.flyer("run", manifest, "--cluster", bench.cluster())
    first = bench.flyer("show", "job", "-o", "json").stdout
    again = bench.flyer("run", manifest)
    assert again.returncode == 0, again.stderr
    folders = sorted(path.name for path in (bench.state / "logs").iterdir())
    assert len(folders) == 2
    assert folders[0] == "default.job"
    assert folders[1].removeprefix("default.job.") in first  # named for its history id


def test_an_ended_job_may_be_submitted_again_immediately(bench):
    bench.drive(bench.manifest("other", steps=99, hold_at=1))
    manifest = bench.manifest(steps=2)
    client = bench.client()
    ids = set()
    for _ in range(3):
        ids.add(client.run(manifest).history_id)
        for item in client.watch(timeout_seconds=100):
            if item.job is not None and item.job.name == "job" and item.job.finished:
                break  # its nodes may not be empty yet
    assert len(ids) == 3
    assert client.wait("job", timeout_seconds=100).state == "Succeeded"


def test_a_dead_fork_server_causes_a_restart_and_the_loss_of_no_node(bench):
    driver = bench.drive(bench.manifest(steps=20, hold_at=8))
    bench.step("job", 7)
    node = bench.client().nodes()[0]
    stat = Path(f"/proc/{node.supervisor_pid}/stat").read_text()
    os.kill(int(stat.rpartition(")")[2].split()[1]), signal.SIGKILL)
    bench.job("job", lambda job: job.attempt == 2 and job.state == "Running", "restart")
    assert all(node.state != "Lost" for node in bench.client().nodes())
    bench.go()
    assert bench.ended(driver) == 0, bench.err()


def test_a_full_disk_stops_the_driver_before_it_acts(bench):
    driver = bench.drive(bench.manifest(steps=20, hold_at=8))
    bench.step("job", 7)
    jobs = bench.state / "jobs"
    # a folder in the place of the temporary file: the next commit cannot be written
    (jobs / ".default.job.json.new").mkdir()
    refused = bench.flyer("suspend", "job", "--no-wait")
    assert refused.returncode == 101
    assert "cannot store the job `default/job`" in refused.stderr
    assert not bench.client().job("job").suspended, "what was not stored did not happen"
    bench.go()  # its next checkpoint is a decision that cannot be stored
    assert bench.ended(driver) == 101
    assert "cannot store the job `default/job`" in bench.err(0)
    assert bench.survivors() == []
    (jobs / ".default.job.json.new").rmdir()
    bench.go()
    assert bench.flyer("run").returncode == 0
