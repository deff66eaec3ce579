"""Patches of a status: what the API server compares, and what it writes in another way."""

import copy

import pytest
from flyer.kube.services.jobs.commits import _patch

from fakekube.apiserver.patches import json_patch
from fakekube.errors import ApiRefusal

STATUS = {
    "phase": "Running",
    "epoch": 3,
    "occupied": ["a0", "a1"],
    "exits": [{"rank": 1, "traceback": "File “x” in <module>\n  a & b …"}],
    "progress": {"loss": 1e-5, "a/b~c": "×"},
    "conditions": None,
}


def job(status):
    return {"metadata": {"uid": "u1"}, "status": copy.deepcopy(status)}


@pytest.mark.parametrize("before", [STATUS, {"phase": "Pending"}, {}, None])
def test_a_status_is_replaced_whatever_it_contains(before):
    patch = _patch("u1", before, {"phase": "Succeeded"})
    value = job(before) if before is not None else {"metadata": {"uid": "u1"}}
    assert json_patch(value, patch)["status"] == {"phase": "Succeeded"}


CHANGES = {
    "another phase": lambda job: job["status"].update(phase="Suspended"),
    "another epoch": lambda job: job["status"].update(epoch=4),
    "another node": lambda job: job["status"]["occupied"].append("a2"),
    "another rank": lambda job: job["status"]["exits"][0].update(rank=2),
    "no exit": lambda job: job["status"]["exits"].clear(),
    "another object": lambda job: job["metadata"].update(uid="u2"),
    "no status": lambda job: job.pop("status"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_writers_status_is_not_replaced(change):
    patch = _patch("u1", STATUS, {"phase": "Succeeded"})
    changed = job(STATUS)
    CHANGES[change](changed)
    with pytest.raises(ApiRefusal):
        json_patch(changed, patch)


def test_a_whole_status_is_one_test():
    status = {"phase": "Running", "occupied": ["a0"]}
    assert [each["path"] for each in _patch("u1", status, {})][1:] == ["/status", "/status"]
