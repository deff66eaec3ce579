"""Submissions: maps each of the engine's jobs to one FlyerJob object, by uid.

A name can be deleted and created again: the new object waits until the engine has forgotten the
old one, so that the engine never confuses the two. A job whose template is refused is not
submitted: its status has the reason.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from flyer.api import Condition, FlyerJobStatus, JobHistory, Pending, quantize
from flyer.api.waiting import TEMPLATE_REFUSED
from flyer.engine import JobRemoved, JobSubmitted, Tick
from flyer.job_events import INVALID, NEVER_FITS, JobEvent
from flyer.kube.apiserver.errors import ApiError, NotFoundError
from flyer.kube.apiserver.resources import FLYERJOBS
from flyer.kube.cache.job_view import RELEASE_FINALIZER

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping
    from typing import Any

    from flyer.api import FlyerJob
    from flyer.engine import Event
    from flyer.kube.apiserver import Api
    from flyer.kube.cache.cluster_cache import ClusterCache
    from flyer.kube.cache.job_view import JobView
    from flyer.kube.services.jobs.commits import Commits
    from flyer.kube.services.jobs.event_recorder import EventRecorder
    from flyer.kube.services.jobs.quarantine import Quarantine
    from flyer.kube.services.pods.templates import PodTemplates

__all__ = ["Submissions"]

log = logging.getLogger(__name__)


class Submissions:
    """Submits and removes jobs, with one object per name at a time."""

    def __init__(
        self,
        api: Api,
        cache: ClusterCache,
        recorder: EventRecorder,
        quarantine: Quarantine,
        templates: PodTemplates,
        commits: Commits,
        *,
        epoch: Callable[[], int],
        record_event: Callable[[str, JobEvent], None],
        enqueue: Callable[[Event], None],
        spawn: Callable[[Coroutine[Any, Any, None], str, str], object],
        request_rebuild: Callable[[str], None],
    ) -> None:
        self._api = api
        self._cache = cache
        self._recorder = recorder
        self._quarantine = quarantine
        self._templates = templates
        self._commits = commits
        self._epoch = epoch
        self._record_event = record_event
        self._enqueue = enqueue
        self._spawn = spawn
        self._request_rebuild = request_rebuild
        self._uids: dict[str, str] = {}  # objects of the engine's jobs, by key
        self._waiting: dict[
            str, JobView
        ] = {}  # successors of jobs that the engine has not forgotten
        self._invalid: dict[str, str] = {}  # objects reported as invalid, by key

    def uid_of(self, key: str) -> str | None:
        """The uid of the engine's job with this key."""
        return self._uids.get(key)

    def reset(self, live: Mapping[str, JobView]) -> None:
        """The engine was rebuilt from these objects."""
        self._uids = {key: view.uid for key, view in live.items()}

    def is_eligible(self, view: JobView) -> bool:
        """Whether the object is to be submitted once its template has passed."""
        return view.job is not None and view.key not in self._quarantine and not view.forgettable

    def template_passed(self, view: JobView) -> bool:
        """Whether the template has passed. Otherwise starts a check of it."""
        if self._uids.get(view.key) == view.uid or self._templates.has_passed(view):
            return True
        self._templates.check(view, self._resubmit, self._refuse)
        return False

    def changed(self, before: JobView | None, after: JobView | None) -> None:
        """A FlyerJob was added, changed or deleted."""
        view = after or before
        assert view is not None, "a change without an object"
        with self._quarantine.guard(view.key, "reading the job"):
            self._changed(view, before, after)
            if after is not None and self._commits.is_foreign(after):
                self._request_rebuild(f"{after.key}: another writer changed its status")

    def _changed(self, view: JobView, before: JobView | None, after: JobView | None) -> None:
        key = view.key
        self._check_withheld_nodes(before, after)
        replaced = before is not None and after is not None and before.uid != after.uid
        if after is None or after.job is not None:
            self._invalid.pop(key, None)  # one entry per unreadable object
        if view.job is None:
            if after is not None:
                self.report_invalid(view)
            if replaced and key in self._uids:
                self._enqueue(JobRemoved(key, uid=self._uids[key]))
            return
        if (after is None or replaced) and key in self._quarantine:
            self._quarantine.remove(key)
            self._enqueue(Tick())
        if after is None or after.deleting or replaced:
            if key in self._uids:
                self._enqueue(JobRemoved(key, uid=self._uids[key]))
            elif key in self._quarantine:
                self._quarantine.retry_now(key)
                self._enqueue(Tick())
            else:
                self.forget(key)
        if after is None or after.deleting:
            self._waiting.pop(key, None)
            self._templates.forget(key)
        elif self._uids.get(key, after.uid) != after.uid:
            self._waiting[key] = after
        elif before is None or replaced or after.changed_since(before):
            self._submit(key, after)

    def _check_withheld_nodes(self, before: JobView | None, after: JobView | None) -> None:
        """Request a rebuild if nodes withheld for an unreadable job may be free."""
        withheld = before.kept_nodes if before is not None else frozenset()
        if before is not None and not withheld <= (after.kept_nodes if after else frozenset()):
            self._request_rebuild(f"{before.key}: nodes were withheld for it")

    def quarantined(self, key: str) -> None:
        """The job is quarantined: the engine has no object with this key."""
        self._uids.pop(key, None)

    def forget(self, key: str) -> None:
        """The engine has forgotten a job."""
        self._uids.pop(key, None)
        view = self._cache.job(key)
        if view is not None and view.deleting and RELEASE_FINALIZER in view.finalizers:
            self._spawn(self._release(key, view), f"release {key}", key)
        successor = self._waiting.pop(key, None)
        if successor is not None and view is not None:
            self._submit(key, view)

    def report_invalid(self, view: JobView) -> None:
        """Report once that an object is invalid, unless another controller manages it."""
        if view.problem and self._invalid.get(view.key) != view.uid:
            self._invalid[view.key] = view.uid
            log.error("ignoring invalid FlyerJob %s: %s", view.key, view.problem)
            self._recorder.record(view.key, view.uid, JobEvent(INVALID, view.problem, True))

    def _submit(self, key: str, view: JobView) -> None:
        if view.job is None or not self.is_eligible(view) or not self.template_passed(view):
            return
        if self._has_live_pods(key, view):
            # The engine would stop a gang that it did not start; a rebuild adopts it.
            self._request_rebuild(f"{key} has a gang that the scheduler has not adopted")
            return
        self._uids[key] = view.uid
        self._enqueue(JobSubmitted(view.job))

    def _resubmit(self, view: JobView) -> None:
        """Submit a job whose template has passed."""
        current = self._cache.job(view.key)
        is_current = current is not None and current.uid == view.uid and not current.deleting
        if current is not None and is_current and self._uids.get(view.key, view.uid) == view.uid:
            self._submit(view.key, current)

    async def _refuse(self, view: JobView, why: str) -> None:
        """Store in the job's status why its template was refused, and record an event."""
        if self.uid_of(view.key) == view.uid or view.job is None:
            return  # submitted before its template was changed: its start reports the refusal
        status = _refused_status(view.job, why, self._epoch(), time.time())
        if await self._commits.write(view, status):
            self._record_event(view.key, JobEvent(NEVER_FITS, why, warning=True))

    def _has_live_pods(self, key: str, view: JobView) -> bool:
        """Whether a job that the engine does not have has live pods of its current attempt."""
        status = view.job.status if view.job is not None else None
        if key in self._uids or status is None or not status.phase.has_pods:
            return False
        attempt = status.history.attempt
        pods = self._cache.pods_of(key, view.uid)
        return any(pod.attempt == attempt and not pod.ended for pod in pods)

    async def _release(self, key: str, view: JobView) -> None:
        """Remove the finalizer of a deleted job once its nodes are empty."""
        namespace, _, name = key.partition("/")
        remaining = [name for name in view.finalizers if name != RELEASE_FINALIZER]
        patch = {"metadata": {"finalizers": remaining or None, "resourceVersion": view.version}}
        try:
            await self._api.merge(FLYERJOBS, name, patch, namespace)
        except NotFoundError:
            return
        except ApiError as error:
            log.warning("cannot remove the finalizer of %s yet: %s", key, error)


def _refused_status(job: FlyerJob, why: str, epoch: int, now: float) -> FlyerJobStatus:
    """The status of a job whose template cannot become pods; unchanged if already stored."""
    before = job.status or FlyerJobStatus(
        history=JobHistory(
            id=job.metadata.uid or job.key,
            submitted_at=job.metadata.creation_timestamp or quantize(now),
            queued_at=quantize(now),
        )
    )
    previous = before.condition("QuotaReserved")
    same = previous is not None and (previous.reason, previous.message) == (
        TEMPLATE_REFUSED,
        why,
    )
    condition = Condition(
        type="QuotaReserved", status="False", reason=TEMPLATE_REFUSED, message=why,
        last_transition_time=previous.last_transition_time if previous and same else quantize(now),
        observed_generation=job.metadata.generation,
    )  # fmt: skip
    other_conditions = tuple(other for other in before.conditions if other.type != condition.type)
    return before.replace(
        epoch=epoch if not same else before.epoch,
        reason=TEMPLATE_REFUSED,
        message=why,
        pending=Pending(verdict="Never", reason=TEMPLATE_REFUSED, message=why),
        conditions=(*other_conditions, condition),
        observed_generation=job.metadata.generation,
    )
