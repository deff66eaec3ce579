"""False, flooding or stalling sidecars are refused and counted; others are not affected."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from flyer.engine import GangStarted, Killed, PodExited, Released, SuspendReceived
from flyer.kube.servers.connection_limits import ConnectionLimitSettings
from flyer.sidecar.wire import LauncherState, Report

from .tokens import token_of

if TYPE_CHECKING:
    from flyer.kube.gateway import GatewaySettings


def hello(token: str, version: int = 1) -> dict[str, object]:
    return {"kind": "hello", "version": version, "token": token}


RUNNING = Report(revision=1, launcher=LauncherState.RUNNING, port=20000, ranks_seen=2)


async def test_a_token_unknown_to_the_api_server_is_refused(harness: Any) -> None:
    harness.expect(harness.gang())
    raw = await harness.raw()
    await raw.send(hello(token_of("gpt-1-0", secret="forged")))
    assert await raw.refused() == "bad_token"
    assert harness.count("bad_token") == 1


@pytest.mark.parametrize(
    "token",
    ["stolen", "a.b.c", "..", "a." + "W10" + ".c", token_of("other-1-0"), token_of("x", "")],
)
async def test_a_token_that_claims_no_expected_pod_costs_no_review(
    harness: Any, token: str
) -> None:
    harness.expect(harness.gang())
    raw = await harness.raw()
    await raw.send(hello(token))
    assert await raw.refused() == "unknown_pod"
    assert harness.identities.reviews == 0


async def test_an_expired_token(harness: Any) -> None:
    harness.expect(harness.gang())
    harness.identities.expired.add(token_of("gpt-1-0"))
    raw = await harness.raw()
    await raw.send(hello(token_of("gpt-1-0")))
    assert await raw.refused() == "bad_token"


async def test_a_valid_token_of_a_pod_without_a_gang_is_refused(harness: Any) -> None:
    harness.gang("other")  # known to the API server, not expected here
    raw = await harness.raw()
    await raw.send(hello(token_of("other-1-0")))
    assert await raw.refused() == "unknown_pod"
    assert harness.count("unknown_pod") == 1


async def test_another_jobs_token_is_valid_only_for_that_job(harness: Any) -> None:
    """The token identifies a pod, whatever its messages claim."""
    own_gang, other_gang = harness.gang("mine", nodes=1), harness.gang("theirs", nodes=1)
    harness.expect(own_gang)
    harness.expect(other_gang)
    raw = await harness.greeted("theirs-1-0")
    await raw.send({**_body(RUNNING), "job": "lab/mine", "pod": "mine-1-0", "node_rank": 0})
    assert (await harness.event(GangStarted)).job == "lab/theirs"
    assert not [event for event in harness.events if event.job == "lab/mine"]


def _body(report: Report) -> dict[str, object]:
    import json

    from flyer.sidecar.wire import encode

    return json.loads(encode(report))


async def test_an_unrequested_acknowledgement_is_counted(harness: Any) -> None:
    gang = harness.gang(nodes=1)
    harness.expect(gang)
    raw = await harness.greeted("gpt-1-0")
    await raw.send(replace(RUNNING, received=True))
    await raw.hear_kind("acknowledgement")
    assert harness.count("unasked") == 1
    assert not [event for event in harness.events if isinstance(event, SuspendReceived)]
    # A requested acknowledgement counts.
    harness.signal(gang)
    while (await raw.hear_kind("order") or {})["suspend"] is None:
        pass
    await raw.send(replace(RUNNING, revision=2, received=True))
    assert (await harness.event(SuspendReceived)).attempt == 1


@pytest.mark.parametrize("field", ["given_up", "end"])
async def test_a_report_about_another_pods_rank_is_refused(harness: Any, field: str) -> None:
    harness.expect(harness.gang(nodes=2))  # ranks 0, 1 and 2, 3
    raw = await harness.greeted("gpt-1-1")
    claims = {"given_up": {"rank": 0, "reason": "x"}, "end": {"code": 1, "rank": 0}}
    await raw.send({**_body(RUNNING), field: claims[field]})
    assert await raw.refused() == "bad_rank"
    assert harness.count("bad_rank") == 1
    assert not [event for event in harness.events if isinstance(event, PodExited)]


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (b"\x00\xff\xfe garbage\n", "bad_line"),
        (b"[1, 2]\n", "bad_line"),
        (b"{" * 30000 + b"\n", "bad_line"),
        (b"x" * 70000, "bad_line"),
        ({"kind": "order"}, "bad_operation"),
        ({"kind": ["report"]}, "bad_operation"),
        ({"kind": "report"}, "bad_field"),
        ({"kind": "report", "revision": -1}, "bad_field"),
        ({"kind": "report", "revision": 1, "launcher": "flying"}, "bad_field"),
        ({"kind": "report", "revision": 1, "ranks_seen": 0, "output": 0, "port": 0}, "bad_field"),
        ({"kind": "report", "revision": 1, "ranks_seen": 1e9, "output": 0}, "bad_field"),
        (hello(token_of("gpt-1-0")), "bad_handshake"),
    ],
)
async def test_garbage_after_the_hello(harness: Any, message: object, code: str) -> None:
    harness.expect(harness.gang())
    raw = await harness.greeted("gpt-1-0")
    await raw.send(message)
    assert await raw.refused() == code
    assert harness.count(code) == 1
    await harness.greeted("gpt-1-1")  # others are served


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (b"GET / HTTP/1.1\r\n", "bad_handshake"),
        (RUNNING, "bad_handshake"),
        (hello("x" * 9000), "bad_handshake"),
        (b"x" * 70000, "bad_handshake"),
        (hello(token_of("gpt-1-0"), version=0), "bad_version"),
    ],
)
async def test_garbage_instead_of_the_hello(harness: Any, message: object, code: str) -> None:
    harness.expect(harness.gang())
    raw = await harness.raw()
    await raw.send(message)
    assert await raw.refused() == code
    assert harness.identities.reviews == 0


async def test_no_tls_at_all(harness: Any) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", harness.port)
    writer.write(b'{"kind": "hello"}\n' * 10)
    await harness.until(lambda: harness.count("bad_handshake") == 1)
    writer.close()


class TestSomeTimeForTheHello:
    @pytest.fixture
    def settings(self, settings: GatewaySettings) -> GatewaySettings:
        return replace(settings, hello_seconds=3)

    async def test_a_connection_without_a_hello_is_closed(self, harness: Any) -> None:
        raw = await harness.raw()
        assert await raw.refused() == "silent"


async def test_the_api_server_is_away(harness: Any) -> None:
    harness.expect(harness.gang())
    harness.identities.away = True
    raw = await harness.raw()
    await raw.send(hello(token_of("gpt-1-0")))
    assert await raw.refused() == "review_unavailable"


class TestLittleTimeForTheHello:
    @pytest.fixture
    def settings(self, settings: GatewaySettings) -> GatewaySettings:
        return replace(settings, hello_seconds=0.5)

    async def test_a_connection_without_a_handshake_is_closed(self, harness: Any) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", harness.port)
        await harness.until(lambda: harness.count("bad_handshake") == 1)
        writer.close()


class TestLittleTimeForALine:
    @pytest.fixture
    def settings(self, settings: GatewaySettings) -> GatewaySettings:
        return replace(settings, silence_seconds=0.6)

    async def test_a_slow_loris(self, harness: Any) -> None:
        """One byte at a time, each before the timeout, but never a complete line."""
        harness.expect(harness.gang())
        raw = await harness.greeted("gpt-1-0")

        async def drip() -> None:
            with contextlib.suppress(OSError):
                for byte in b'{"kind": "report", ' * 100:
                    await raw.send(bytes([byte]))
                    await asyncio.sleep(0.05)

        dripping = asyncio.create_task(drip())
        assert await raw.refused() == "silent"
        dripping.cancel()

    async def test_a_half_open_connection_ends_by_itself(self, harness: Any) -> None:
        """It sends nothing, not even the end of the connection."""
        harness.expect(harness.gang())
        raw = await harness.greeted("gpt-1-0")
        raw.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await harness.until(lambda: harness.count("silent") == 1)
        await harness.until(lambda: harness.gateway.absent("lab/gpt") == ["gpt-1-0", "gpt-1-1"])


class TestLittleTimeToRead:
    @pytest.fixture
    def settings(self, settings: GatewaySettings) -> GatewaySettings:
        return replace(settings, write_seconds=0.5, lines_per_second=1000, lines_burst=10_000)

    async def test_a_sidecar_that_does_not_read_is_disconnected(self, harness: Any) -> None:
        """Its orders are not buffered: the stream ends."""
        gang = harness.gang(nodes=1)
        harness.expect(gang)
        raw = await harness.greeted("gpt-1-0")
        raw.writer.transport.pause_reading()  # type: ignore[attr-defined]
        big = "x" * 1_000_000
        gang_state = harness.gateway._gangs["lab/gpt"]
        gang_state.order = lambda *_: _big_order(big)
        gang_state.order_version += 1

        async def beat() -> None:
            with contextlib.suppress(OSError):
                while True:
                    gang_state.order_version += 1
                    await raw.send({"kind": "beat"}, replace(RUNNING, revision=1))
                    await asyncio.sleep(0.1)

        beating = asyncio.create_task(beat())
        await harness.until(lambda: harness.count("slow") == 1)
        beating.cancel()


def _big_order(text: str) -> object:
    from flyer.sidecar.wire import Order, Suspend

    return Order(suspend=Suspend(1.0, text))


class TestFloods:
    @pytest.fixture
    def settings(self, settings: GatewaySettings) -> GatewaySettings:
        return replace(
            settings,
            hello_seconds=90,
            lines_per_second=10,
            lines_burst=20,
            limits=ConnectionLimitSettings(
                total_max=12, source_max=8, rate_per_second=1e6, burst=10_000
            ),
        )

    async def test_a_flood_of_lines(self, harness: Any) -> None:
        harness.expect(harness.gang())
        raw = await harness.greeted("gpt-1-0")
        other = await harness.greeted("gpt-1-1")
        for _ in range(10):
            await raw.send(*[{"kind": "beat"}] * 10)
        assert await raw.refused() == "flood"
        assert harness.count("flood") == 1
        await other.send(RUNNING)
        assert await other.hear_kind("acknowledgement") is not None

    async def test_a_flood_of_connections_from_many_addresses_while_a_gang_joins(
        self, harness: Any
    ) -> None:
        """Members have reserved slots, and connected ones stay."""
        harness.expect(harness.gang(nodes=8))
        member_0 = await harness.greeted("gpt-1-0")
        sockets = await asyncio.gather(
            *(
                asyncio.open_connection(
                    "127.0.0.1", harness.port, local_addr=(f"127.0.{i % 4 + 1}.{i % 40 + 1}", 0)
                )
                for i in range(400)
            )
        )
        other_members = [await harness.greeted(f"gpt-1-{i}") for i in range(1, 8)]
        assert harness.count("too_many") >= 300
        for member in (member_0, *other_members):
            await member.send(RUNNING)
            assert await member.hear_kind("acknowledgement") is not None
        for _, writer in sockets:
            writer.transport.abort()
        await harness.until(lambda: harness.gateway._listener.unauthenticated == 0)

    async def test_a_member_with_an_unknown_address_gets_a_slot(self, harness: Any) -> None:
        """Its node may also be a source of silent connections: the oldest are evicted."""
        harness.expect(harness.gang())
        for address in ("127.0.9.1", "127.0.9.2"):
            for _ in range(20):
                await asyncio.open_connection("127.0.0.1", harness.port, local_addr=(address, 0))
        member = await harness.greeted("gpt-1-1", address="127.0.9.1")
        await member.send(RUNNING)
        assert await member.hear_kind("acknowledgement") is not None

    async def test_a_flood_of_claims_delays_no_review_of_a_member(self, harness: Any) -> None:
        """Tokens that claim to be the pod's, from other addresses, share few reviews."""
        harness.expect(harness.gang())
        harness.identities.slow = asyncio.Event()  # reviews of forged tokens take the maximum time
        raws = []
        for i in range(12):
            raw = await harness.raw(address=f"127.0.7.{i + 1}")
            await raw.send(hello(token_of("gpt-1-0", secret=f"forged {i}")))
            raws.append(raw)
        limit = harness.settings.unexpected_reviews_max
        await harness.until(lambda: harness.identities.reviews == limit)
        await harness.greeted("gpt-1-0")
        assert harness.identities.reviews == limit + 1
        harness.identities.slow.set()
        assert {await raw.refused() for raw in raws} == {"bad_token"}

    async def test_a_flood_of_one_invalid_token_costs_one_review(self, harness: Any) -> None:
        harness.expect(harness.gang())
        for _ in range(5):
            raw = await harness.raw(address="127.0.7.1")
            await raw.send(hello(token_of("gpt-1-0", secret="forged")))
            assert await raw.refused() == "bad_token"
        assert harness.identities.reviews == 1

    async def test_reviews_of_a_flood_of_invalid_tokens_are_limited(self, harness: Any) -> None:
        harness.expect(harness.gang())

        async def knock() -> str | None:
            raw = await harness.raw()
            await raw.send(hello(token_of("gpt-1-0", secret="forged")))
            return await raw.refused()

        codes = await asyncio.gather(*(knock() for _ in range(6)))
        assert set(codes) == {"bad_token"}
        await harness.greeted("gpt-1-0")


async def test_of_two_streams_of_one_pod_the_newer_one_counts(harness: Any) -> None:
    gang = harness.gang(nodes=1)
    harness.expect(gang)
    old = await harness.greeted("gpt-1-0")
    new = await harness.greeted("gpt-1-0")
    assert await old.refused() == "replaced"
    assert harness.count("replaced") == 1
    await new.send(RUNNING)
    await harness.event(GangStarted)
    await old.send(replace(RUNNING, revision=9, released=True))
    await new.hear_kind("acknowledgement")
    assert not [event for event in harness.events if isinstance(event, Released)]


async def test_a_forgotten_attempt_is_disconnected_and_ignored(harness: Any) -> None:
    gang = harness.gang(nodes=1)
    harness.expect(gang)
    raw = await harness.greeted("gpt-1-0")
    harness.gateway.forget(gang.key, 1, gang.uid)
    await raw.send(RUNNING)
    assert await raw.refused() == "forgotten"
    assert harness.events == []
    again = await harness.raw()
    await again.send(hello(token_of("gpt-1-0")))
    assert await again.refused() == "unknown_pod"


async def test_a_pod_of_the_previous_attempt_is_in_no_gang(harness: Any) -> None:
    harness.expect(harness.gang(attempt=1, nodes=1))
    old = await harness.greeted("gpt-1-0")
    harness.expect(harness.gang(attempt=2, nodes=1))
    assert await old.refused() == "forgotten"
    await harness.greeted("gpt-2-0")


async def test_exits_of_a_forgotten_gang_are_not_reported(harness: Any) -> None:
    gang = harness.gang(nodes=1)
    harness.expect(gang)
    await harness.greeted("gpt-1-0")
    waiting = asyncio.create_task(harness.gateway.conclude("uid-gpt-1-0", Killed(9)))
    await asyncio.sleep(0)  # it waits for the sidecar's report
    harness.gateway.forget(gang.key, 1, gang.uid)
    harness.expect(harness.gang(attempt=2, nodes=1))
    assert await waiting == Killed(9)
    assert harness.events == []
    assert {item.start.attempt for item in harness.gateway._woken} == {2}
