"""The scheduler's benchmark: what it makes of numbers and of the audit log."""

import json

from flyer.api import FlyerJob

from bench.sched import cold_start
from bench.sched.audit import AuditLog, by_kind
from bench.sched.costs import account, parse
from bench.sched.figures import Figure, document, table
from bench.sched.loads import flyer_job, peer_gang
from bench.scheduler import Record


def line(
    verb: str, resource: str, *, user: str = "me", code: int = 201, subresource: str = ""
) -> str:
    event = {
        "verb": verb,
        "user": {"username": user},
        "userAgent": "bench/1",
        "objectRef": {"resource": resource, "subresource": subresource, "name": "x"},
        "responseStatus": {"code": code},
        "requestReceivedTimestamp": "2026-01-01T00:00:00.250000Z",
        "stageTimestamp": "2026-01-01T00:00:00.500000Z",
    }
    return json.dumps(event) + "\n"


def test_a_goal_bounds_the_median_or_the_ratio_to_the_peer() -> None:
    figure = Figure("gang", "s", 1.0, of_peer=True, values=[2.0, 9.0, 3.0], peer=[4.0])
    assert (figure.median, figure.ratio, figure.good) == (3.0, 0.75, True)
    assert Figure("rate", "jobs/s", 100, more=True, values=[99]).good is False
    assert Figure("unlimited", "s", values=[1]).good is None
    assert Figure("writes", "writes", 0, values=[0.0]).good is True
    assert Figure("not measured", "s", 1).good is None


def test_the_table_fits_a_terminal_and_marks_missed_goals() -> None:
    figures = [
        Figure("a" * 60, "s", 1.0, of_peer=True, values=[2.0], peer=[1.0]),
        Figure("writes", "writes", 4, values=[123456.0]),
        Figure("not measured", "s", 1),
    ]
    lines = table(figures)
    assert len(lines) == 3
    assert all(len(item) < 80 for item in lines)
    assert lines[1].endswith("≤1× NO")
    assert list(document({}, figures)["figures"]) == ["a" * 60, "writes", "not measured"]


def test_the_audit_log_is_read_as_it_grows(tmp_path) -> None:
    path = tmp_path / "audit.log"
    log = AuditLog(path)
    assert log.read() == []
    path.write_text(line("create", "pods"))
    log.skip()
    operator = "system:serviceaccount:fireflyer-system:flyer-operator"
    whole = line("create", "pods", subresource="binding", user=operator)
    with path.open("a") as file:
        file.write(whole + whole[:20])
    (entry,) = log.read()
    assert (entry.client, entry.kind, entry.stored) == ("flyer-operator", "pods/binding", True)
    assert entry.done_at - entry.received_at == 0.25
    with path.open("a") as file:
        file.write(whole[20:] + line("create", "tokenreviews") + line("update", "pods", code=409))
    writes = log.read()
    assert [write.stored for write in writes] == [True, False, False]
    assert by_kind(writes)["flyer-operator: create pods/binding"] == 1


def test_the_cost_of_the_server_is_the_difference_of_two_scrapes() -> None:
    page = """# HELP apiserver_request_duration_seconds of calls
apiserver_request_duration_seconds_bucket{resource="pods",verb="POST",le="1"} 9
apiserver_request_duration_seconds_sum{resource="pods",subresource="",verb="POST"} %s
apiserver_request_duration_seconds_count{resource="pods",subresource="",verb="POST"} %s
apiserver_request_duration_seconds_sum{resource="pods",subresource="",verb="WATCH"} %s
apiserver_request_duration_seconds_count{resource="pods",subresource="",verb="WATCH"} 7
apiserver_request_body_size_bytes_sum{resource="pods",verb="create"} %s
apiserver_request_body_size_bytes_count{resource="pods",verb="create"} %s
apiserver_watch_events_sizes_sum{resource="pods",version="v1"} 4000
apiserver_watch_events_sizes_count{resource="pods",version="v1"} 2
"""
    costs = account(parse(page % (1.5, 100, 10, 1000, 10)), parse(page % (2.0, 150, 99, 6000, 20)))
    assert costs["calls"] == {"POST pods": {"count": 50, "milliseconds": 10.0}}
    assert costs["bytes of requests"] == {"create pods": 500}
    assert costs["events sent to watches"] == {}  # as many as before


def test_both_schedulers_get_the_same_gang() -> None:
    job = FlyerJob.model_validate(flyer_job("gang", 3))
    group, pods = peer_gang("gang", 3, one_leaf=True)
    assert job.spec.nodes == group["spec"]["schedulingPolicy"]["gang"]["minCount"] == len(pods)
    assert {pod["spec"]["schedulingGroup"]["podGroupName"] for pod in pods} == {"gang"}


def test_the_state_before_a_cold_start_is_one_that_the_engine_can_write() -> None:
    history = cold_start.History(nodes=20, gang_of=5, queued=4, ended=2)
    objects = dict(cold_start._objects(history))
    jobs = [item for key, item in objects.items() if "/flyerjobs/" in key]
    pods = [item for key, item in objects.items() if "/pods/" in key]
    assert (len(jobs), len(pods)) == (history.jobs, history.pods)
    phases = [FlyerJob.model_validate(job).status.phase for job in jobs]
    assert (phases.count("Running"), phases.count("Queued")) == (2, 4)
    node_names = [pod["spec"]["nodeName"] for pod in pods if pod["status"]["phase"] == "Running"]
    assert len(node_names) == len(set(node_names)) == 10


async def test_a_run_continues_an_earlier_one(tmp_path) -> None:
    path, figure = tmp_path / "sched.json", Figure("gang", "s", 1.0)

    async def part() -> None:
        figure.values.append(2.0)

    first = Record(path, quick=False, figures=[figure])
    assert first.missing(["gang", "cold"]) == ["gang", "cold"]
    await first.add("gang", part, {"seen": 1})
    second = Record(path, quick=False, figures=[Figure("cold", "s", values=[1.0])])
    assert second.missing(["gang", "cold"]) == ["cold"]
    assert Record(path, quick=True).missing(["gang"]) == ["gang"]

    async def nothing() -> None:
        pass

    await second.add("cold", nothing)
    document = json.loads(path.read_text())
    assert list(document["figures"]) == ["gang", "cold"]
    assert document["details"] == {"seen": 1}
    assert list(document["parts"]) == ["gang", "cold"]
