"""Pod templates: checked before their jobs are queued, and built into the pods of an attempt.

A check builds the pod as an attempt would, compares it with the nodes that the job may get, and
submits it to the API server: a dry run of its creation in the job's namespace with strict field
validation, which rejects unknown fields. Jobs with the same template share a check. A job whose
template fails is not submitted to the engine; its status has the reason. Failures that may pass
without a change of the job (nodes, a claim) are checked again after a while.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pydantic import ValidationError

from flyer.api import AssignedNode, Assignment, FlyerJob, PodTemplate
from flyer.api.waiting import TEMPLATE_REFUSED
from flyer.engine import Start
from flyer.kube.apiserver.errors import ApiError, ForbiddenError, InvalidError, NotFoundError
from flyer.kube.apiserver.resources import FLYERJOBS, PODS
from flyer.kube.pods import PlacedNode, PodsRefusedError, build_pods
from flyer.kube.pods.build import requested_of_nodes
from flyer.kube.pods.fits import NodeFacts, refusals_by_nodes
from flyer.kube.servers.fair_semaphore import FairSemaphore
from flyer.kube.services.pods.field_names import suggestion
from flyer.kube.services.pods.volume_claims import late_claims

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Coroutine

    from flyer.kube.apiserver import Api
    from flyer.kube.cache.cluster_cache import ClusterCache
    from flyer.kube.cache.job_view import JobView
    from flyer.kube.cache.node_view import NodeView
    from flyer.kube.pods import PodSettings

    _Passed = Callable[[JobView], None]
    _Refused = Callable[[JobView, str], Coroutine[Any, Any, None]]

__all__ = ["NodesUnfitError", "PodTemplates", "Verdict"]

CONCURRENCY_MAX: Final = 8
PASSED_MAX: Final = 4096
"""Number of passed templates that are cached, at 100 bytes each."""
AGAIN_SECONDS: Final = 5.0
AGAIN_SECONDS_MAX: Final = 60.0
_NAME: Final = "flyer-template-check"
_UNKNOWN: Final = re.compile(r'unknown field "([^"]+)"')
_REASON_CHARS_MAX: Final = 1500

log = logging.getLogger(__name__)


class NodesUnfitError(Exception):
    """The nodes of an attempt, or a claim, no longer fit a template that passed before."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Reasons why a template is refused; none: it passed."""

    reasons: tuple[str, ...] = ()
    final: bool = True  # until the job is changed


class PodTemplates:
    """Checks templates, and builds pods from them, during one term."""

    def __init__(
        self,
        api: Api,
        cache: ClusterCache,
        pod_settings: Callable[[], PodSettings],
        spawn: Callable[[Coroutine[Any, Any, None], str, str], object],
    ) -> None:
        self._api = api.with_limiter(asyncio.Semaphore(CONCURRENCY_MAX))
        self._semaphore = FairSemaphore(CONCURRENCY_MAX)
        self._cache = cache
        self._pod_settings = pod_settings
        self._spawn = spawn
        # Digests of templates that passed, with the version of the node shapes at that time; and of
        # those whose dry run passed, independently of nodes.
        self._known: OrderedDict[str, int] = OrderedDict()
        self._allowed: OrderedDict[str, int] = OrderedDict()
        self._under_way: dict[str, asyncio.Event] = {}  # by digest
        self._checking: dict[str, str] = {}  # by job: uid and generation

    def has_passed(self, view: JobView) -> bool:
        """Whether the job's template has passed a check, by this leader or an earlier one."""
        job = view.job
        if job is None or self._is_known(view.mark) or job.spec.stop is not None:
            return True
        status = job.status
        if status is None:
            return False
        if not status.phase.idle:
            return True  # it was started with this template, which is immutable
        if status.pending is not None and status.pending.reason == TEMPLATE_REFUSED:
            return False
        return status.epoch > 0 and status.observed_generation == job.metadata.generation

    def check(self, view: JobView, passed: _Passed, refused: _Refused) -> None:
        """Start a check: `passed` gets the job's latest view, `refused` also each reason."""
        version = f"{view.uid} {view.mark}"
        if self._checking.get(view.key) != version:
            self._checking[view.key] = version
            self._spawn(self._check(view, version, passed, refused), f"check {view.key}", view.key)

    def forget(self, key: str) -> None:
        """The job is being deleted."""
        self._checking.pop(key, None)

    async def require(self, job: FlyerJob, mark: str, names: Collection[str]) -> None:
        """Raise if the template of a complete job does not pass on the named nodes.

        `PodsRefusedError`: it fails on all nodes. `NodesUnfitError`: nodes or a claim have changed.
        """
        if self._is_known(mark):
            return
        verdict = await self._judge(job, mark, names)
        if verdict.reasons and verdict.final:
            raise PodsRefusedError(job.key, list(verdict.reasons))
        if verdict.reasons:
            raise NodesUnfitError(f"{job.key}: {'; '.join(verdict.reasons)}")

    def build(self, job: FlyerJob, start: Start) -> list[dict[str, Any]]:
        """Build the pods of an attempt. Every error is the template's, the only variable input."""
        views = {name: self._cache.nodes.get("", name) for name in start.assignment.names}
        nodes = {
            name: PlacedNode(
                name=name,
                dedicated=view.dedicated if view else True,
                allocatable=view.allocatable if view else {},
            )
            for name, view in views.items()
        }
        try:
            return build_pods(job, start, nodes, self._pod_settings())
        except PodsRefusedError:
            raise
        except Exception as error:
            log.exception("%s: a bug, please report it", job.key)
            why = f"spec.template: cannot be built into pods ({type(error).__name__}: {error})"
            raise PodsRefusedError(job.key, [why]) from error

    # -- inside --------------------------------------------------------------------------------

    async def _check(self, view: JobView, version: str, passed: _Passed, refused: _Refused) -> None:
        pause_seconds = AGAIN_SECONDS
        while self._checking.get(view.key) == version:
            current = self._cache.job(view.key)
            if current is None or current.uid != view.uid or current.mark != view.mark:
                break  # another check is running, or the job was deleted
            try:
                async with self._semaphore.acquire(current.key.partition("/")[0]):
                    verdict = await self._verdict(current)
            except ApiError as error:  # of a 404, too: the cache knows whether the job exists
                log.warning("%s: cannot check its template, retrying: %s", view.key, error)
                verdict = Verdict(("",), final=False)
            if not verdict.reasons:
                self._checking.pop(view.key, None)
                passed(current)
                return
            if verdict.reasons != ("",):
                await refused(current, "; ".join(verdict.reasons)[:_REASON_CHARS_MAX])
            if verdict.final:
                return  # until the job is changed
            await asyncio.sleep(pause_seconds * random.uniform(0.5, 1.5))  # noqa: S311
            pause_seconds = min(2 * pause_seconds, AGAIN_SECONDS_MAX)
        if self._checking.get(view.key) == version:
            del self._checking[view.key]

    async def _verdict(self, view: JobView) -> Verdict:
        """Check a template once for all concurrent jobs that have it."""
        while (other := self._under_way.get(view.mark)) is not None:
            await other.wait()
        if self._is_known(view.mark):
            return Verdict()
        finished = self._under_way[view.mark] = asyncio.Event()
        try:
            namespace, _, name = view.key.partition("/")
            document = await self._api.get(FLYERJOBS, name, namespace)
            if document["metadata"].get("uid") != view.uid or view.job is None:
                raise NotFoundError(f"get flyerjobs {view.key}", "the job was deleted")
            try:
                template = PodTemplate.model_validate(document["spec"]["template"])
            except ValidationError as error:
                first = error.errors(include_url=False, include_input=False)[0]
                place = ".".join(("spec", "template", *map(str, first["loc"])))
                return Verdict((f"{place}: {first['msg']}",))
            spec = view.job.spec.replace(template=template)
            shapes = self._cache.node_shapes
            verdict = await self._judge(view.job.replace(spec=spec), view.mark)
            if not verdict.reasons:
                _remember(self._known, view.mark, shapes)
            return verdict
        finally:
            del self._under_way[view.mark]
            finished.set()

    async def _judge(
        self, job: FlyerJob, mark: str, names: Collection[str] | None = None
    ) -> Verdict:
        """Check the template on every node that the job may get, or on the named ones."""
        nodes = [
            node for node in self._cache.nodes.values()
            if (_may_serve(job, node) if names is None else node.node.name in names)
        ]  # fmt: skip
        # A pod requests what its node has, so each kind of node has another pod.
        samples: dict[tuple[str, bool, bool], dict[str, Any]] = {}
        pairs: list[tuple[dict[str, Any], NodeFacts]] = []
        # On shared nodes the pod has an affinity to one node, which must not count here.
        affinity = job.spec.template.to_object()["spec"].get("affinity")
        try:
            pod = self._sample(job, nodes[0] if nodes else None)
            for node in nodes:
                kind = requested_of_nodes(node.allocatable)
                if kind not in samples:
                    samples[kind] = {**self._sample(job, node)["spec"], "affinity": affinity}
                facts = NodeFacts(node.node.name, node.labels, node.allocatable)
                pairs.append((samples[kind], facts))
        except PodsRefusedError as error:
            return Verdict(tuple(error.reasons))
        if reasons := tuple(refusals_by_nodes(pairs)):
            return Verdict(reasons, final=False)
        namespace = job.metadata.namespace
        if any(node.dedicated for node in nodes):
            late = [
                late_claim async for late_claim in late_claims(self._api, pod["spec"], namespace)
            ]
            if late:
                return Verdict(tuple(late), final=False)
        if mark in self._allowed:
            return Verdict()
        try:
            await self._api.create(PODS, pod, namespace, dry_run=True, strict=True)
        except InvalidError as error:
            if "does not support dry run" not in str(
                error
            ):  # an admission webhook: the fields are valid
                return Verdict((_readable(error),))
        except ForbiddenError as error:
            # A full quota, Pod Security or an admission webhook: each may change, and the start of
            # the job reports it.
            log.info("%s: its pods would be rejected now: %s", job.key, error)
        _remember(self._allowed, mark, 0)
        return Verdict()

    def _sample(self, job: FlyerJob, node: NodeView | None) -> dict[str, Any]:
        """Build the pod of rank 0 for a node that the job may get."""
        name = node.node.name if node else "node"
        zone = node.node.zone if node else "default"
        first = AssignedNode(name=name, zone=zone, first_rank=0)
        start = Start(job.key, 1, Assignment(epoch=1, nodes=(first,), reserved_at=0.0), None, 0)
        (pod,) = self.build(job, start)
        pod["metadata"] = {**pod["metadata"], "name": f"{_NAME}-{random.getrandbits(40):010x}"}
        return pod

    def _is_known(self, mark: str) -> bool:
        """Whether the template passed with the current nodes."""
        return self._known.get(mark) == self._cache.node_shapes


def _remember(marks: OrderedDict[str, int], mark: str, value: int) -> None:
    marks[mark] = value
    marks.move_to_end(mark)
    if len(marks) > PASSED_MAX:
        marks.popitem(last=False)


def _may_serve(job: FlyerJob, view: NodeView) -> bool:
    node, spec = view.node, job.spec
    fits = spec.node_class in (None, node.node_class) and spec.zone in (None, node.zone)
    return view.managed and node.ready and fits and node.slots >= spec.ranks_per_node


def _readable(error: InvalidError) -> str:
    """The API server's message with the manifest's field names, and a remedy if known."""
    message = str(error)
    if unknown := _UNKNOWN.findall(message):
        return "; ".join(
            f"spec.template.{field}: not a field of pods: "
            f"{suggestion(field) or 'correct or remove it'}"
            for field in unknown
        )
    _, _, message = message.partition(": ")
    message = re.sub(rf'Pod "{_NAME}-[0-9a-f]+" is invalid: ', "", message)
    message = re.sub(r"(?<![\w.])(?=(spec|metadata)[.:\[])", "spec.template.", message)
    return message if message.startswith("spec.template") else f"spec.template: {message}"
