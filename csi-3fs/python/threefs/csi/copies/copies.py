"""Copies of this process: start, state, end.

A copy continues in the background while its CreateVolume returns ABORTED, which the provisioner
retries; the reply of the last retry is the result. After a restart the next retry continues the
copy.
"""

from __future__ import annotations

import threading
import time
import uuid
from contextlib import suppress
from typing import TYPE_CHECKING

from threefs.csi.copies.fair_pool import FairPool, PoolJob
from threefs.csi.copies.volume_copy import (
    HOLDER_PREFIX,
    VolumeCopy,
    stored_state,
    sweep_copies,
)
from threefs.csi.errors import CsiError, Exhausted, InFlight
from threefs.csi.logs import logger
from threefs.csi.volumes.node_claims import WATCH_SECONDS, NodeClaims
from threefs.csi.volumes.volumes import Volumes
from threefs.daemon import CLAIM_SECONDS
from threefs.errors import ThreeFSError

if TYPE_CHECKING:
    from threefs.csi.copies.volume_copy import CopyRequest
    from threefs.csi.metrics import Metrics
    from threefs.csi.volumes.clusters import Clusters
    from threefs.csi.volumes.parameters import Parameters
    from threefs.csi.volumes.volume_id import VolumeId

__all__ = ["Copies"]

RENEW_SECONDS = CLAIM_SECONDS / 4
SWEEP_SECONDS = 300.0
WAIT_SECONDS = 1.0
"""For which a call waits for its copy: most small ones are complete then."""
WAITERS_MAX = 4
"""Calls that wait at the same time; others return at once, so that workers stay free."""
JOBS_MAX = 256
JOBS_OF_TENANT_MAX = 64
STOP_SECONDS = 5.0


class Copies:
    """The copies of a controller; thread-safe."""

    def __init__(
        self,
        clusters: Clusters,
        metrics: Metrics,
        workers: int,
        watch_seconds: float = WATCH_SECONDS,
    ) -> None:
        self._clusters = clusters
        self._metrics = metrics
        self._claims = NodeClaims(HOLDER_PREFIX + uuid.uuid4().hex, watch_seconds=watch_seconds)
        self._pool = FairPool(workers)
        self._jobs: dict[str, tuple[VolumeCopy, PoolJob]] = {}
        self._lock = threading.Lock()
        self._waiters = threading.Semaphore(WAITERS_MAX)
        self._stop = threading.Event()

    def start(self) -> None:
        """Start copying, and the renewal of claims."""
        self._pool.start()
        threading.Thread(target=self._renew_until_stopped, daemon=True).start()

    def stop(self) -> None:
        """Stop all copies, so that another controller can continue them at once."""
        self._stop.set()
        self._pool.stop(STOP_SECONDS, InFlight("this controller stops; another one continues"))

    def unfinished(
        self, volumes: Volumes, volume: VolumeId, parameters: Parameters
    ) -> CopyRequest | None:
        """Return the request of a copy that is in progress or was interrupted."""
        with self._lock:
            copy, job = self._jobs.get(str(volume), (None, None))
            if job is not None and job.ended.is_set() and job.error is None:
                # Completed for a call that another controller has answered.
                del self._jobs[str(volume)]
                copy = None
        if copy is not None:
            return copy.request
        state = stored_state(volumes, volume)
        return state.request(volume, parameters) if state is not None else None

    def run(self, request: CopyRequest, tenant: str) -> None:
        """Start or continue a copy; return when it is complete.

        Raises `InFlight` while it is in progress, and its error once if it has failed.
        """
        name = str(request.volume)
        with self._lock:
            copy, job = self._jobs.get(name) or self._started(request, tenant)
        if not job.ended.is_set() and self._waiters.acquire(blocking=False):
            try:
                job.ended.wait(WAIT_SECONDS)
            finally:
                self._waiters.release()
        if not job.ended.is_set():
            raise InFlight(
                f"volume `{request.name}` is being created with the contents of "
                f"{request.source.kind} `{request.source.id}`: copied {copy.progress}"
            )
        with self._lock:
            self._jobs.pop(name, None)
        if job.error is not None:
            raise job.error

    def cancel(self, volume: VolumeId) -> None:
        """Cancel the copy of a volume that is deleted; `InFlight` until it has stopped."""
        with self._lock:
            copy_and_job = self._jobs.get(str(volume))
        if copy_and_job is None:
            return
        _, job = copy_and_job
        self._pool.cancel(job, InFlight(f"volume `{volume}` was deleted while it was created"))
        if not job.ended.wait(WAIT_SECONDS):
            raise InFlight(f"the copy `{volume}` stops; retry when it has stopped")
        with self._lock:
            self._jobs.pop(str(volume), None)

    def _started(self, request: CopyRequest, tenant: str) -> tuple[VolumeCopy, PoolJob]:
        self._forget_ended()
        of_tenant = sum(job.tenant == tenant for _, job in self._jobs.values())
        if len(self._jobs) >= JOBS_MAX or of_tenant >= JOBS_OF_TENANT_MAX:
            raise Exhausted(
                f"{of_tenant} copies of `{tenant}` and {len(self._jobs)} of all are in progress; "
                f"at most {JOBS_OF_TENANT_MAX} and {JOBS_MAX} may be: retry when one has ended"
            )
        volumes = Volumes(request.volume.cluster, self._clusters.of(request.volume.cluster))
        copy = VolumeCopy(request, volumes, self._claims)
        started = time.monotonic()

        def end(error: Exception | None) -> None:
            try:
                result = copy.end(error)
            finally:
                self._metrics.copies.labels("failed" if error else "complete").inc()
            if result is not None and result is not error:
                job.error = result
            logger().info(
                "copy ended",
                volume_id=str(request.volume),
                source=request.source.id,
                copied=str(copy.progress),
                seconds=round(time.monotonic() - started, 1),
                error=str(result or ""),
            )

        job = PoolJob(tenant, copy.steps(), end)
        self._jobs[str(request.volume)] = (copy, job)
        self._pool.add(job)
        return copy, job

    def _forget_ended(self) -> None:
        """Forget results that no call has collected, if there are many."""
        if len(self._jobs) >= JOBS_OF_TENANT_MAX:
            ended = [name for name, (_, job) in self._jobs.items() if job.ended.is_set()]
            for name in ended:
                del self._jobs[name]

    def _renew_until_stopped(self) -> None:
        next_sweep = time.monotonic()
        while not self._stop.wait(RENEW_SECONDS):
            with self._lock:
                jobs = [(copy, job) for copy, job in self._jobs.values() if not job.ended.is_set()]
            for copy, job in jobs:
                # A renewal that fails is repeated; the lease ends meanwhile.
                with suppress(ThreeFSError, CsiError):
                    if not copy.renew():
                        lost = InFlight(
                            f"another controller continues the copy `{copy.request.volume}`; retry"
                        )
                        self._pool.cancel(job, lost)
            if time.monotonic() >= next_sweep:
                next_sweep = time.monotonic() + SWEEP_SECONDS
                self._sweep()

    def _sweep(self) -> None:
        for cluster in self._clusters.names():
            try:
                sweep_copies(Volumes(cluster, self._clusters.of(cluster)))
            except (ThreeFSError, CsiError) as error:
                logger().warning("sweep of copies failed", cluster=cluster, error=str(error))
