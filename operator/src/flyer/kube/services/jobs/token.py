"""Cross-zone token: the job that may cross zones, in `status.holder` of FlyerTopology `cluster`.

The engine decides. This module writes each decision in one compare-and-swap, before the job's pods
exist and after they are gone. If the kind is not installed, the token does not exist, and the
engine alone enforces the limit, from the jobs' statuses.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, Final

from flyer.api import format_timestamp
from flyer.api.names import API_VERSION, KIND_TOPOLOGY, TOPOLOGY_NAME
from flyer.kube.apiserver.errors import (
    AlreadyExistsError,
    ConflictError,
    InvalidError,
    NotFoundError,
)
from flyer.kube.apiserver.resources import FLYERTOPOLOGIES
from flyer.kube.services.errors import StaleStateError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flyer.api import ZoneCount
    from flyer.kube.apiserver import Api

__all__ = ["Token"]

_TRIES_MAX: Final = 20

log = logging.getLogger(__name__)


class Token:
    """The token, as one term reads and writes it."""

    def __init__(self, api: Api) -> None:
        self.holder = ""  # namespace/name; empty: free
        self._api = api
        self._epoch = 0
        self._value: dict[str, Any] | None = None

    async def read(self) -> int:
        """Read the topology. Returns the epoch of its last writer."""
        try:
            self._value = await self._read()
        except NotFoundError:
            log.warning(
                "FlyerTopology is not installed: the cross-zone token exists only in job statuses"
            )
            return 0
        return int(self._status.get("epoch") or 0)

    async def open(self, epoch: int, zones: Sequence[ZoneCount]) -> dict[str, Any] | None:
        """Write the term's epoch and the zone counts: the API server then rejects lower epochs.

        Returns the new topology; None: it is not installed.
        """
        self._epoch = epoch
        if self._value is not None:
            await self._write({"epoch": epoch, "zones": [zone.to_object() for zone in zones]})
        return self._value

    def observe(self, value: dict[str, Any]) -> None:
        """Take over the topology returned by another write of this leader."""
        current = self._value
        if current is None or _version(value) > _version(current):
            self._take(value)

    async def hold(self, job: str) -> None:
        """Acquire the token for a job."""
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
        """Release the token if this job holds it."""
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
                    return  # this write was performed, and its response lost
                if self.holder not in ("", before):
                    raise StaleStateError(f"the token was acquired by {self.holder}") from None
                continue
            except InvalidError as error:
                raise StaleStateError(f"cannot write the token: {error}") from error
            self._take(answer)
            return
        raise StaleStateError("cannot write the token: the topology changes too often")


def _version(value: dict[str, Any]) -> int:
    return int(value["metadata"]["resourceVersion"])
