"""Gateway: connects the sidecars of running gangs with the engine.

It owns the start barrier, start orders, signals and reports. A sidecar is identified only by the
review of its token; its claims about its job, attempt or rank are ignored. `Gang` decides; this
module connects it with streams and timers.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import time
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from prometheus_client import CollectorRegistry

from flyer.engine import CheckpointReported, PodExited, UserStateSet
from flyer.kube.gateway.gang import Gang
from flyer.kube.gateway.listener import Listener
from flyer.kube.gateway.metrics import GatewayMetrics
from flyer.kube.gateway.reviews import TokenReviewer
from flyer.kube.gateway.stream import RefusedError, Stream
from flyer.kube.gateway.tls import load_certificates, server_context
from flyer.kube.keyed_condition import KeyedCondition
from flyer.sidecar.wire import OLDEST_VERSION, VERSION, LauncherState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from flyer.api import FlyerJob
    from flyer.engine import Event, Outcome, Signal, Start
    from flyer.job.failure import Failure
    from flyer.kube.gateway.certificates import Certificates
    from flyer.kube.gateway.identities import Identities, PodIdentity
    from flyer.kube.gateway.listener import Connection
    from flyer.kube.gateway.settings import GatewaySettings
    from flyer.sidecar.wire import Report

__all__ = ["Gateway", "Heartbeat"]

log = logging.getLogger(__name__)


class Heartbeat(NamedTuple):
    """The latest sign of life of a node."""

    received_at: float
    """Time of its sidecar's latest message, by the loop's clock; 0: none yet."""
    replaceable: bool
    """Whether its silence may be acted on: the rest of its gang cannot continue without it."""
    runs: bool = True
    """Whether ranks may be running: the launcher has connected, or nothing is known yet."""


class Gateway:
    """Serves until cancelled. All methods are called in the serving event loop."""

    def __init__(
        self,
        *,
        enqueue: Callable[[Event], None],
        identities: Identities,
        settings: GatewaySettings,
        metrics: GatewayMetrics | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._enqueue = enqueue
        self._settings = settings
        self._metrics = metrics or GatewayMetrics(CollectorRegistry())
        self._clock = clock
        self._context = server_context()
        self._secret = ""
        self._listener = Listener(
            settings, self._context, self._metrics, self._serve_stream, self._is_expected
        )
        self._gangs: dict[str, Gang] = {}
        self._members: dict[str, tuple[Gang, int]] = {}
        self._streams: dict[str, Stream] = {}
        self._received_at: dict[str, float] = {}  # members whose stream has ended
        self._addresses: Counter[str] = Counter()  # of members' pods
        self._reviews = TokenReviewer(identities, self._members.__contains__, settings)
        self._timers: dict[Gang, asyncio.TimerHandle] = {}
        self._woken: dict[Gang, int] = {}
        self._changes = KeyedCondition()  # of members, by uid: streams, exits and expectation

    @property
    def port(self) -> int:
        """The bound port, after `listen`."""
        return self._listener.port

    def use(self, certificates: Certificates) -> None:
        """Use these certificates from the next connection on. Required before `serve`."""
        load_certificates(self._context, certificates)
        self._secret = certificates.secret

    def listen(self) -> None:
        """Bind the port, so that a failure is reported immediately."""
        self._listener.open()

    async def serve(self) -> None:
        """Serve until cancelled."""
        if not self._listener.port:
            self.listen()
        await self._listener.run()

    # -- calls of the operator -----------------------------------------------------------------

    def expect(self, job: FlyerJob, start: Start, pods: Sequence[PodIdentity]) -> None:
        """Accept the sidecars of an attempt's pods, whose names contain their ranks.

        Called when the pods were created, and again by a new leader for every live gang. A repeated
        call changes nothing; a later attempt replaces an earlier one, and so does any attempt of a
        new object with the job's name. Pods that are already gone are missing. GangStarted is
        reported once; the gang's reports become events.
        """
        current, uid = self._gangs.get(start.job), job.metadata.uid or ""
        same_object = current is not None and current.uid == uid
        if current is not None and same_object and current.start.attempt > start.attempt:
            return
        if current is not None and same_object and current.start.attempt == start.attempt:
            before = {item.identity.uid for item in current.members}
            self._addresses -= Counter(item.ip for item in current.members)
            current.replace(pods)
            self._addresses += Counter(item.ip for item in current.members if item.ip)
            for uid in before - {pod.uid for pod in pods}:
                self._dismiss(uid)
            gang = current
        else:
            if current is not None:
                self._forget(current)
            gang = Gang(job, start, pods, self._settings, self._clock(), self._key(job, start))
            self._gangs[start.job] = gang
            self._addresses += Counter(item.ip for item in gang.members if item.ip)
        for member in gang.members:
            if member.identity.uid:
                self._members[member.identity.uid] = (gang, member.node_rank)
        self._apply(gang, gang.streams())

    def locate(self, uid: str, ip: str) -> None:
        """Record a pod's address from the cache. Idempotent; unknown pods are ignored.

        The start order requires the address of every pod of the gang.
        """
        member = self._members.get(uid)
        if member is not None and ip and member[0].members[member[1]].ip != ip:
            gang, node_rank = member
            self._addresses -= Counter([gang.members[node_rank].ip])
            self._addresses[ip] += 1
            gang.locate(node_rank, ip)
            self._apply(gang, ())

    def signal(self, signal: Signal) -> None:
        """Ask the job to checkpoint and release; connected sidecars receive it in milliseconds."""
        gang = self._gang(signal.job, signal.attempt, signal.uid)
        if gang is not None:
            self._apply(gang, gang.signal(signal, self._clock()))

    def kill(self, job: str, attempt: int, uid: str) -> set[str]:
        """Kill the ranks of an attempt that is over, through their launchers.

        Returns the uids of the pods that receive it, or whose launchers have ended: they end by
        themselves and keep their logs. `uid`: of the job.
        """
        gang = self._gang(job, attempt, uid)
        if gang is None:
            return set()
        self_ending = gang.kill()
        self._apply(gang, ())
        return self_ending

    async def conclude(self, uid: str, status: Outcome) -> Outcome:
        """Report PodExited, exactly once, for a pod that has ended (Succeeded, Failed or deleted).

        `status` is the outcome from the pod's status (`outcome_of`), which is used only without a
        report of the sidecar. Returns the reported outcome. Takes at most `account_seconds` +
        `peer_lost_seconds`; report NodeEmptied only afterwards.
        """
        member = self._members.get(uid)
        if member is None:
            return status
        gang, node_rank = member

        def forgotten() -> bool:
            return self._members.get(uid) != member

        await self._changes.until(
            uid,
            lambda: uid not in self._streams or gang.exits.has_ended(node_rank) or forgotten(),
            self._settings.account_seconds,
        )
        if forgotten():
            return status
        self._apply(gang, gang.pod_ended(node_rank, status, self._clock()))
        await self._changes.until(uid, lambda: node_rank in gang.exits.reported or forgotten())
        return gang.exits.reported.get(node_rank, status)

    def forget(self, job: str, attempt: int, uid: str) -> None:
        """The attempts up to this one are over: disconnect their sidecars, and report no more.

        The gang may be an earlier one, if no pods of this attempt were created. `uid`: of the job.
        """
        gang = self._gangs.get(job)
        if gang is not None and gang.uid == uid and gang.start.attempt <= attempt:
            self._forget(gang)

    def _forget(self, gang: Gang) -> None:
        del self._gangs[gang.start.job]
        self._woken.pop(gang, None)
        if (timer := self._timers.pop(gang, None)) is not None:
            timer.cancel()
        self._addresses -= Counter(item.ip for item in gang.members)
        for member in gang.members:
            self._dismiss(member.identity.uid)

    def stored(self, events: Iterable[Event]) -> None:
        """The effects of these events are stored, and available to the next leader.

        Checkpoints and user states are acknowledged to their sidecars only now.
        """
        for event in events:
            if not isinstance(event, CheckpointReported | UserStateSet):
                continue
            gang = self._gang(event.job, event.attempt, event.uid)
            if gang is None:
                continue
            for node_rank in gang.stored(event):
                stream = self._streams.get(gang.members[node_rank].identity.uid)
                if stream is not None:
                    stream.wake()
            self._apply(gang, ())

    # -- queries -------------------------------------------------------------------------------

    def absent(self, job: str) -> list[str]:
        """Names of the pods that the start of the job's attempt is waiting for."""
        gang = self._gangs.get(job)
        return gang.absent() if gang is not None else []

    def republish_streams(self, job: str) -> None:
        """Report again whether running gangs have their streams: the engine was rebuilt."""
        gang = self._gangs.get(job)
        if gang is not None:
            self._apply(gang, gang.all_streams())

    def failure(self, job: str) -> Failure | None:
        """The root cause of the failures of the job's attempt, with its traceback."""
        gang = self._gangs.get(job)
        return gang.exits.root_cause if gang is not None else None

    def heartbeats(self) -> dict[str, Heartbeat]:
        """The latest sign of life of each node with pods, since this gateway listens.

        Replaceable are nodes of gangs on several nodes: the rest of such a gang ends before another
        attempt starts, and a node that is only silent cannot continue alone. The last running pod
        of a gang, or a job of one node, could continue. In a gang that an earlier leader started, a
        sidecar that never connected counts as silent; in a starting gang it does not.
        """
        latest: dict[str, Heartbeat] = {}
        running = [
            member
            for member in self._members.items()
            if not member[1][0].exits.has_ended(member[1][1])
        ]
        nodes = Counter(gang for _, (gang, _) in running)
        for uid, (gang, node_rank) in running:
            stream = self._streams.get(uid)
            received_at = stream.heard_at if stream else self._received_at.get(uid, 0.0)
            launched = gang.members[node_rank].launcher is not LauncherState.ABSENT
            heartbeat = Heartbeat(
                received_at,
                replaceable=nodes[gang] > 1 and (received_at > 0 or gang.adopted),
                runs=launched or not received_at,
            )
            name = gang.start.assignment.names[node_rank]
            latest[name] = max(heartbeat, latest.get(name, heartbeat))
        return latest

    def progress(self, job: str) -> tuple[int, dict[str, float]] | None:
        """The latest step of the job's attempt, with the numbers reported with it."""
        gang = self._gangs.get(job)
        if gang is None or gang.step is None:
            return None
        return gang.step, dict(gang.metrics)

    # -- streams -------------------------------------------------------------------------------

    async def _serve_stream(self, connection: Connection) -> None:
        stream = connection.stream
        hello = await stream.hello()
        if hello.version < OLDEST_VERSION:
            message = (
                f"unsupported protocol version {hello.version} (supported: {OLDEST_VERSION} to "
                f"{VERSION}): recreate the pod with a newer sidecar"
            )
            raise RefusedError("bad_version", message)
        version = min(hello.version, VERSION)
        identity = await self._reviews.review(hello.token, connection)
        member = self._members.get(identity.uid)
        if member is None:
            message = f"pod {identity.namespace}/{identity.name} is in no gang that runs"
            raise RefusedError("unknown_pod", message)
        connection.authenticated()
        await self._serve_member(stream, version, identity.uid, *member)

    async def _serve_member(
        self, stream: Stream, version: int, uid: str, gang: Gang, node_rank: int
    ) -> None:
        """One stream per pod: a new one replaces the old one, which may be half-open."""
        old = self._streams.get(uid)
        if old is not None:
            old.end(RefusedError("replaced", "another stream of this pod took its place"))
        self._streams[uid] = stream
        self._metrics.connections.set(len(self._streams))
        gang.connect(node_rank, version)
        self._apply(gang, gang.streams())
        start = gang.start
        log.info("%s: attempt %d: node rank %d is connected", start.job, start.attempt, node_rank)

        def take(report: Report) -> None:
            if self._streams.get(uid) is not stream:
                raise RefusedError("replaced", "another stream of this pod took its place")
            if self._members.get(uid) != (gang, node_rank):
                raise RefusedError("forgotten", "this attempt is over")
            self._take(gang, node_rank, report)

        try:
            await stream.serve(
                take,
                lambda: gang.order(node_rank, self._clock()),
                lambda: gang.order_version,
                lambda: gang.is_stored(node_rank),
                version,
            )
        finally:
            if self._streams.get(uid) is stream:
                del self._streams[uid]
                self._changes.notify(uid)
                if uid in self._members:
                    self._received_at[uid] = stream.heard_at
                gang.disconnect(node_rank)
                if self._members.get(uid) == (gang, node_rank):
                    self._apply(gang, gang.streams())
                self._metrics.connections.set(len(self._streams))

    def _take(self, gang: Gang, node_rank: int, report: Report) -> None:
        now = self._clock()
        if gang.is_forged(node_rank, report):
            self._metrics.refusals.labels("unasked").inc()
        if node_rank == 0 and report.suspended and gang.signalled_at is not None:
            self._metrics.signal_seconds.observe(max(now - gang.signalled_at, 0.0))
            gang.signalled_at = None
        was_started = gang.started_at
        events = gang.take(node_rank, report, now)
        if was_started is None and gang.started_at is not None:
            self._metrics.start_seconds.observe(gang.started_at - gang.expected_at)
        self._apply(gang, events)
        self._changes.notify(gang.members[node_rank].identity.uid)

    def _key(self, job: FlyerJob, start: Start) -> str | None:
        """Key of the attempt's collectives, derived so that the next leader has the same."""
        if not self._secret:
            return None
        words = f"collectives/{job.metadata.uid}/{start.attempt}"
        return hmac.new(self._secret.encode(), words.encode(), hashlib.sha256).hexdigest()

    def _is_expected(self, address: str) -> bool:
        """Whether a pod of a gang has this address."""
        if address.startswith("::ffff:"):
            address = address.removeprefix("::ffff:")
        return address in self._addresses

    # -- events --------------------------------------------------------------------------------

    def _gang(self, job: str, attempt: int, uid: str) -> Gang | None:
        gang = self._gangs.get(job)
        is_it = gang is not None and (gang.start.attempt, gang.uid) == (attempt, uid)
        return gang if is_it else None

    def _dismiss(self, uid: str) -> None:
        self._members.pop(uid, None)
        self._received_at.pop(uid, None)
        stream = self._streams.get(uid)
        if stream is not None:
            stream.end(RefusedError("forgotten", "this attempt is over"))
        self._changes.notify(uid)

    def _apply(self, gang: Gang, events: Iterable[Event]) -> None:
        """Report events, wake the streams if there are new orders, and set the timer."""
        ended = []
        for event in events:
            self._enqueue(event)
            if isinstance(event, PodExited):
                ended.append(event.node)
        if ended:
            uids = (member.identity.uid for member in gang.members)
            uid_on = dict(zip(gang.start.assignment.names, uids, strict=True))
            for node in ended:
                self._changes.notify(uid_on[node])
        if self._woken.get(gang) != gang.order_version:
            self._woken[gang] = gang.order_version
            for member in gang.members:
                stream = self._streams.get(member.identity.uid)
                if stream is not None:
                    stream.wake()
        timer = self._timers.pop(gang, None)
        if timer is not None:
            timer.cancel()
        due_at = gang.due()
        if due_at is not None and self._gangs.get(gang.start.job) is gang:
            pause = max(due_at - self._clock(), 0.0)
            self._timers[gang] = asyncio.get_running_loop().call_later(pause, self._tick, gang)

    def _tick(self, gang: Gang) -> None:
        self._apply(gang, gang.tick(self._clock()))
