"""Whole gangs of real sidecars: barrier, start, suspension, resync, ends."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

from flyer.api import Phase
from flyer.engine import (
    CheckpointReported,
    GangStarted,
    Killed,
    LogObserved,
    PodExited,
    ProgressReported,
    Released,
    StreamLost,
    StreamRestored,
    Succeeded,
    SuspendReceived,
    UserStateSet,
)
from flyer.job.protocol import SuspendCode

from .launchers import client, launcher, started
from .tokens import token_of


async def test_no_rank_starts_before_all_pods_are_connected(harness: Any) -> None:
    gang = harness.gang(nodes=2)
    gang.pods[0] = replace(gang.pods[0], ip="10.0.0.1")
    gang.pods[1] = replace(gang.pods[1], ip="")
    harness.expect(gang)
    await harness.sidecar("gpt-1-0")
    first = await launcher(harness, "gpt-1-0")
    await harness.until(lambda: harness.gateway.absent(gang.key) == ["gpt-1-1"])
    await harness.sidecar("gpt-1-1")
    second = await launcher(harness, "gpt-1-1")
    sidecar = harness.sidecars["gpt-1-1"]
    await harness.until(lambda: sidecar.state.acknowledged >= sidecar.state.report.revision)
    assert harness.sidecars["gpt-1-0"].state.start is None  # an address is still unknown
    harness.gateway.locate("uid-gpt-1-1", "10.0.0.2")
    orders = [(await launched.receive("start"))["pod"] for launched in (first, second)]
    port = harness.sidecars["gpt-1-0"].state.report.port
    assert [order["node_rank"] for order in orders] == [0, 1]
    assert {(order["master_addr"], order["master_port"]) for order in orders} == {
        ("10.0.0.1", port)
    }
    document = json.loads((harness.folder / "gpt-1-1" / "topology.json").read_text())
    assert [node["address"] for node in document["nodes"]] == ["10.0.0.1", "10.0.0.2"]
    assert not harness.events
    await first.send(op="launcher", state="running")
    await second.send(op="launcher", state="running")
    assert await harness.event(GangStarted) == GangStarted(gang.key, 1, uid=gang.uid)


async def test_each_nodes_latest_message_time_is_known(harness: Any) -> None:
    assert harness.gateway.heartbeats() == {}
    gang, _ = await started(harness)
    first = harness.gateway.heartbeats()
    assert first.keys() == {"a0", "a1"}
    assert all(value.replaceable for value in first.values())
    await harness.until(
        lambda: all(harness.gateway.heartbeats()[name] > first[name] for name in first)
    )
    await harness.sidecars[gang.pods[1].name].end()
    await harness.until(lambda: len(harness.gateway._streams) == 1)
    silent = harness.gateway.heartbeats()
    await harness.until(lambda: harness.gateway.heartbeats()["a0"] > silent["a0"])
    assert harness.gateway.heartbeats()["a1"] == silent["a1"]
    harness.gateway.forget(gang.key, 1, gang.uid)
    assert harness.gateway.heartbeats() == {}
    # A silent node of a single-node gang could continue: Kubernetes decides about it.
    await started(harness, 1, "alone")
    [alone] = harness.gateway.heartbeats().values()
    assert not alone.replaceable


async def test_a_sidecar_of_an_adopted_gang_that_never_connects_is_silent(
    harness: Any,
) -> None:
    for name, phase, replaceable in (
        ("starts", Phase.STARTING, False), ("ran", Phase.RUNNING, True),
        ("saves", Phase.SUSPENDING, True),
    ):  # fmt: skip
        gang = harness.gang(name)
        gang.job = gang.job.replace(status=gang.job.status.replace(phase=phase))
        harness.expect(gang)
        heartbeats = harness.gateway.heartbeats()
        assert {heartbeat.received_at for heartbeat in heartbeats.values()} == {0.0}
        assert [value.replaceable for value in heartbeats.values()] == [replaceable, replaceable]
        harness.gateway.forget(gang.key, 1, gang.uid)


async def test_reports_of_ranks_become_events(harness: Any) -> None:
    gang, launchers = await started(harness)
    with await client(harness, "gpt-1-0", 0) as rank:
        assert rank.welcome.user_state == 7
        await asyncio.to_thread(rank.progress, 5, {"loss": 1.5, "exposed": 0.125})
        event = await harness.event(ProgressReported)
        assert (event.step, event.exposed_percent) == (5, 12)
        assert harness.gateway.progress(gang.key) == (5, {"loss": 1.5, "exposed": 0.125})
        await asyncio.to_thread(lambda: rank.checkpoint(5, "/ckpt", durable=True))
        event = await harness.event(CheckpointReported)
        assert (event.step, event.path, event.durable) == (5, "/ckpt", True)
        await asyncio.to_thread(rank.user_state, -1)
        assert (await harness.event(UserStateSet)).value == 2**32 - 1
    await launchers[1].send(op="output")
    await harness.event(LogObserved)


async def test_progress_is_reported_before_later_events(harness: Any) -> None:
    _gang, _ = await started(harness)
    with await client(harness, "gpt-1-0", 0) as rank:

        def speak() -> None:
            for step in range(50):
                rank.progress(step)
            rank.checkpoint(49, "/ckpt", durable=True)

        await asyncio.to_thread(speak)
        await harness.event(CheckpointReported)
    steps = [event.step for event in harness.events if isinstance(event, ProgressReported)]
    assert steps == sorted(steps)
    assert steps[-1] == 49
    assert isinstance(harness.events[-1], CheckpointReported)


async def test_a_suspension_is_sent_and_acknowledged(harness: Any) -> None:
    gang, launchers = await started(harness)
    with await client(harness, "gpt-1-0", 0) as rank:
        change = await asyncio.to_thread(rank.watch, 0)
        assert change.suspend_code is SuspendCode.NONE
        watching = asyncio.create_task(asyncio.to_thread(rank.watch, change.revision))
        harness.signal(gang, seconds=60)
        change = await watching
        assert change.suspend_code is SuspendCode.SENT
        assert change.seconds_left is not None
        assert 50 < change.seconds_left <= 60
        assert change.reason == "Preempted by lab/other"
        await asyncio.to_thread(rank.received)
        await harness.event(SuspendReceived)
        await asyncio.to_thread(rank.release, 9)
        await harness.event(Released)
    for launched in launchers:  # all ranks may exit now, without the API server and kubelets
        await launched.receive("terminate")
    kinds = [type(event).__name__ for event in harness.events]
    assert kinds == ["GangStarted", "SuspendReceived", "Released"]


async def test_a_checkpoint_is_acknowledged_and_the_gang_ends_once_it_is_stored(
    harness: Any,
) -> None:
    """If the leader dies before that, the sidecars report it to the next leader."""
    harness.stores = False
    gang, launchers = await started(harness)
    sidecar = harness.sidecars["gpt-1-0"].state
    with await client(harness, "gpt-1-0", 0) as rank:
        # Otherwise the job would never have opened its socket.
        await harness.until(lambda: harness.gateway._gangs[gang.key].members[0].report.ranks_seen)
        harness.signal(gang)
        await asyncio.to_thread(rank.received)
        await asyncio.to_thread(lambda: rank.checkpoint(9, "/ckpt", durable=True))
        await asyncio.to_thread(rank.user_state, 5)
        await asyncio.to_thread(rank.release, 9)
        await harness.event(Released)
        # The other pod's acknowledgements are sent: all its facts are stored.
        await launchers[1].send(op="output")
        other = harness.sidecars["gpt-1-1"].state
        await harness.until(lambda: other.acknowledged == other.report.revision > 1)
        saved, state = await harness.event(CheckpointReported), await harness.event(UserStateSet)
        assert not await sidecar.flush(0.05)
        for fact in (saved, state):
            assert not harness.gateway._gangs[gang.key].order(0, 0.0).terminate
            harness.gateway.stored([fact])
        for launched in launchers:
            await launched.receive("terminate")
    assert await sidecar.flush(60)


async def test_a_job_that_never_opened_its_socket_gets_sigterm(harness: Any) -> None:
    gang, launchers = await started(harness)
    harness.signal(gang)
    for launched in launchers:
        await launched.receive("terminate")
    await harness.event(SuspendReceived)


async def test_sigterm_is_sent_after_half_of_the_grace_period_without_an_acknowledgement(
    harness: Any,
) -> None:
    gang, launchers = await started(harness)
    with await client(harness, "gpt-1-1", 2):
        await harness.until(lambda: harness.sidecars["gpt-1-1"].state.report.ranks_seen)
        state = harness.sidecars["gpt-1-1"].state
        await harness.until(lambda: state.acknowledged >= state.report.revision)
        harness.signal(gang, seconds=2)
        for launched in launchers:
            await launched.receive("terminate")
    assert not [event for event in harness.events if isinstance(event, SuspendReceived)]


async def test_the_launchers_kill_an_ended_attempt(harness: Any) -> None:
    gang, launchers = await started(harness)
    assert harness.gateway.kill(gang.key, gang.attempt + 1, gang.uid) == set()
    await harness.sidecars["gpt-1-1"].end()
    await harness.until(
        lambda: harness.gateway.kill(gang.key, gang.attempt, gang.uid) == {"uid-gpt-1-0"}
    )
    await launchers[0].receive("kill")
    await harness.sidecar("gpt-1-1")  # a sidecar that connects later gets it too
    await harness.until(lambda: harness.sidecars["gpt-1-1"].state.kill)
    # A pod whose launcher has ended terminates by itself, even without its sidecar.
    await launchers[0].send(op="ended", code=-9, failure=None)
    await launchers[0].receive("done")
    await harness.sidecars["gpt-1-0"].end()
    reported = {"uid-gpt-1-0", "uid-gpt-1-1"}
    await harness.until(lambda: harness.gateway.kill(gang.key, gang.attempt, gang.uid) == reported)


async def test_the_gateway_restarts_in_the_middle_of_a_suspension(harness: Any) -> None:
    """The new gateway has only the pods and the signal; the sidecars report again."""
    gang, _ = await started(harness)
    with await client(harness, "gpt-1-0", 0) as rank:
        await asyncio.to_thread(rank.progress, 8, {})
        await asyncio.to_thread(lambda: rank.checkpoint(8, "/ckpt", durable=True))
        harness.signal(gang)
        change = await asyncio.to_thread(rank.watch, 1)
        await asyncio.to_thread(rank.received)
        await harness.event(SuspendReceived)
        port = harness.port
        await harness.shut()
        harness.events.clear()
        assert change.suspend_code is SuspendCode.SENT
        await asyncio.to_thread(rank.release, 8)  # while no gateway listens
        await harness.open(port)
        harness.expect(gang)
        harness.signal(gang)
        await harness.event(Released)
        await harness.event(SuspendReceived)
        assert (await harness.event(CheckpointReported)).step == 8
        assert (await harness.event(ProgressReported)).step == 8
        await harness.event(GangStarted)
        again = await asyncio.to_thread(rank.watch, 0)
        assert again.suspend_code is SuspendCode.MAY_SUSPEND


async def test_a_restarted_sidecar_resumes(harness: Any) -> None:
    gang, launchers = await started(harness)
    with await client(harness, "gpt-1-0", 0) as rank:
        await asyncio.to_thread(lambda: rank.checkpoint(3, "/ckpt", durable=True))
        harness.signal(gang)
        await harness.until(lambda: harness.sidecars["gpt-1-0"].state.suspend)
        await asyncio.to_thread(rank.received)
        await harness.event(SuspendReceived)
    await harness.sidecars["gpt-1-0"].end()
    harness.events.clear()
    await harness.sidecar("gpt-1-0")
    again = await launcher(harness, "gpt-1-0", "running")
    with await client(harness, "gpt-1-0", 0) as rank:
        change = await asyncio.to_thread(rank.watch, 0)
        assert change.suspend_code is SuspendCode.RECEIVED
        await asyncio.to_thread(rank.release, None)
        await harness.event(Released)
    await again.send(op="ended", code=104, failure=None)
    await again.receive("done")
    assert (await harness.event(PodExited)).outcome == Killed(0, "it released its node")
    assert launchers


async def test_garbage_from_inside_the_pod_has_no_effect(harness: Any) -> None:
    _gang, launchers = await started(harness, nodes=1)
    for garbage in (b"\0\xff\n", b"[]\n", b'{"op": "fly"}\n', b"x" * 70000, b'{"op": "ended"}\n'):
        _, writer = await asyncio.open_unix_connection(
            str(harness.folder / "gpt-1-0" / "launcher.sock")
        )
        writer.write(garbage)
        await writer.drain()
        writer.close()
    await launchers[0].send(op="ended", code=0, failure=None)
    await launchers[0].receive("done")
    assert (await harness.event(PodExited)).outcome == Succeeded()


async def test_a_sidecar_reads_its_token_again(harness: Any) -> None:
    """The kubelet replaces the file before the token expires."""
    gang = harness.gang(nodes=1)
    harness.expect(gang)
    harness.identities.expired.add(token_of("gpt-1-0"))
    await harness.sidecar("gpt-1-0")
    await harness.until(lambda: harness.count("bad_token") >= 1)
    fresh = token_of("gpt-1-0", secret="fresh")
    harness.identities.pods[fresh] = gang.pods[0]
    (harness.folder / "gpt-1-0" / "token").write_text(fresh)
    await harness.until(lambda: not harness.gateway.absent(gang.key) or harness.gateway._streams)


async def test_sidecars_verify_the_gateways_certificate(harness: Any) -> None:
    """A certificate of another authority: the token is not sent."""
    from datetime import UTC, datetime

    from flyer.kube.gateway import certificates_of, renewed

    gang = harness.gang(nodes=1)
    harness.expect(gang)
    other = certificates_of(renewed(None, ["localhost"], datetime.now(UTC)))
    await harness.sidecar("gpt-1-0", authority=other.bundle)
    await harness.until(lambda: harness.count("bad_handshake") >= 1)
    assert harness.identities.reviews == 0


async def test_a_new_certificate_serves_without_a_restart(harness: Any) -> None:
    from flyer.kube.gateway import certificates_of, renewed

    await started(harness, nodes=1, name="one")
    data = dict(renewed(None, ["localhost"], _now()))
    harness.gateway.use(certificates_of(data))
    gang = harness.gang("two", nodes=1)
    harness.expect(gang)
    await harness.sidecar("two-1-0", authority=certificates_of(data).bundle)
    client = await launcher(harness, "two-1-0")
    await client.receive("start")


def _now() -> Any:
    from datetime import UTC, datetime

    return datetime.now(UTC)


async def test_a_running_gang_without_all_its_streams_is_reported(harness: Any) -> None:
    gang, _ = await started(harness)
    await harness.sidecars["gpt-1-1"].end()
    assert await harness.event(StreamLost) == StreamLost(gang.key, 1, uid=gang.uid)
    raw = await harness.greeted("gpt-1-1")
    assert await harness.event(StreamRestored) == StreamRestored(gang.key, 1, uid=gang.uid)
    raw.close()


async def test_an_adopted_gang_has_a_lost_stream_until_its_sidecars_connect(harness: Any) -> None:
    gang = harness.gang()
    status = gang.job.status.replace(phase=Phase.RUNNING)
    gang.job = gang.job.replace(status=status)
    harness.expect(gang)
    assert harness.events == [StreamLost(gang.key, 1, uid=gang.uid)]
    harness.gateway.republish_streams(gang.key)
    assert harness.events == [StreamLost(gang.key, 1, uid=gang.uid)] * 2, (
        "an engine that was rebuilt forgot it"
    )
    for pod in gang.pods:
        await harness.sidecar(pod.name)
    assert await harness.event(StreamRestored) == StreamRestored(gang.key, 1, uid=gang.uid)
    before = list(harness.events)
    harness.gateway.republish_streams(gang.key)
    assert harness.events == before
