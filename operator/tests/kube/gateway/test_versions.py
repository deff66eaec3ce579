"""Gateways and sidecars of adjacent versions interoperate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from flyer.engine import GangStarted, SuspendReceived
from flyer.sidecar import relay
from flyer.sidecar.wire import OLDEST_VERSION, VERSION, LauncherState, Report, Welcome

if TYPE_CHECKING:
    from collections.abc import Callable

OLD = 1
"""A sidecar of the first version, which refuses a welcome of any other version."""


def report(revision: int, **changes: Any) -> Report:
    return Report(revision=revision, port=20000, ranks_seen=2, **changes)


async def test_a_gang_of_old_sidecars_starts_and_is_suspended(harness: Any) -> None:
    gang = harness.gang()
    harness.expect(gang)
    raws = [await harness.greeted(f"gpt-1-{i}", version=OLD) for i in range(2)]
    for raw in raws:
        await raw.send(report(1, launcher=LauncherState.WAITING))
    for raw in raws:
        while (order := await raw.hear_kind("order") or {})["start"] is None:
            pass
        assert "key" not in order["start"] or order["start"]["key"] is None
        await raw.send(report(2, launcher=LauncherState.RUNNING))
    await harness.event(GangStarted)
    harness.signal(gang)
    for raw in raws:
        while (await raw.hear_kind("order") or {})["suspend"] is None:
            pass
    await raws[0].send(report(3, launcher=LauncherState.RUNNING, received=True))
    await harness.event(SuspendReceived)


async def test_a_newer_sidecar_gets_the_common_version(harness: Any) -> None:
    """After a rollback of the operator, pods of the newer version still run."""
    harness.expect(harness.gang())
    await harness.greeted("gpt-1-0", version=VERSION + 1)


@pytest.mark.parametrize("version", [OLDEST_VERSION, VERSION])
async def test_a_sidecar_accepts_every_supported_version(
    version: int, harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _answer_with(version, monkeypatch)
    gang = harness.gang(nodes=1)
    harness.expect(gang)
    await harness.sidecar("gpt-1-0")
    await harness.until(lambda: harness.gateway._streams)
    await harness.sidecars["gpt-1-0"].relay.connected.wait()


async def test_a_sidecar_refuses_an_unsupported_version(
    harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _answer_with(VERSION + 1, monkeypatch)
    ended: list[str] = []
    init: Callable[..., None] = relay.StreamEndedError.__init__

    def remember(self: relay.StreamEndedError, code: str, message: str) -> None:
        init(self, code, message)
        ended.append(code)

    monkeypatch.setattr(relay.StreamEndedError, "__init__", remember)
    harness.expect(harness.gang(nodes=1))
    await harness.sidecar("gpt-1-0")
    await harness.until(lambda: "bad_version" in ended)


def _answer_with(version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from flyer.kube.gateway import stream

    def welcome(beat: float, silence: float, _spoken: int) -> Welcome:
        return Welcome(beat, silence, version)

    monkeypatch.setattr(stream, "Welcome", welcome)
