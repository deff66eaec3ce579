"""The key of an attempt's collectives: only for its pods, the same from every leader."""

from __future__ import annotations

import stat
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from flyer.kube.gateway.certificates import SECRET, certificates_of, renewed
from flyer.sidecar.wire import LauncherState, Report, parse_from_gateway

from .conftest import DATA
from .launchers import Launcher

WAITING = Report(revision=1, launcher=LauncherState.WAITING, port=20000)


async def keys_of(harness: Any, *names: str, version: int = 2) -> list[str | None]:
    """The pods' start orders."""
    raws = [await harness.greeted(name, version=version) for name in names]
    for raw in raws:
        await raw.send(WAITING)
    keys = []
    for raw in raws:
        while (order := await raw.hear_kind("order") or {})["start"] is None:
            pass
        keys.append(order["start"]["key"])
        raw.close()
    return keys


async def test_all_pods_of_an_attempt_get_one_key_and_others_another(harness: Any) -> None:
    harness.expect(harness.gang())
    first = await keys_of(harness, "gpt-1-0", "gpt-1-1")
    harness.expect(harness.gang(attempt=2))
    second = await keys_of(harness, "gpt-2-0", "gpt-2-1")
    harness.expect(harness.gang("other"))
    third = await keys_of(harness, "other-1-0", "other-1-1")
    key_sets = [set(item) for item in (first, second, third)]
    assert all(len(match) == 1 for match in key_sets)
    assert len(set.union(*key_sets)) == 3
    assert all(len(bytes.fromhex(key or "")) == 32 for match in key_sets for key in match)


async def test_the_next_leader_gives_the_same_key(harness: Any) -> None:
    """A gang may start partly under one leader and partly under the next."""
    harness.expect(harness.gang())
    before = await keys_of(harness, "gpt-1-0", "gpt-1-1")
    await harness.shut()
    await harness.open()
    harness.expect(harness.gang())
    assert await keys_of(harness, "gpt-1-0", "gpt-1-1") == before


async def test_a_gang_with_an_old_sidecar_has_no_key(harness: Any) -> None:
    """A group whose members have different keys would not form."""
    harness.expect(harness.gang())
    old = await harness.greeted("gpt-1-0", version=1)
    new = await harness.greeted("gpt-1-1", version=2)
    for raw in (old, new):
        await raw.send(WAITING)
    for raw in (old, new):
        while (order := await raw.hear_kind("order") or {})["start"] is None:
            pass
        assert order["start"]["key"] is None


async def test_a_sidecar_passes_the_key_only_to_its_launcher(harness: Any) -> None:
    gang = harness.gang(nodes=1)
    harness.expect(gang)
    await harness.sidecar("gpt-1-0")
    launcher = Launcher(harness.folder / "gpt-1-0")
    await launcher.open()
    key = (await launcher.receive("start"))["key"]
    assert len(bytes.fromhex(key)) == 32
    path = harness.folder / "gpt-1-0" / "sidecar-order.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    order = parse_from_gateway(path.read_bytes())
    assert key not in repr(order)
    readable = [
        item for item in path.parent.rglob("*")
        if item.is_file() and item != path and key in item.read_text(errors="replace")
    ]  # fmt: skip
    assert readable == []


def test_the_secret_is_kept_over_renewals_and_created_if_missing() -> None:
    now = datetime.now(UTC)
    secret = certificates_of(DATA).secret
    assert len(bytes.fromhex(secret)) == 32
    assert certificates_of(renewed(DATA, ["another.name"], now)).secret == secret
    older = {name: value for name, value in DATA.items() if name != SECRET}
    again = certificates_of(renewed(older, ["localhost", "127.0.0.1"], now))
    assert again.secret not in ("", secret)
    assert replace(again, secret=secret) == certificates_of(DATA)  # running sidecars trust the rest
    for bad in (b"", b"zz", b"ab"):
        assert certificates_of(renewed({**DATA, SECRET: bad}, ["localhost"], now)).secret != ""
    assert secret not in repr(certificates_of(DATA))
