"""The token of the one job that may cross zones: FlyerTopology `cluster`, status.holder.

The engine decides; this writes, in one compare-and-swap each, before the job's pods exist and after
they are gone. Where the kind is not installed there is no token to take, and the engine's own
ledger, which is made of the jobs' statuses, keeps the rule alone.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, Final

from flyer.api import format_timestamp
from flyer.api.names import API_VERSION, KIND_TOPOLOGY, TOPOLOGY_NAME
from flyer.kube.client.errors import AlreadyExistsError, ConflictError, InvalidError, NotFoundError
from flyer.kube.client.resources import FLYERTOPOLOGIES
from flyer.kube.services.errors import StaleStateError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flyer.api import ZoneCount
    from flyer.kube.client import Api

__all__ = ["Token"]

_TRIES_MAX: Final = 20

log = logging.getLogger(__name__)


class Token:
    """One term's hand on the token."""

    def __init__(self, api: Api) -> None:
        self.holder = ""  # namespace/name; empty: nobody
        self._api = api
        self._epoch = 0
        self._value: dict[str, Any] | None = None

    async def read(self) -> int:
        """The epoch of whoever wrote last."""
        try:
            self._value = await self._read()
        except NotFoundError:
            log.warning("FlyerTopology is not installed: the token is kept in the jobs alone")
            return 0
        return int(self._status.get("epoch") or 0)

    async def open(self, epoch: int, zones: Sequence[ZoneCount]) -> dict[str, Any] | None:
        """Let the API server know the term's epoch: it refuses lower ones from now on.

        What the zones have goes along. The topology as it is now; None: it is not installed.
        """
        self._epoch = epoch
        if self._value is not None:
            await self._write({"epoch": epoch, "zones": [one.to_object() for one in zones]})
        return self._value

    def saw(self, value: dict[str, Any]) -> None:
        """The topology as another write of this leader left it: the next one starts from there."""
        known = self._value
        if known is None or _version(value) > _version(known):
            self._take(value)

    async def hold(self, job: str) -> None:
        """Take it for a job."""
        if self.holder == job or self._value is None:
            self.holder = job
            return
        namespace, _, name = job.partition("/")
        holder = {
            "namespace": namespace,
            "job": name,
            "epoch": self._epoch,
            "since": format_timestamp(time.time()),
        }
        await self._write({"epoch": self._epoch, "holder": holder})

    async def release(self, job: str) -> None:
        """Give it back, if this job has it."""
        if self.holder != job:
            return
        if self._value is None:
            self.holder = ""
            return
        await self._write({"epoch": self._epoch, "holder": None})

    @property
    def _status(self) -> dict[str, Any]:
        assert self._value is not None, "the token was not read"
        return self._value.get("status") or {}

    async def _read(self) -> dict[str, Any]:
        try:
            value = await self._api.get(FLYERTOPOLOGIES, TOPOLOGY_NAME)
        except NotFoundError:
            fresh = {
                "apiVersion": API_VERSION,
                "kind": KIND_TOPOLOGY,
                "metadata": {"name": TOPOLOGY_NAME},
                "spec": {},
            }
            try:
                value = await self._api.create(FLYERTOPOLOGIES, fresh)
            except AlreadyExistsError:
                value = await self._api.get(FLYERTOPOLOGIES, TOPOLOGY_NAME)
        self._take(value)
        return value

    def _take(self, value: dict[str, Any]) -> None:
        self._value = value
        holder = self._status.get("holder")
        self.holder = f"{holder['namespace']}/{holder['job']}" if holder else ""

    async def _write(self, status: dict[str, Any]) -> None:
        before = self.holder
        for _ in range(_TRIES_MAX):
            assert self._value is not None, "the token was not read"
            version = self._value["metadata"]["resourceVersion"]
            patch = {"metadata": {"resourceVersion": version}, "status": status}
            try:
                answer = await self._api.merge(
                    FLYERTOPOLOGIES, TOPOLOGY_NAME, patch, subresource="status"
                )
            except ConflictError:
                await self._read()
                if int(self._status.get("epoch") or 0) > self._epoch:
                    raise StaleStateError("a newer leader wrote the topology's epoch") from None
                if all(self._status.get(name) == value for name, value in status.items()):
                    return  # our own write, whose answer was lost
                if self.holder not in ("", before):
                    raise StaleStateError(f"the token went to {self.holder} meanwhile") from None
                continue
            except InvalidError as error:
                raise StaleStateError(f"the token cannot be written: {error}") from error
            self._take(answer)
            return
        raise StaleStateError("the topology changes too often to write the token")


def _version(value: dict[str, Any]) -> int:
    return int(value["metadata"]["resourceVersion"])
