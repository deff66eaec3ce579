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
    """What is heard of a node."""

    received_at: float
    """When its sidecar said something last, by the loop's clock; 0 = it is still to come."""
    replaceable: bool
    """Whether its silence may be judged: what runs there gets no further alone."""
    runs: bool = True
    """Whether ranks may be running there: the launcher has come, or nothing is known yet."""


class Gateway:
    """Serves until cancelled. All methods are called in the event loop that serves."""

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
        self._received_at: dict[str, float] = {}  # of members whose stream has ended
        self._addresses: Counter[str] = Counter()  # of members' pods
        self._reviews = TokenReviewer(identities, self._members.__contains__, settings)
        self._timers: dict[Gang, asyncio.TimerHandle] = {}
        self._woken: dict[Gang, int] = {}
        self._changes = (
            KeyedCondition()
        )  # of members: their streams, accounts and being expected, by uid

    @property
    def port(self) -> int:
        """Where it listens, once `listen` has been called."""
        return self._listener.port

    def use(self, certificates: Certificates) -> None:
        """Serve with these from the next connection on; before `serve` at the latest."""
        load_certificates(self._context, certificates)
        self._secret = certificates.secret

    def listen(self) -> None:
        """Take the port, so that a failure is known at once."""
        self._listener.open()

    async def serve(self) -> None:
        """Serve; returns only by being cancelled."""
        if not self._listener.port:
            self.listen()
        await self._listener.run()

    # -- what the operator knows and wants -----------------------------------------------------

    def expect(self, job: FlyerJob, start: Start, pods: Sequence[PodIdentity]) -> None:
        """These pods are this attempt (their names say which rank): let their sidecars in.

        Called when the pods were created, and again by a new leader for every gang that is alive.
        The same attempt again is no news; a later one replaces it. Pods that are gone already are
        missing. GangStarted follows, once; what the gang says becomes events.
        """
        known = self._gangs.get(start.job)
        if known is not None and known.start.attempt > start.attempt:
            return
        if known is not None and known.start.attempt == start.attempt:
            before = {one.identity.uid for one in known.members}
            self._addresses -= Counter(one.ip for one in known.members)
            known.replace(pods)
            self._addresses += Counter(one.ip for one in known.members if one.ip)
            for uid in before - {pod.uid for pod in pods}:
                self._dismiss(uid)
            gang = known
        else:
            if known is not None:
                self.forget(start.job, known.start.attempt)
            gang = Gang(job, start, pods, self._settings, self._clock(), self._key(job, start))
            self._gangs[start.job] = gang
            self._addresses += Counter(one.ip for one in gang.members if one.ip)
        for member in gang.members:
            if member.identity.uid:
                self._members[member.identity.uid] = (gang, member.node_rank)
        self._apply(gang, gang.streams())

    def locate(self, uid: str, ip: str) -> None:
        """The pods cache saw where a pod is. Repeating it is harmless; unknown pods are ignored.

        The start order waits for the address of every pod of the gang.
        """
        member = self._members.get(uid)
        if member is not None and ip and member[0].members[member[1]].ip != ip:
            gang, node_rank = member
            self._addresses -= Counter([gang.members[node_rank].ip])
            self._addresses[ip] += 1
            gang.locate(node_rank, ip)
            self._apply(gang, ())

    def signal(self, signal: Signal) -> None:
        """Ask the job to save and release: in milliseconds where its sidecars are connected."""
        gang = self._gang(signal.job, signal.attempt)
        if gang is not None:
            self._apply(gang, gang.signal(signal, self._clock()))

    def kill(self, job: str, attempt: int) -> set[str]:
        """The attempt is over: have its ranks killed by their own launchers.

        Returns the uids of the pods that hear it, or whose launchers have ended: they end by
        themselves, and their logs stay.
        """
        gang = self._gang(job, attempt)
        if gang is None:
            return set()
        self_ending = gang.kill()
        self._apply(gang, ())
        return self_ending

    async def conclude(self, uid: str, status: Outcome) -> Outcome:
        """A pod has ended (phase Succeeded or Failed, or gone): tell PodExited, exactly once.

        `status` is what the pod's status says (`outcome_of`), which counts only when the sidecar
        said nothing. Returns what counted. Tell NodeEmptied after this has returned; it takes at
        most `account_seconds` + `peer_lost_seconds`.
        """
        member = self._members.get(uid)
        if member is None:
            return status
        gang, node_rank = member

        def forgotten() -> bool:
            return self._members.get(uid) != member

        await self._changes.until(
            uid,
            lambda: uid not in self._streams or gang.exits.known(node_rank) or forgotten(),
            self._settings.account_seconds,
        )
        if forgotten():
            return status
        self._apply(gang, gang.pod_ended(node_rank, status, self._clock()))
        await self._changes.until(uid, lambda: node_rank in gang.exits.reported or forgotten())
        return gang.exits.reported.get(node_rank, status)

    def forget(self, job: str, attempt: int) -> None:
        """The attempt is over: its sidecars are sent away, and no event of it is told any more."""
        gang = self._gang(job, attempt)
        if gang is None:
            return
        del self._gangs[job]
        self._woken.pop(gang, None)
        if (timer := self._timers.pop(gang, None)) is not None:
            timer.cancel()
        self._addresses -= Counter(one.ip for one in gang.members)
        for member in gang.members:
            self._dismiss(member.identity.uid)

    def stored(self, events: Iterable[Event]) -> None:
        """What follows from these events is stored, so that the next leader knows it.

        Only then are checkpoints and life states acknowledged to their sidecars.
        """
        for event in events:
            if not isinstance(event, CheckpointReported | UserStateSet):
                continue
            gang = self._gang(event.job, event.attempt)
            if gang is None:
                continue
            for node_rank in gang.stored(event):
                stream = self._streams.get(gang.members[node_rank].identity.uid)
                if stream is not None:
                    stream.wake()
            self._apply(gang, ())

    # -- what the operator may want to show ----------------------------------------------------

    def absent(self, job: str) -> list[str]:
        """Names of pods that the start of the job's attempt still waits for."""
        gang = self._gangs.get(job)
        return gang.absent() if gang is not None else []

    def republish_streams(self, job: str) -> None:
        """The engine was rebuilt, and no status stores whether a running gang has its streams."""
        gang = self._gangs.get(job)
        if gang is not None:
            self._apply(gang, gang.all_streams())

    def failure(self, job: str) -> Failure | None:
        """The failure that the others of the job's attempt follow from, with its traceback."""
        gang = self._gangs.get(job)
        return gang.exits.root_cause if gang is not None else None

    def heartbeats(self) -> dict[str, Heartbeat]:
        """What is heard of each node where something runs, since we listen.

        Replaceable are nodes of gangs that run on several: what is left of such a gang ends before
        another attempt begins, and the one that is only silent gets no further alone. The last one
        that runs, or a job of one node, would go on. Of a gang that ran before we led a sidecar is
        missed also if it never came to us; one that starts may take its time.
        """
        found: dict[str, Heartbeat] = {}
        running = [
            member for member in self._members.items() if not member[1][0].exits.known(member[1][1])
        ]
        nodes = Counter(gang for _, (gang, _) in running)
        for uid, (gang, node_rank) in running:
            stream = self._streams.get(uid)
            received_at = stream.heard_at if stream else self._received_at.get(uid, 0.0)
            launched = gang.members[node_rank].launcher is not LauncherState.ABSENT
            heard = Heartbeat(
                received_at,
                replaceable=nodes[gang] > 1 and (received_at > 0 or gang.adopted),
                runs=launched or not received_at,
            )
            name = gang.start.assignment.names[node_rank]
            found[name] = max(heard, found.get(name, heard))
        return found

    def progress(self, job: str) -> tuple[int, dict[str, float]] | None:
        """The newest step of the job's attempt, and the numbers that came with it."""
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
                f"version {hello.version} is not spoken here any more, only {OLDEST_VERSION} to "
                f"{VERSION}: start the pod again with a newer sidecar"
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
        """One stream a pod: a new one replaces the old, which may be half-open and never end."""
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
        """Key of the attempt's collectives: derived, so that the next leader has the same."""
        if not self._secret:
            return None
        words = f"collectives/{job.metadata.uid}/{start.attempt}"
        return hmac.new(self._secret.encode(), words.encode(), hashlib.sha256).hexdigest()

    def _is_expected(self, address: str) -> bool:
        """Whether a pod of a gang has this address."""
        if address.startswith("::ffff:"):
            address = address.removeprefix("::ffff:")
        return address in self._addresses

    # -- afterwards ----------------------------------------------------------------------------

    def _gang(self, job: str, attempt: int) -> Gang | None:
        gang = self._gangs.get(job)
        return gang if gang is not None and gang.start.attempt == attempt else None

    def _dismiss(self, uid: str) -> None:
        self._members.pop(uid, None)
        self._received_at.pop(uid, None)
        stream = self._streams.get(uid)
        if stream is not None:
            stream.end(RefusedError("forgotten", "this attempt is over"))
        self._changes.notify(uid)

    def _apply(self, gang: Gang, events: Iterable[Event]) -> None:
        """Tell what there is to tell, wake the streams if there are new orders, set the timer."""
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
        due = gang.due()
        if due is not None and self._gangs.get(gang.start.job) is gang:
            pause = max(due - self._clock(), 0.0)
            self._timers[gang] = asyncio.get_running_loop().call_later(pause, self._tick, gang)

    def _tick(self, gang: Gang) -> None:
        self._apply(gang, gang.tick(self._clock()))
