"""Leader election: a Lease, an epoch per term, and a fence that expires before the Lease.

A term starts with a compare-and-swap on the Lease that increments `leaseTransitions`, even when a
process reacquires its own old Lease: so each term has a unique epoch (`leaseTransitions` + 1),
which every commit carries. Clocks of different nodes are never compared: candidates wait until the
Lease has not changed for its duration by their own clock, and the leader stops `renew_seconds`
after the *start* of its last successful renewal, which is earlier.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from flyer.kube.apiserver.errors import AlreadyExistsError, ApiError, ConflictError, NotFoundError
from flyer.kube.apiserver.resources import LEASES
from flyer.kube.lease import LEASE_SECONDS, RENEW_SHARE, RETRY_SHARE

if TYPE_CHECKING:
    from flyer.kube.apiserver.api import Api

__all__ = ["Election", "LeadershipLostError", "LeaseSettings"]

log = logging.getLogger(__name__)

_RELEASE_SECONDS: Final = 2.0
# Polls of another candidate's Lease per renewal interval: the time between two polls adds to the
# failover time.
POLLS_PER_RENEWAL: Final = 2


class LeadershipLostError(Exception):
    """Writes are not permitted: the Lease was not renewed in time, or another process has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseSettings:
    """Times in seconds."""

    namespace: str
    name: str = "flyer-operator"
    duration_seconds: int = LEASE_SECONDS
    """Other candidates take the Lease after this time without a renewal: the failover time."""
    renew_seconds: float = LEASE_SECONDS * RENEW_SHARE
    """The leader stops after this time without a renewal; the rest is for calls in flight."""
    retry_seconds: float = LEASE_SECONDS * RETRY_SHARE
    """Time between renewals, and maximum time between polls of another candidate's Lease."""


class Election:
    """One candidate. `identity` is unique to this process."""

    def __init__(self, api: Api, identity: str, settings: LeaseSettings) -> None:
        assert settings.renew_seconds < settings.duration_seconds, settings
        self.identity = identity
        self.epoch = 0  # of this process's term; 0: not leading
        self.holder = ""
        # A separate queue, because a renewal must not wait behind pod calls; and a short timeout,
        # which leaves time for a second try.
        self._api = api.with_limiter(asyncio.Semaphore(1), settings.renew_seconds / 2)
        self._settings = settings
        self._lease: dict[str, Any] | None = None
        self._seen: tuple[str, float] = ("", 0.0)  # version, and local time of its observation
        self._expires_at = 0.0  # expiry of another candidate's Lease, by the local clock
        self._valid_until = 0.0

    # -- the fence -----------------------------------------------------------------------------

    @property
    def leads(self) -> bool:
        """Whether this process leads now."""
        return self.epoch > 0 and time.monotonic() < self._valid_until

    def fence(self) -> float:
        """Maximum duration of a write that starts now; raises LeadershipLostError if none may."""
        if not self.leads:
            raise LeadershipLostError(
                f"{self.identity} lost leadership: Lease {self._settings.namespace}/"
                f"{self._settings.name} was not renewed within {self._settings.renew_seconds:g} s"
            )
        margin = self._settings.duration_seconds - self._settings.renew_seconds
        return self._valid_until - time.monotonic() + margin / 2

    # -- a term --------------------------------------------------------------------------------

    async def acquire(self) -> int:
        """Wait until this process leads. Returns the epoch of the new term."""
        self.epoch = 0
        while True:
            with contextlib.suppress(ApiError):
                if await self._try_acquire():
                    log.info("%s leads, epoch %d", self.identity, self.epoch)
                    return self.epoch
            await asyncio.sleep(self._pause())

    def _pause(self) -> float:
        """Time until the next poll: at the expiry of the Lease, or soon.

        Polls are frequent because the Lease's duration counts from the observation of a renewal.
        """
        retry_seconds = self._settings.retry_seconds
        remaining = self._expires_at - time.monotonic()
        return (
            remaining
            if 0 < remaining < retry_seconds / POLLS_PER_RENEWAL
            else retry_seconds / POLLS_PER_RENEWAL
        )

    async def hold(self) -> None:
        """Renew the Lease until leadership is lost, then return."""
        settings = self._settings
        started = self._valid_until - settings.renew_seconds  # the last renewal that succeeded
        while self.leads:
            # From start to start: a slow response does not shorten the time for the next renewal.
            renew_at = max(started + settings.retry_seconds, time.monotonic())
            await asyncio.sleep(renew_at - time.monotonic())
            started = time.monotonic()
            if started >= self._valid_until:
                log.warning(
                    "cannot renew the Lease: the event loop was %.1f s late", started - renew_at
                )
                break
            try:
                async with asyncio.timeout(self._valid_until - started):
                    await self._renew(started)
            except (ApiError, TimeoutError) as error:
                log.warning(
                    "cannot renew the Lease: %s after %.1f s; the event loop was %.1f s late",
                    str(error) or "no answer",
                    time.monotonic() - started,
                    started - renew_at,
                )
                if isinstance(error, ConflictError) and not await self._still_ours():
                    break
        self.epoch = 0
        log.warning("%s lost leadership", self.identity)

    async def raise_epoch(self, least: int) -> int:
        """Raise the epoch to at least `least`, because a deletion of the Lease resets the count."""
        while self.epoch < least:
            self.fence()
            try:
                await self._write(time.monotonic(), least - 1)
            except ConflictError as error:  # a concurrent renewal of this process
                if not await self._still_ours() or self._lease is None:
                    raise LeadershipLostError(f"{self.holder or 'no process'} leads") from error
                self.epoch = self._lease["spec"]["leaseTransitions"] + 1
        return self.epoch

    async def release(self) -> None:
        """Release the Lease, so that the next leader need not wait."""
        if not self.leads or self._lease is None:
            self.epoch = 0
            return
        self.epoch = 0
        self._valid_until = 0.0
        with contextlib.suppress(ApiError, TimeoutError):
            async with asyncio.timeout(_RELEASE_SECONDS):
                await self._release_lease(self._lease)

    # -- inside --------------------------------------------------------------------------------

    async def _release_lease(self, lease: dict[str, Any]) -> None:
        while lease["spec"].get("holderIdentity") == self.identity:
            spec = {**lease["spec"], "holderIdentity": "", "leaseDurationSeconds": 1}
            try:
                await self._api.replace(LEASES, {**lease, "spec": spec})
            except ConflictError:  # a renewal in flight has arrived
                name, namespace = self._settings.name, self._settings.namespace
                lease = await self._api.get(LEASES, name, namespace)
            else:
                return

    async def _try_acquire(self) -> bool:
        settings = self._settings
        try:
            lease = await self._api.get(LEASES, settings.name, settings.namespace)
        except NotFoundError:
            lease = None
        started = time.monotonic()
        if lease is None:
            with contextlib.suppress(AlreadyExistsError):
                self._lease = None
                await self._write(started, 0)
                return True
            return False
        spec, version = lease.get("spec") or {}, lease["metadata"]["resourceVersion"]
        if version != self._seen[0]:
            self._seen = (version, started)
        self.holder = spec.get("holderIdentity") or ""
        duration = spec.get("leaseDurationSeconds") or settings.duration_seconds
        is_ours = self.holder == self.identity  # the response to an earlier write was lost
        self._expires_at = self._seen[1] + duration
        if self.holder and not is_ours and started < self._expires_at:
            return False
        self._lease = lease
        with contextlib.suppress(ConflictError):
            await self._write(started, int(spec.get("leaseTransitions") or 0) + 1)
            return True
        return False

    async def _renew(self, started: float) -> None:
        assert self._lease is not None, "no Lease to renew"
        await self._write(started, int(self._lease["spec"]["leaseTransitions"]))

    async def _still_ours(self) -> bool:
        """After a conflict: whether it was caused by an own write whose response was lost."""
        settings = self._settings
        with contextlib.suppress(ApiError, TimeoutError):
            async with asyncio.timeout(max(0.0, self._valid_until - time.monotonic())):
                lease = await self._api.get(LEASES, settings.name, settings.namespace)
                spec = lease.get("spec") or {}
                if spec.get("holderIdentity") == self.identity:
                    self._lease = lease
                    return True
                self.holder = spec.get("holderIdentity") or ""
                return False
        return True  # unknown: the fence decides

    async def _write(self, started: float, transitions: int) -> None:
        settings, before = self._settings, self._lease
        now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        term = before is not None and transitions == before["spec"].get("leaseTransitions")
        acquired = before["spec"].get("acquireTime", now) if before and term else now
        spec = {
            "holderIdentity": self.identity,
            "leaseDurationSeconds": settings.duration_seconds,
            "acquireTime": acquired,
            "renewTime": now,
            "leaseTransitions": transitions,
        }
        try:
            self._lease = await self._store(before, spec)
        except ConflictError:
            # Possibly a conflict with a previous try of this write whose response was lost. Without
            # this check, no process would lead while responses get lost.
            stored = await self._find(spec)
            if stored is None:
                raise
            self._lease = stored
        self._valid_until = started + settings.renew_seconds
        self.epoch = transitions + 1
        self.holder = self.identity

    async def _store(self, before: dict[str, Any] | None, spec: dict[str, Any]) -> dict[str, Any]:
        if before is not None:
            return await self._api.replace(LEASES, {**before, "spec": spec})
        name, namespace = self._settings.name, self._settings.namespace
        metadata = {"name": name, "namespace": namespace}
        kind = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"}
        return await self._api.create(
            LEASES, {**kind, "metadata": metadata, "spec": spec}, namespace
        )

    async def _find(self, spec: dict[str, Any]) -> dict[str, Any] | None:
        """The stored Lease, if it is the result of this write: each write has a unique time."""
        with contextlib.suppress(ApiError):
            lease = await self._api.get(LEASES, self._settings.name, self._settings.namespace)
            stored = lease.get("spec") or {}
            fields = ("holderIdentity", "renewTime", "leaseTransitions")
            if all(stored.get(name) == spec[name] for name in fields):
                return lease
        return None
