"""State of one attempt in the gateway: its pods' reports and orders. Pure.

The barrier, the order, the signal and the translation of reports into engine events live here;
sockets and timers do not. `now` is wall-clock time, as deadlines are.
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
# Where a gang is that an earlier leader started.
_ADOPTED = (Phase.RUNNING, Phase.SUSPENDING)


@dataclass(slots=True)
class Member:
    """One pod of the gang."""

    node_rank: int
    identity: PodIdentity
    ip: str
    connected: bool = False
    version: int = VERSION
    """Of the protocol that its sidecar speaks."""
    asked: bool = False
    """Over the stream that is open now, it was told of the suspension."""
    report: Report | None = None

    @property
    def launcher(self) -> LauncherState:
        """How far it is, as far as it said."""
        return self.report.launcher if self.report else LauncherState.ABSENT


class Gang:
    """The state of one attempt. Methods return the events that are to be told, in order."""

    def __init__(
        self,
        job: FlyerJob,
        start: Start,
        pods: Sequence[PodIdentity],
        settings: GatewaySettings,
        now: float,
        key: str | None = None,
    ) -> None:
        """`key`: of the attempt's collectives, the same whichever leader makes the gang."""
        self.job, self.start = job, start
        self._key = key
        self.adopted = job.status is not None and job.status.phase in _ADOPTED
        self.members = [
            Member(node_rank, pod, pod.ip) for node_rank, pod in enumerate(self._in_order(pods))
        ]
        self.exits = Exits(settings)
        self.order_version = 1
        """Grows when some member's order changed."""
        self.expected_at = now
        self.started_at: float | None = None
        self.signalled_at: float | None = None
        self.step: int | None = None
        self.metrics: dict[str, float] = {}
        self._settings = settings
        self._orders: list[StartOrder] | None = None
        self._heard = True  # as told
        self._deadline: float | None = None
        self._reason = ""
        self._terminate_at: float | None = None
        self._received = self._released = self._terminate = self._kill = False
        self._unstored = Unstored()
        self._step_told: int | None = None
        self._step_due: float | None = None

    def _in_order(self, pods: Sequence[PodIdentity]) -> list[PodIdentity]:
        """By rank, which the pods' names tell; who is not there (any more) has no uid."""
        by_name = {pod.name: pod for pod in pods}
        namespace, _, job = self.start.job.partition("/")
        names = [
            pod_name(job, self.start.attempt, node_rank)
            for node_rank in range(len(self.start.assignment.nodes))
        ]
        if unknown := by_name.keys() - set(names):
            raise ValueError(f"{self.start.job}: pod {min(unknown)} is none of its attempt")
        return [by_name.get(name) or PodIdentity(namespace, name, "") for name in names]

    # -- what happens --------------------------------------------------------------------------

    def replace(self, pods: Sequence[PodIdentity]) -> None:
        """The same attempt is expected again: addresses may be news, and so may a pod be."""
        for member, pod in zip(list(self.members), self._in_order(pods), strict=True):
            if pod.uid and member.identity.uid != pod.uid:
                self.members[member.node_rank] = Member(member.node_rank, pod, pod.ip)
            elif pod.ip:
                self.locate(member.node_rank, pod.ip)

    def locate(self, node_rank: int, ip: str) -> None:
        """Where a pod is."""
        self.members[node_rank].ip = ip
        self._pass_barrier()

    def connect(self, node_rank: int, version: int = VERSION) -> None:
        """Its sidecar's stream is open."""
        self.members[node_rank].connected = True
        self.members[node_rank].version = version
        self.members[node_rank].asked = False

    def disconnect(self, node_rank: int) -> None:
        """Its sidecar's stream is over."""
        self.members[node_rank].connected = False
        self.members[node_rank].asked = False

    def streams(self) -> list[Event]:
        """Whether every sidecar whose pod has not ended has a stream, if that has changed.

        Told of a gang that runs: one that starts is waited for by its start deadline.
        """
        if self.started_at is None and not self.adopted:
            return []
        heard = all(
            member.connected or self.exits.known(member.node_rank) for member in self.members
        )
        if heard == self._heard:
            return []
        self._heard = heard
        kind = StreamRestored if heard else StreamLost
        return [kind(self.start.job, self.start.attempt)]

    def all_streams(self) -> list[Event]:
        """As `streams`, for an engine that has forgotten what was reported to it."""
        self._heard = True
        return self.streams()

    def take(self, node_rank: int, report: Report, now: float) -> list[Event]:
        """All that a pod said so far. Raises `ProtocolError` for what cannot be its own to say."""
        member = self.members[node_rank]
        self._check(member, report)
        old, member.report = member.report, report
        if old is not None and report.revision < old.revision:
            old = None  # a sidecar that lost its memory; it says again what it still knows
        self._pass_barrier()
        events = self._progress(report, now)
        events += self._checkpoints(old, report)
        if report.user_state is not None and (old is None or old.user_state != report.user_state):
            events.append(UserStateSet(self.start.job, self.start.attempt, report.user_state))
        self._unstored.add(node_rank, events)
        if report.output > (old.output if old else 0):
            events.append(LogObserved(self.start.job, self.start.attempt))
        events += self._started(now)
        events += self._suspension(member, report)
        events += self._ended(member, report, now)
        return events

    def stored(self, event: Event) -> set[int]:
        """What follows from an event is stored. Node ranks whose reports said it."""
        node_ranks = self._unstored.stored(event)
        self._end_released()
        return node_ranks

    def is_stored(self, node_rank: int) -> bool:
        """Whether all that a pod reported and must outlive this leader is stored."""
        return not self._unstored.has(node_rank)

    def signal(self, signal: Signal, now: float) -> list[Event]:
        """The engine asks the job to suspend, or gives it more time."""
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
        """A pod ended so; the first account of it counts."""
        return self._exit_events(self.exits.add(node_rank, outcome, failure, now))

    def pod_ended(self, node_rank: int, status: Outcome, now: float) -> list[Event]:
        """As `conclude`, with what the pod's status says; it explains a SIGKILL told before."""
        events = self.conclude(node_rank, status, None, now)
        self.exits.explain(node_rank, status)
        return events

    def due(self) -> float | None:
        """When `tick` has something to do."""
        times = (self._step_due, self._terminate_at, self.exits.due())
        return min((at for at in times if at is not None), default=None)

    def tick(self, now: float) -> list[Event]:
        """Time passed."""
        events: list[Event] = []
        if self._step_due is not None and now >= self._step_due:
            events += self._flush()
        if self._terminate_at is not None and now >= self._terminate_at:
            self._terminate_at = None
            if not self._received and not self._terminate:
                self._terminate = True  # half of the grace is over, and nobody answers
                self.order_version += 1
        return events + self._exit_events(self.exits.tick(now))

    def order(self, node_rank: int, now: float) -> Order:
        """All that is wanted of a pod now."""
        member = self.members[node_rank]
        suspend = None
        if self._deadline is not None:
            suspend = Suspend(max(self._deadline - now, 0.0), self._reason)
            member.asked = True
        start = None
        if self._orders is not None and member.launcher not in _RUNNING:
            start = self._orders[node_rank]
        return Order(start=start, suspend=suspend, terminate=self._terminate, kill=self._kill)

    def kill(self) -> set[str]:
        """The attempt is over: its ranks are to be killed. Uids of pods that end by themselves."""
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
        """Names of pods that the start still waits for."""
        return [member.identity.name for member in self.members if not self._is_ready(member)]

    # -- the start -----------------------------------------------------------------------------

    def _is_ready(self, member: Member) -> bool:
        there = member.connected and member.launcher is not LauncherState.ABSENT
        return there and bool(member.ip)

    def _pass_barrier(self) -> None:
        """Once every pod's launcher waits, and every address is known, all may start."""
        leader = self.members[0].report
        if self._orders is not None or not all(self._is_ready(member) for member in self.members):
            return
        if leader is None or leader.port is None:
            return
        addresses = [member.ip for member in self.members]
        output_seconds = self._settings.output_seconds
        # All members or none: a group in which some have another key does not form.
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
        return [GangStarted(self.start.job, self.start.attempt)]

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
        """The newest progress, before anything that follows it."""
        self._step_due = None
        if self.step is None or self.step == self._step_told:
            return []
        self._step_told = self.step
        return [ProgressReported(self.start.job, self.start.attempt, self.step)]

    def _checkpoints(self, old: Report | None, report: Report) -> list[Event]:
        events: list[Event] = []
        for durable, saved, before in (
            (False, report.volatile, old.volatile if old else None),
            (True, report.durable, old.durable if old else None),
        ):
            if saved is not None and saved != before:
                job, attempt = self.start.job, self.start.attempt
                events += self._flush()
                events.append(CheckpointReported(job, attempt, saved.step, saved.path, durable))
        return events

    def _suspension(self, member: Member, report: Report) -> list[Event]:
        events: list[Event] = []
        if report.received and not self._received and self._deadline is not None and member.asked:
            self._received = True
            events.append(SuspendReceived(self.start.job, self.start.attempt))
        if report.released and not self._released:
            self._released = True
            events += [*self._flush(), Released(self.start.job, self.start.attempt)]
            self._end_released()
        return events + self._fall_back()

    def _end_released(self) -> None:
        """End the pods of a gang that released, without waiting for the kubelets' SIGTERM.

        Its checkpoint is stored first: once its sidecars have ended, no later leader hears of it.
        """
        if self._released and not self._unstored and not self._terminate:
            self._terminate = True
            self.order_version += 1

    def is_forged(self, node_rank: int, report: Report) -> bool:
        """Whether it acknowledges what nobody asked of it."""
        return report.received and not self.members[node_rank].asked

    def _fall_back(self) -> list[Event]:
        """SIGTERM for a job none of whose ranks ever opened its socket."""
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
        return [SuspendReceived(self.start.job, self.start.attempt)]

    # -- ends ----------------------------------------------------------------------------------

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
            rank = member.node_rank * self.job.spec.ranks_per_node  # its sidecar does not know
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
        """Whose it is we know ourselves: job, node and node rank are not the pod's to say."""
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
        events += [PodExited(job, attempt, names[rank], outcome) for rank, outcome in ends]
        return events
