"""Quotas, priorities and `flyer top` of a local cluster, as on Kubernetes."""

from __future__ import annotations

import json


def test_quotas_of_the_cluster_file(bench):
    driver = bench.drive(bench.manifest(steps=20, hold_at=3), quotas="[{name: all, nodes: 3}]")
    bench.step("job", 2)
    second = bench.manifest("second", steps=5)
    assert bench.flyer("run", second, "--detach").returncode == 0
    waiting = bench.job("second", lambda job: job.reason == "WaitingForQuota", "waits for room")
    assert "quota all has 1 of 3 nodes left for " in waiting.message
    (quota,) = json.loads(bench.flyer("quotas", "-o", "json").stdout)
    assert (quota["used"], quota["nodes"], quota["jobs"]) == (2, 3, ["default/job"])
    output = bench.flyer("queues").stdout
    assert "QUOTA" in output
    assert "2/3" in output
    why = bench.flyer("why", "second")
    assert "flyer suspend default/job" in why.stdout
    changed = bench.flyer("priority", "second", "high")
    assert "default/second has priority high" in changed.stderr
    assert bench.flyer("priority", "second", "urgent").returncode == 2
    (top,) = json.loads(bench.flyer("top", "--interval", "0.1", "-o", "json").stdout)
    assert (top["job"], top["state"]) == ("default/job", "Running")
    bench.go()
    assert bench.ended(driver) == 0
    assert all(job.state == "Succeeded" for job in bench.client_on_disk().jobs())


def test_an_invalid_quota_is_refused_with_its_line(bench):
    refused = bench.flyer(
        "run", bench.manifest(), "--cluster",
        bench.cluster(quotas="[{name: all, nodes: -1}, {name: all, nodes: 1}]"),
    )  # fmt: skip
    assert refused.returncode == 2
    assert "quotas[0].nodes: -1" in refused.stderr
