"""State of one attempt in the gateway: its pods' reports and orders. Pure.

Contains the start barrier, orders, signals and the translation of reports into engine events, but
no sockets and timers. `now` is wall-clock time, as deadlines are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from flyer.api import Phase
from flyer.engine import (
    CheckpointReported,
    Event,
    Failed,
    GangStarted,
    LogObserved,
    Outcome,
    PodExited,
    ProgressReported,
    Released,
    StreamLost,
    StreamRestored,
    SuspendReceived,
    UserStateSet,
)
from flyer.job.failure import Failure
from flyer.job.fields import ProtocolError
from flyer.job.protocol import exposed_percent
from flyer.kube.gateway.exits import Exits
from flyer.kube.gateway.identities import PodIdentity
from flyer.kube.gateway.orders import start_orders
from flyer.kube.gateway.outcome import outcome_of_code
from flyer.kube.gateway.unstored import Unstored
from flyer.kube.pods.names import pod_name
from flyer.sidecar.wire import KEY_VERSION, VERSION, LauncherState, Order, Report, Suspend

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flyer.api import FlyerJob
    from flyer.engine import Signal, Start
    from flyer.kube.gateway.settings import GatewaySettings
    from flyer.sidecar.wire import End, StartOrder

__all__ = ["Gang", "Member"]

REASON_CHARACTERS_MAX: Final = 1000
_RUNNING = (LauncherState.RUNNING, LauncherState.ENDED)
# Phases of gangs that an earlier leader started.
_ADOPTED = (Phase.RUNNING, Phase.SUSPENDING)


@dataclass(slots=True)
class Member:
    """One pod of the gang."""

    node_rank: int
    identity: PodIdentity
    ip: str
    connected: bool = False
    version: int = VERSION
    """Protocol version of its sidecar."""
    suspend_sent: bool = False
    """Whether the suspension was sent over the current stream."""
    report: Report | None = None

    @property
    def launcher(self) -> LauncherState:
        """The latest reported progress."""
        return self.report.launcher if self.report else LauncherState.ABSENT


class Gang:
    """The state of one attempt. Methods return the events to report, in order."""

    def __init__(
        self,
        job: FlyerJob,
        start: Start,
        pods: Sequence[PodIdentity],
        settings: GatewaySettings,
        now: float,
        key: str | None = None,
    ) -> None:
        """`key`: key of the attempt's collectives, the same for every leader."""
        self.job, self.start = job, start
        self.uid = job.metadata.uid or ""
        self._key = key
        self.adopted = job.status is not None and job.status.phase in _ADOPTED
        self.members = [
            Member(node_rank, pod, pod.ip) for node_rank, pod in enumerate(self._in_order(pods))
        ]
        self.exits = Exits(settings)
        self.order_version = 1
        """Increases when the order of a member changes."""
        self.expected_at = now
        self.started_at: float | None = None
        self.signalled_at: float | None = None
        self.step: int | None = None
        self.metrics: dict[str, float] = {}
        self._settings = settings
        self._orders: list[StartOrder] | None = None
        self._heard = True  # as reported
        self._deadline: float | None = None
        self._reason = ""
        self._terminate_at: float | None = None
        self._received = self._released = self._terminate = self._kill = False
        self._unstored = Unstored()
        self._step_reported: int | None = None
        self._step_due: float | None = None

    def _in_order(self, pods: Sequence[PodIdentity]) -> list[PodIdentity]:
        """Members by rank, which is in the pods' names; a missing pod has no uid."""
        by_name = {pod.name: pod for pod in pods}
        namespace, _, job = self.start.job.partition("/")
        names = [
            pod_name(job, self.start.attempt, node_rank)
            for node_rank in range(len(self.start.assignment.nodes))
        ]
        if unknown := by_name.keys() - set(names):
            raise ValueError(f"{self.start.job}: pod {min(unknown)} is not a pod of this attempt")
        return [by_name.get(name) or PodIdentity(namespace, name, "") for name in names]

    # -- changes -------------------------------------------------------------------------------

    def replace(self, pods: Sequence[PodIdentity]) -> None:
        """The same attempt is expected again, possibly with new addresses or pods."""
        for member, pod in zip(list(self.members), self._in_order(pods), strict=True):
            if pod.uid and member.identity.uid != pod.uid:
                self.members[member.node_rank] = Member(member.node_rank, pod, pod.ip)
            elif pod.ip:
                self.locate(member.node_rank, pod.ip)

    def locate(self, node_rank: int, ip: str) -> None:
        """Record a pod's address."""
        self.members[node_rank].ip = ip
        self._pass_barrier()

    def connect(self, node_rank: int, version: int = VERSION) -> None:
        """Record that the sidecar's stream is open."""
        self.members[node_rank].connected = True
        self.members[node_rank].version = version
        self.members[node_rank].suspend_sent = False

    def disconnect(self, node_rank: int) -> None:
        """Record that the sidecar's stream has ended."""
        self.members[node_rank].connected = False
        self.members[node_rank].suspend_sent = False

    def streams(self) -> list[Event]:
        """Report a change of whether every sidecar of a live pod has a stream.

        Only for a running gang: the start deadline bounds the wait for a starting one.
        """
        if self.started_at is None and not self.adopted:
            return []
        streams_connected = all(
            member.connected or self.exits.has_ended(member.node_rank) for member in self.members
        )
        if streams_connected == self._heard:
            return []
        self._heard = streams_connected
        kind = StreamRestored if streams_connected else StreamLost
        return [kind(self.start.job, self.start.attempt, uid=self.uid)]

    def all_streams(self) -> list[Event]:
        """As `streams`, for an engine whose state was rebuilt."""
        self._heard = True
        return self.streams()

    def take(self, node_rank: int, report: Report, now: float) -> list[Event]:
        """Take a pod's report. Raises `ProtocolError` for a report about another pod's ranks."""
        member = self.members[node_rank]
        self._check(member, report)
        old, member.report = member.report, report
        if old is not None and report.revision < old.revision:
            old = None  # the sidecar was restarted and reports its state again
        self._pass_barrier()
        events = self._progress(report, now)
        events += self._checkpoints(old, report)
        if report.user_state is not None and (old is None or old.user_state != report.user_state):
            state = report.user_state
            events.append(UserStateSet(self.start.job, self.start.attempt, state, uid=self.uid))
        self._unstored.add(node_rank, events)
        if report.output > (old.output if old else 0):
            events.append(LogObserved(self.start.job, self.start.attempt, uid=self.uid))
        events += self._started(now)
        events += self._suspension(member, report)
        events += self._ended(member, report, now)
        return events

    def stored(self, event: Event) -> set[int]:
        """The effects of an event are stored. Returns the node ranks that reported it."""
        node_ranks = self._unstored.stored(event)
        self._end_released()
        return node_ranks

    def is_stored(self, node_rank: int) -> bool:
        """Whether every durable fact that a pod reported is stored."""
        return not self._unstored.has(node_rank)

    def signal(self, signal: Signal, now: float) -> list[Event]:
        """Ask the job to suspend, or extend its deadline."""
        first = self._deadline is None
        self._deadline = signal.deadline
        self._reason = f"{signal.reason} by {signal.by}"[:REASON_CHARACTERS_MAX]
        self.order_version += 1
        if first:
            self.signalled_at = now
            self._terminate_at = now + max(signal.deadline - now, 0.0) / 2
        return self._fall_back()

    def conclude(
        self, node_rank: int, outcome: Outcome, failure: Failure | None, now: float
    ) -> list[Event]:
        """Record a pod's exit; only the first report counts."""
        return self._exit_events(self.exits.add(node_rank, outcome, failure, now))

    def pod_ended(self, node_rank: int, status: Outcome, now: float) -> list[Event]:
        """As `conclude`, from the pod's status, which explains a SIGKILL reported earlier."""
        events = self.conclude(node_rank, status, None, now)
        self.exits.explain(node_rank, status)
        return events

    def due(self) -> float | None:
        """When `tick` is due."""
        times = (self._step_due, self._terminate_at, self.exits.due())
        return min((at for at in times if at is not None), default=None)

    def tick(self, now: float) -> list[Event]:
        """Process the deadlines that have passed."""
        events: list[Event] = []
        if self._step_due is not None and now >= self._step_due:
            events += self._flush()
        if self._terminate_at is not None and now >= self._terminate_at:
            self._terminate_at = None
            if not self._received and not self._terminate:
                self._terminate = True  # half of the grace period without an acknowledgement
                self.order_version += 1
        return events + self._exit_events(self.exits.tick(now))

    def order(self, node_rank: int, now: float) -> Order:
        """The current order of a pod."""
        member = self.members[node_rank]
        suspend = None
        if self._deadline is not None:
            suspend = Suspend(max(self._deadline - now, 0.0), self._reason)
            member.suspend_sent = True
        start = None
        if self._orders is not None and member.launcher not in _RUNNING:
            start = self._orders[node_rank]
        return Order(start=start, suspend=suspend, terminate=self._terminate, kill=self._kill)

    def kill(self) -> set[str]:
        """Kill the ranks of an ended attempt. Returns uids of pods that end by themselves."""
        if not self._kill:
            self._kill = True
            self.order_version += 1
        ended, absent = LauncherState.ENDED, LauncherState.ABSENT
        return {
            m.identity.uid
            for m in self.members
            if m.launcher is ended or (m.connected and m.launcher is not absent)
        }

    def absent(self) -> list[str]:
        """Names of the pods that the start is waiting for."""
        return [member.identity.name for member in self.members if not self._is_ready(member)]

    # -- the start -----------------------------------------------------------------------------

    def _is_ready(self, member: Member) -> bool:
        present = member.connected and member.launcher is not LauncherState.ABSENT
        return present and bool(member.ip)

    def _pass_barrier(self) -> None:
        """Start all ranks once every launcher waits and every address is known."""
        leader = self.members[0].report
        if self._orders is not None or not all(self._is_ready(member) for member in self.members):
            return
        if leader is None or leader.port is None:
            return
        addresses = [member.ip for member in self.members]
        output_seconds = self._settings.output_seconds
        # All members have the same key, or none has one; otherwise the group cannot form.
        take_it = all(member.version >= KEY_VERSION for member in self.members)
        self._orders = start_orders(
            self.job, self.start, addresses, leader.port, output_seconds,
            self._key if take_it else None,
        )  # fmt: skip
        self.order_version += 1

    def _started(self, now: float) -> list[Event]:
        running = all(member.launcher in _RUNNING for member in self.members)
        if self.started_at is not None or not running:
            return []
        self.started_at = now
        return [GangStarted(self.start.job, self.start.attempt, uid=self.uid)]

    # -- reports into events -------------------------------------------------------------------

    def _check(self, member: Member, report: Report) -> None:
        first = member.node_rank * self.job.spec.ranks_per_node
        own = range(first, first + self.job.spec.ranks_per_node)
        claims = {
            "given_up.rank": report.given_up.rank if report.given_up else None,
            "end.rank": report.end.rank if report.end else None,
        }
        for name, rank in claims.items():
            if rank is not None and rank not in own:
                raise ProtocolError(
                    "bad_rank",
                    f"report: `{name}` is {rank}, not a rank of this pod ({first} to {own[-1]})",
                )

    def _progress(self, report: Report, now: float) -> list[Event]:
        if report.step is None or (self.step is not None and report.step <= self.step):
            return []
        self.step = report.step
        self.metrics = report.metrics or self.metrics
        if self._step_due is None:
            self._step_due = now + self._settings.progress_seconds
        return []

    def _flush(self) -> list[Event]:
        """The latest progress, reported before later events."""
        self._step_due = None
        if self.step is None or self.step == self._step_reported:
            return []
        self._step_reported = self.step
        job, attempt, exposed = self.start.job, self.start.attempt, exposed_percent(self.metrics)
        return [ProgressReported(job, attempt, self.step, exposed, uid=self.uid)]

    def _checkpoints(self, old: Report | None, report: Report) -> list[Event]:
        events: list[Event] = []
        for durable, saved, before in (
            (False, report.volatile, old.volatile if old else None),
            (True, report.durable, old.durable if old else None),
        ):
            if saved is not None and saved != before:
                job, attempt = self.start.job, self.start.attempt
                events += self._flush()
                events.append(
                    CheckpointReported(job, attempt, saved.step, saved.path, durable, uid=self.uid)
                )
        return events

    def _suspension(self, member: Member, report: Report) -> list[Event]:
        events: list[Event] = []
        suspending = self._deadline is not None and member.suspend_sent
        if report.received and not self._received and suspending:
            self._received = True
            events.append(SuspendReceived(self.start.job, self.start.attempt, uid=self.uid))
        if report.released and not self._released:
            self._released = True
            released = Released(self.start.job, self.start.attempt, uid=self.uid)
            events += [*self._flush(), released]
            self._end_released()
        return events + self._fall_back()

    def _end_released(self) -> None:
        """End the pods of a gang that released, without waiting for the kubelets' SIGTERM.

        Its checkpoint is stored first: once its sidecars have ended, no later leader learns of it.
        """
        if self._released and not self._unstored and not self._terminate:
            self._terminate = True
            self.order_version += 1

    def is_forged(self, node_rank: int, report: Report) -> bool:
        """Whether the report acknowledges a suspension that was not requested."""
        return report.received and not self.members[node_rank].suspend_sent

    def _fall_back(self) -> list[Event]:
        """Send SIGTERM to a job of which no rank has opened the job socket."""
        if self._deadline is None or self._terminate:
            return []
        reports = [member.report for member in self.members if member.connected and member.report]
        if len(reports) < len(self.members) or any(report.ranks_seen for report in reports):
            return []
        self._terminate = True
        self.order_version += 1
        if self._received:
            return []
        self._received = True
        return [SuspendReceived(self.start.job, self.start.attempt, uid=self.uid)]

    # -- exits ---------------------------------------------------------------------------------

    def _ended(self, member: Member, report: Report, now: float) -> list[Event]:
        events: list[Event] = []
        if report.given_up is not None:
            given_up = report.given_up
            failure = self._failure(member, given_up.rank, now, status=1, text=given_up.reason)
            outcome = Failed(1, given_up.reason[:REASON_CHARACTERS_MAX], given_up.rank)
            events += self.conclude(member.node_rank, outcome, failure, now)
        if report.end is not None:
            blamed = self._blamed(member, report.end)
            outcome_of_end = outcome_of_code(report.end.code, blamed)
            events += self.conclude(member.node_rank, outcome_of_end, blamed, now)
        return events

    def _blamed(self, member: Member, end: End) -> Failure | None:
        rank = end.rank
        if rank is None:
            if end.traceback is None and end.error_type is None and end.rank_signal is None:
                return None
            rank = member.node_rank * self.job.spec.ranks_per_node  # unknown to its sidecar
        failure = self._failure(member, rank, end.time, status=end.rank_status)
        return replace(
            failure,
            signal=end.rank_signal,
            error_type=end.error_type,
            peer_lost=end.peer_lost,
            traceback=end.traceback,
        )

    def _failure(
        self, member: Member, rank: int, time: float, *, status: int | None, text: str | None = None
    ) -> Failure:
        """The exit with the gateway's job, node and node rank, not the reported ones."""
        return Failure(
            job=self.start.job,
            attempt=self.start.attempt,
            node=self.start.assignment.names[member.node_rank],
            node_rank=member.node_rank,
            rank=rank,
            local_rank=rank % self.job.spec.ranks_per_node,
            time=time,
            exit_status=status,
            traceback=text,
        )

    def _exit_events(self, ends: list[tuple[int, Outcome]]) -> list[Event]:
        job, attempt = self.start.job, self.start.attempt
        names = self.start.assignment.names
        events = self._flush() if ends else []
        events += [
            PodExited(job, attempt, names[rank], outcome, uid=self.uid) for rank, outcome in ends
        ]
        return events
