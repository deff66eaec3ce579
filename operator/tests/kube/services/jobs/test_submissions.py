"""Bookkeeping of unreadable objects."""

from types import SimpleNamespace

from flyer.kube.services.jobs.quarantine import Quarantine
from flyer.kube.services.jobs.submissions import Submissions


def unreadable(index, uid=None):
    return SimpleNamespace(
        key=f"default/bad-{index}", uid=uid or f"uid-{index}", job=None, problem="spec.nodes: ten",
        kept_nodes=frozenset(),
    )  # fmt: skip


def test_unreadable_objects_are_reported_once_and_forgotten_when_deleted():
    recorded = []
    recorder = SimpleNamespace(record=lambda key, uid, _what: recorded.append((key, uid)))
    commits = SimpleNamespace(is_foreign=lambda _view: False)
    submissions = Submissions(
        None, None, recorder, Quarantine(lambda *_: None), None, commits, epoch=None,
        record_event=None, enqueue=None, spawn=None, request_rebuild=None,
    )  # fmt: skip
    value = unreadable(0)
    for _ in range(3):
        submissions.changed(value, value)
        submissions.report_invalid(value)  # a rebuild
    assert recorded == [(value.key, value.uid)]
    again = unreadable(0, "uid-other")
    submissions.changed(value, again)
    assert recorded[1:] == [(again.key, again.uid)]
    for index in range(1, 1000):
        view = unreadable(index)
        submissions.changed(None, view)
        submissions.changed(view, None)
    assert len(recorded) == 1001
    assert list(submissions._invalid) == [again.key]
