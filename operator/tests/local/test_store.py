"""Store after a crash: whole objects, whole lines, one owner."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from flyer.client.logs import LogLine, LogReader
from flyer.errors import FlyerError
from flyer.local import store as store_module
from flyer.local.state_directory import StatePaths, driver_alive, find_state
from flyer.local.store import Store, read_json_lines


def document(name, queue="default"):
    container = {"name": "trainer", "command": ["true"]}
    spec = {"nodes": 1, "queue": queue, "template": {"spec": {"containers": [container]}}}
    return {"metadata": {"namespace": "default", "name": name}, "spec": spec}


def test_a_commit_replaces_the_whole_object(tmp_path):
    store = Store.open(tmp_path)
    store.commit("default/a", document("a", "q" * 60))
    store.commit("default/a", document("a", "short"))
    (job,) = store.jobs()
    assert (job.key, job.spec.queue) == ("default/a", "short")
    assert [path.name for path in (tmp_path / "jobs").iterdir()] == ["default.a.json"]
    store.close()


def test_an_incomplete_new_file_of_a_job_is_ignored(tmp_path):
    store = Store.open(tmp_path)
    store.commit("default/a", document("a"))
    (tmp_path / "jobs" / ".default.a.json.new").write_text('{"metadata": {')
    assert [job.key for job in store.jobs()] == ["default/a"]
    store.close()


def test_the_error_names_an_invalid_job_file(tmp_path):
    store = Store.open(tmp_path)
    (tmp_path / "jobs" / "default.b.json").write_text("{}")
    with pytest.raises(FlyerError, match=r"default\.b\.json"):
        store.jobs()
    store.close()


@pytest.mark.parametrize("block", [1, 3, 64])
@pytest.mark.parametrize(
    ("data", "expected"),
    [(b"", b""), (b"torn", b""), (b"a\n", b"a\n"), (b"aaaa\nbb\ntorn", b"aaaa\nbb\n")],
)
def test_a_long_file_is_read_from_its_end(tmp_path, monkeypatch, block, data, expected):
    monkeypatch.setattr(store_module, "BLOCK_BYTES", block)
    monkeypatch.setattr(type(tmp_path), "read_bytes", None)  # it may be larger than memory
    path = tmp_path / "decisions.jsonl"
    path.write_bytes(data)
    appender = store_module.Appender(path)
    appender.append_line("new")
    appender.close()
    with path.open("rb") as file:
        assert file.read() == expected + b"new\n"


def test_an_incomplete_last_line_is_truncated_by_the_next_append(tmp_path):
    store = Store.open(tmp_path)
    store.events.append({"sequence": 1})
    store.close()
    with store.paths.events.open("ab") as file:
        file.write(b'{"sequence": 2, "mess')
    assert [record["sequence"] for record in read_json_lines(store.paths.events)] == [1]
    store = Store.open(tmp_path)
    store.events.append({"sequence": 2})
    store.close()
    assert [record["sequence"] for record in read_json_lines(store.paths.events)] == [1, 2]


def test_one_owner_at_a_time_and_the_lock_is_released_with_its_process(tmp_path):
    paths = StatePaths(tmp_path)
    assert not driver_alive(paths)
    code = (
        "import sys, pathlib; from flyer.local.store import Store\n"
        f"Store.open(pathlib.Path({str(tmp_path)!r})); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout.readline() == "held\n"
        assert driver_alive(paths)
        with pytest.raises(FlyerError, match=f"process {owner.pid} already drives"):
            Store.open(tmp_path)
        owner.kill()
    assert not driver_alive(paths)
    Store.open(tmp_path).close()


def test_a_deep_state_directory_has_sockets_in_a_short_path(tmp_path):
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    paths = StatePaths(deep)
    assert len(os.fsencode(paths.control)) < 107
    assert paths.run == StatePaths(deep).run
    assert paths.run != StatePaths(tmp_path / "other" / ("d" * 100)).run


def test_a_socket_folder_that_others_may_write_is_refused(tmp_path):
    paths = StatePaths(tmp_path / "s")
    # Outside of tmp_path, whose name an earlier run may have had.
    paths.run.mkdir(parents=True, exist_ok=True)
    try:
        paths.run.chmod(0o777)
        with pytest.raises(FlyerError, match="writable by others"):
            Store.open(tmp_path / "s")
    finally:
        paths.run.rmdir()


def test_a_single_local_cluster_is_selected_and_several_are_listed(tmp_path, monkeypatch):
    monkeypatch.delenv("FLYER_STATE", raising=False)
    with pytest.raises(FlyerError) as excinfo:
        find_state(start=tmp_path)
    assert excinfo.value.exit_status == 107
    Store.open(tmp_path / ".flyer" / "one").close()
    assert find_state(start=tmp_path).root == tmp_path / ".flyer" / "one"
    two = Store.open(tmp_path / ".flyer" / "two")
    assert find_state(start=tmp_path).root == tmp_path / ".flyer" / "two", "the living one"
    two.close()
    with pytest.raises(FlyerError, match="2 clusters") as excinfo:
        find_state(start=tmp_path)
    assert excinfo.value.exit_status == 2


def test_logs_return_every_line_once_and_an_unterminated_line_at_the_end(tmp_path):
    rank = tmp_path / "attempt-1" / "rank-0000.log"
    rank.parent.mkdir()
    rank.write_bytes(b"one\ntw")
    reader = LogReader(tmp_path, rank=None, attempt=None)
    assert list(reader.read(final=False)) == [LogLine(1, 0, "one")]
    with rank.open("ab") as file:
        file.write(b"o\n\nthree")
    assert [line.text for line in reader.read(final=False)] == ["two", ""]
    other = tmp_path / "attempt-2" / "rank-0001.log"
    other.parent.mkdir()
    other.write_bytes(b"\xff\xfe\r\n")
    assert [line.text for line in reader.read(final=True)] == ["three", "��"]
    assert list(reader.read(final=True)) == []
    only = LogReader(tmp_path, rank=1, attempt=2)
    assert len(list(only.read(final=True))) == 1


def test_a_line_longer_than_a_read_is_not_lost(tmp_path):
    rank = tmp_path / "attempt-1" / "rank-0000.log"
    rank.parent.mkdir()
    rank.write_bytes(b"x" * (3 << 20) + b"\nend\n")
    reader = LogReader(tmp_path, rank=None, attempt=None)
    lines = [line.text for line in reader.read(final=False)]
    assert "".join(lines) == "x" * (3 << 20) + "end"
    assert lines[-1] == "end"


def test_events_keep_their_sequence_numbers_over_restarts(tmp_path):
    from flyer.local.event_log import EventLog

    published = []
    store = Store.open(tmp_path)
    log = EventLog(store, published.append)
    log.record(1.0, "Queued", "waits", job="default/a", fields={"nodes": 4})
    store.close()
    store = Store.open(tmp_path)
    log = EventLog(store, published.append)
    log.record(2.0, "Started", "runs", job="default/b")
    assert [event.sequence for event in published] == [1, 2]
    assert [event.reason for event in log.since(0)] == ["Queued", "Started"]
    assert [event.reason for event in log.since(0, "default/b")] == ["Started"]
    assert [event.reason for event in log.since(2)] == ["Started"]
    assert json.loads(store.paths.events.read_text().splitlines()[0])["fields"] == {"nodes": 4}
    store.close()
