"""A test cluster's folder, removed in two goes."""

import shutil

import pytest

from testcluster import down
from testcluster.state import State


def test_an_interrupted_removal_can_be_repeated(tmp_path, monkeypatch):
    monkeypatch.setattr(down.network, "remove", lambda _: None)
    monkeypatch.setattr(down, "kill_all", lambda _: None)
    monkeypatch.setattr(down, "_remove_cgroups", lambda _: None)
    folder = tmp_path / "cluster"
    State(folder, octet=7).save()
    (folder / "nodes" / "a1").mkdir(parents=True)
    (folder / "kubeconfig").write_text("{}")
    remove = shutil.rmtree

    def interrupted(path, *_):
        raise KeyboardInterrupt(str(path))

    monkeypatch.setattr(shutil, "rmtree", interrupted)
    with pytest.raises(KeyboardInterrupt):
        down.remove(folder)
    assert State.load(folder).octet == 7
    monkeypatch.setattr(shutil, "rmtree", remove)
    down.remove(folder)
    assert not folder.exists()
