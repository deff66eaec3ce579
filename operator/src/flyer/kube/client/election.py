"""Who leads: a Lease, a term's epoch, and a fence that falls before anybody else may lead.

A term begins with a compare-and-swap on the Lease that counts `leaseTransitions` up, also when we
take our own old Lease: so each term has an epoch of its own (`leaseTransitions` + 1), which every
commit carries. Clocks of different machines are never compared: others wait until the Lease has
not changed for its duration by their own clock, and we stop `renew_seconds` after the *beginning*
of the last renewal that succeeded, which is sooner.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from flyer.kube.client.errors import AlreadyExistsError, ApiError, ConflictError, NotFoundError
from flyer.kube.client.resources import LEASES
from flyer.kube.lease import LEASE_SECONDS, RENEW_SHARE, RETRY_SHARE

if TYPE_CHECKING:
    from flyer.kube.client.api import Api

__all__ = ["Election", "LeadershipLostError", "LeaseSettings"]

log = logging.getLogger(__name__)

_RELEASE_SECONDS: Final = 2.0
# At somebody else's Lease in the time of a renewal: what a leader's death costs beyond its
# duration is the time between two.
LOOKS: Final = 2


class LeadershipLostError(Exception):
    """We may not write any more: the Lease was not renewed in time, or it is somebody else's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseSettings:
    """Times in seconds."""

    namespace: str
    name: str = "flyer-operator"
    duration_seconds: int = LEASE_SECONDS
    """Others take the Lease after so long without a renewal: what a leader's death costs."""
    renew_seconds: float = LEASE_SECONDS * RENEW_SHARE
    """We stop after so long without a renewal: the rest is for what is under way to arrive."""
    retry_seconds: float = LEASE_SECONDS * RETRY_SHARE
    """Between renewals, and at least so often a look at somebody else's Lease."""


class Election:
    """One candidate. `identity` is this process's own, never used again by another."""

    def __init__(self, api: Api, identity: str, settings: LeaseSettings) -> None:
        assert settings.renew_seconds < settings.duration_seconds, settings
        self.identity = identity
        self.epoch = 0  # of our term; 0: none
        self.holder = ""
        # A renewal that waits behind a gang's pods comes too late, and so does one whose answer
        # never comes: there is time for a second try.
        self._api = api.apart(asyncio.Semaphore(1), settings.renew_seconds / 2)
        self._settings = settings
        self._lease: dict[str, Any] | None = None
        self._seen: tuple[str, float] = ("", 0.0)  # version, when by our clock
        self._expires_at = 0.0  # somebody else's Lease, by our clock
        self._valid_until = 0.0

    # -- the fence -----------------------------------------------------------------------------

    @property
    def leads(self) -> bool:
        """Whether we may act now."""
        return self.epoch > 0 and time.monotonic() < self._valid_until

    def fence(self) -> float:
        """How long a write may take that begins now; raises LeadershipLostError if none may."""
        if not self.leads:
            raise LeadershipLostError(
                f"{self.identity} leads no more: the Lease {self._settings.namespace}/"
                f"{self._settings.name} was not renewed within {self._settings.renew_seconds:g} s"
            )
        margin = self._settings.duration_seconds - self._settings.renew_seconds
        return self._valid_until - time.monotonic() + margin / 2

    # -- a term --------------------------------------------------------------------------------

    async def acquire(self) -> int:
        """Wait until we lead; the epoch of the new term."""
        self.epoch = 0
        while True:
            with contextlib.suppress(ApiError):
                if await self._try_acquire():
                    log.info("%s leads, epoch %d", self.identity, self.epoch)
                    return self.epoch
            await asyncio.sleep(self._pause())

    def _pause(self) -> float:
        """Until the next look: soon, for a renewal counts from when it was seen, not written.

        And at the moment at which the Lease runs out.
        """
        retry_seconds = self._settings.retry_seconds
        left = self._expires_at - time.monotonic()
        return left if 0 < left < retry_seconds / LOOKS else retry_seconds / LOOKS

    async def hold(self) -> None:
        """Renew until that fails for too long, or the Lease is somebody else's; then return."""
        settings = self._settings
        begun = self._valid_until - settings.renew_seconds  # the last renewal that succeeded
        while self.leads:
            # From beginning to beginning: a slow answer leaves no less time for the next one.
            due = max(begun + settings.retry_seconds, time.monotonic())
            await asyncio.sleep(due - time.monotonic())
            begun = time.monotonic()
            if begun >= self._valid_until:
                log.warning("cannot renew the Lease: the event loop was %.1f s late", begun - due)
                break
            try:
                async with asyncio.timeout(self._valid_until - begun):
                    await self._renew(begun)
            except (ApiError, TimeoutError) as error:
                log.warning(
                    "cannot renew the Lease: %s after %.1f s; the event loop was %.1f s late",
                    str(error) or "no answer",
                    time.monotonic() - begun,
                    begun - due,
                )
                if isinstance(error, ConflictError) and not await self._still_ours():
                    break
        self.epoch = 0
        log.warning("%s leads no more", self.identity)

    async def raise_epoch(self, least: int) -> int:
        """Count up to at least this epoch: whoever deletes the Lease deletes the count too."""
        while self.epoch < least:
            self.fence()
            try:
                await self._write(time.monotonic(), least - 1)
            except ConflictError as error:  # our renewal came in between
                if not await self._still_ours() or self._lease is None:
                    raise LeadershipLostError(f"{self.holder or 'nobody'} leads") from error
                self.epoch = self._lease["spec"]["leaseTransitions"] + 1
        return self.epoch

    async def release(self) -> None:
        """Give the Lease back, so that the next leader need not wait."""
        if not self.leads or self._lease is None:
            self.epoch = 0
            return
        self.epoch = 0
        self._valid_until = 0.0
        with contextlib.suppress(ApiError, TimeoutError):
            async with asyncio.timeout(_RELEASE_SECONDS):
                await self._give_back(self._lease)

    # -- inside --------------------------------------------------------------------------------

    async def _give_back(self, lease: dict[str, Any]) -> None:
        while lease["spec"].get("holderIdentity") == self.identity:
            spec = {**lease["spec"], "holderIdentity": "", "leaseDurationSeconds": 1}
            try:
                await self._api.replace(LEASES, {**lease, "spec": spec})
            except ConflictError:  # a renewal of ours that was under way has arrived
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
        begun = time.monotonic()
        if lease is None:
            with contextlib.suppress(AlreadyExistsError):
                self._lease = None
                await self._write(begun, 0)
                return True
            return False
        spec, version = lease.get("spec") or {}, lease["metadata"]["resourceVersion"]
        if version != self._seen[0]:
            self._seen = (version, begun)
        self.holder = spec.get("holderIdentity") or ""
        duration = spec.get("leaseDurationSeconds") or settings.duration_seconds
        ours = self.holder == self.identity  # the answer to our own write was lost
        self._expires_at = self._seen[1] + duration
        if self.holder and not ours and begun < self._expires_at:
            return False
        self._lease = lease
        with contextlib.suppress(ConflictError):
            await self._write(begun, int(spec.get("leaseTransitions") or 0) + 1)
            return True
        return False

    async def _renew(self, begun: float) -> None:
        assert self._lease is not None, "renews what it never had"
        await self._write(begun, int(self._lease["spec"]["leaseTransitions"]))

    async def _still_ours(self) -> bool:
        """After a conflict: whether it was our own write, whose answer was lost."""
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
        return True  # not known: the fence decides

    async def _write(self, begun: float, transitions: int) -> None:
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
            # With ourselves, if the answer to a try of this write was lost. Where it gets lost
            # each time, nobody would ever lead otherwise.
            written = await self._find(spec)
            if written is None:
                raise
            self._lease = written
        self._valid_until = begun + settings.renew_seconds
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
        """The Lease, if this very write is what it says: each has a time of its own."""
        with contextlib.suppress(ApiError):
            lease = await self._api.get(LEASES, self._settings.name, self._settings.namespace)
            stored = lease.get("spec") or {}
            told = ("holderIdentity", "renewTime", "leaseTransitions")
            if all(stored.get(name) == spec[name] for name in told):
                return lease
        return None
