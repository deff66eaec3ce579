"""`threefs snapshot` and the Python interface, without a cluster."""

from __future__ import annotations

import json
from contextlib import nullcontext
from typing import Any

import pytest
from threefs.cli import snapshot
from threefs.cli.output import Output
from threefs.snapshots import Snapshot, Snapshots


class Native:
    """A volume with snapshots, as the native client returns them."""

    def __init__(self) -> None:
        self.raw: list[tuple[str, int, int, int]] = []

    def create_snapshot(self, volume: str, name: str) -> tuple[str, int, int, int]:
        assert volume == "/volumes/one"
        self.raw.append((name, 1_764_369_601 * 10**9, 5 << 30, 7))
        return self.raw[-1]

    def remove_snapshot(self, volume: str, name: str) -> None:
        assert volume == "/volumes/one"
        self.raw = [raw for raw in self.raw if raw[0] != name]

    def snapshots(self, volume: str) -> list[tuple[str, int, int, int]]:
        assert volume == "/volumes/one"
        return self.raw


class Client:
    def __init__(self, native: Any) -> None:
        self.native = native

    def snapshots(self, volume: str) -> Snapshots:
        return Snapshots(self.native, volume)


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> Native:
    native = Native()
    monkeypatch.setattr(snapshot, "connect", lambda *_, **__: nullcontext(Client(native)))
    return native


def test_snapshots_are_created_listed_and_removed(
    native: Native, capsys: pytest.CaptureFixture[str]
) -> None:
    volume = "/volumes/one"
    for name in ("before-training", "line\nbreak"):
        snapshot.create(None, volume, name, 1.0)
    assert "/volumes/one/.snapshots/before-training\n" in capsys.readouterr().out
    snapshot.list_snapshots(None, volume, Output.TABLE, 1.0)
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 3, "a name cannot break the table"
    assert table[1].split()[-1] == "before-training"
    assert "2025-11-28 22:40:01" in table[1]
    snapshot.list_snapshots(None, volume, Output.JSON, 1.0)
    listed = json.loads(capsys.readouterr().out)
    assert listed["snapshots"][0] == {
        "name": "before-training",
        "created_ns": 1_764_369_601 * 10**9,
        "size": 5 << 30,
        "inodes": 7,
    }
    snapshot.remove(None, volume, "before-training", 1.0)
    assert [raw[0] for raw in native.raw] == ["line\nbreak"]


def test_the_interface_returns_what_was_created() -> None:
    snapshots = Snapshots(Native(), "/volumes/one")  # type: ignore[arg-type]
    created = snapshots.create("s")
    assert created == Snapshot(name="s", created_ns=1_764_369_601 * 10**9, size=5 << 30, inodes=7)
    assert snapshots.all() == [created]
