"""Which object each of the engine's jobs is, and which come next.

A name can be deleted and created anew: the new object waits until the engine has forgotten the old
one, so that the engine never mistakes one for the other.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from flyer.api import Phase
from flyer.engine import JobRemoved, JobSubmitted, Tick
from flyer.job_events import INVALID, JobEvent
from flyer.kube.client.errors import ApiError, NotFoundError
from flyer.kube.client.resources import FLYERJOBS
from flyer.kube.services.views import RELEASE_FINALIZER

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping
    from typing import Any

    from flyer.engine import Event
    from flyer.kube.client import Api
    from flyer.kube.services.announcements import Announcer
    from flyer.kube.services.apart import LeftAlone
    from flyer.kube.services.templates import Templates
    from flyer.kube.services.views import JobView
    from flyer.kube.services.world import World

__all__ = ["Submissions"]

# Phases in which pods may run.
_LIVE: Final = (Phase.STARTING, Phase.RUNNING, Phase.SUSPENDING)

log = logging.getLogger(__name__)


class Submissions:
    """Tells the engine of jobs that come and go, one object a name at a time."""

    def __init__(
        self,
        api: Api,
        world: World,
        announcer: Announcer,
        left: LeftAlone,
        templates: Templates,
        *,
        tell: Callable[[Event], None],
        spawn: Callable[[Coroutine[Any, Any, None], str, str], object],
        rebuild: Callable[[str], None],
    ) -> None:
        self._api = api
        self._world = world
        self._announcer = announcer
        self._left = left  # alone
        self._templates = templates
        self._tell = tell
        self._spawn = spawn
        self._rebuild = rebuild
        self._uids: dict[str, str] = {}  # of the objects that the engine's jobs are
        self._waiting: dict[str, JobView] = {}  # successors of jobs that are not forgotten yet
        self._invalid: dict[str, str] = {}  # uids of the objects that are announced, by key

    def uid_of(self, key: str) -> str | None:
        """The object that the engine knows under this name."""
        return self._uids.get(key)

    def begin(self, live: Mapping[str, JobView]) -> None:
        """The engine was rebuilt from these objects."""
        self._uids = {key: view.uid for key, view in live.items()}

    def wanted(self, view: JobView) -> bool:
        """Whether the engine is to know of this object, once its template has passed."""
        return view.job is not None and view.key not in self._left and not view.forgettable

    def passed(self, view: JobView) -> bool:
        """Whether the engine may know of it now; else its template is being checked."""
        if self._uids.get(view.key) == view.uid or self._templates.has_passed(view):
            return True
        self._templates.check(view)
        return False

    def resubmit(self, view: JobView) -> None:
        """Its template has passed."""
        current = self._world.job(view.key)
        there = current is not None and current.uid == view.uid and not current.deleting
        if current is not None and there and self._uids.get(view.key, view.uid) == view.uid:
            self._submit(view.key, current)

    def changed(self, before: JobView | None, after: JobView | None) -> None:
        """A FlyerJob came, changed or went."""
        known = after or before
        assert known is not None, "a change of nothing"
        key = known.key
        self._give_back(before, after)
        replaced = before is not None and after is not None and before.uid != after.uid
        if after is None or after.job is not None:
            self._invalid.pop(key, None)  # as many entries as objects that cannot be read
        if known.job is None:
            if after is not None:
                self.tell_invalid(known)
            if replaced and key in self._uids:
                self._tell(JobRemoved(key))
            return
        if (after is None or replaced) and key in self._left:
            self._left.gone(key)
            self._tell(Tick())
        if after is None or after.deleting or replaced:
            if key in self._uids:
                self._tell(JobRemoved(key))
            elif key in self._left:
                self._left.hasten(key)
                self._tell(Tick())
            else:
                self.forgotten(key)
        if after is None or after.deleting:
            self._waiting.pop(key, None)
            self._templates.forget(key)
        elif self._uids.get(key, after.uid) != after.uid:
            self._waiting[key] = after
        elif before is None or replaced or after.asks_otherwise(before):
            self._submit(key, after)

    def _give_back(self, before: JobView | None, after: JobView | None) -> None:
        """Nodes that were kept for a job that could not be read may be free now."""
        kept = before.kept_nodes if before is not None else frozenset()
        if before is not None and not kept <= (after.kept_nodes if after else frozenset()):
            self._rebuild(f"{before.key}: nodes were kept for it")

    def left(self, key: str) -> None:
        """The job is left alone: the engine knows no object of this name."""
        self._uids.pop(key, None)

    def forgotten(self, key: str) -> None:
        """The engine has forgotten a job."""
        self._uids.pop(key, None)
        view = self._world.job(key)
        if view is not None and view.deleting and RELEASE_FINALIZER in view.finalizers:
            self._spawn(self._release(key, view), f"release {key}", key)
        successor = self._waiting.pop(key, None)
        if successor is not None and view is not None:
            self._submit(key, view)

    def tell_invalid(self, view: JobView) -> None:
        """Say once that an object cannot be read, unless it is somebody else's."""
        if view.problem and self._invalid.get(view.key) != view.uid:
            self._invalid[view.key] = view.uid
            log.error("%s cannot be read and is left alone: %s", view.key, view.problem)
            self._announcer.tell(view.key, view.uid, JobEvent(INVALID, view.problem, warning=True))

    def _submit(self, key: str, view: JobView) -> None:
        if view.job is None or not self.wanted(view) or not self.passed(view):
            return
        if self._lives(key, view):
            # The engine would end a gang that it did not start; a rebuild adopts it.
            self._rebuild(f"{key} has a gang that the scheduler does not know")
            return
        self._uids[key] = view.uid
        self._tell(JobSubmitted(view.job))

    def _lives(self, key: str, view: JobView) -> bool:
        """Whether a job that the engine does not know has pods of its present attempt."""
        status = view.job.status if view.job is not None else None
        if key in self._uids or status is None or status.phase not in _LIVE:
            return False
        attempt = status.chain.attempt
        pods = self._world.pods_of(key, view.uid)
        return any(one.attempt == attempt and not one.ended for one in pods)

    async def _release(self, key: str, view: JobView) -> None:
        """Let a deleted job go that was kept until its nodes are empty."""
        namespace, _, name = key.partition("/")
        left = [one for one in view.finalizers if one != RELEASE_FINALIZER]
        patch = {"metadata": {"finalizers": left or None, "resourceVersion": view.version}}
        try:
            await self._api.merge(FLYERJOBS, name, patch, namespace)
        except NotFoundError:
            return
        except ApiError as error:
            log.warning("%s keeps its finalizer for now: %s", key, error)
