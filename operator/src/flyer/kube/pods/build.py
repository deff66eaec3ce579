"""Pods of one attempt: the job's template with the additions that a gang needs. Pure.

The user's containers, volumes, security contexts, resources and environment take precedence. Three
fields are always set: `restartPolicy`, the trainer's command (wrapped by the launcher, with the
same arguments), and on dedicated nodes the scheduler.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from flyer.kube.pods import names
from flyer.kube.pods.additions import (
    LIBRARY_FOLDER,
    add_daemon,
    add_environment,
    add_named,
    add_resource,
    add_shared_memory,
    add_sidecar,
    add_tools,
    add_traffic_classes,
)
from flyer.kube.pods.refusals import PodsRefusedError, refusals, without_nulls

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flyer.api import FlyerJob
    from flyer.engine import Start
    from flyer.kube.pods.settings import PlacedNode, PodSettings

__all__ = ["LAUNCH_COMMAND", "build_pods", "requested_of_nodes"]

# Fields that the models fill with an empty list if the user omits them.
_MODELLED_LISTS = ("args", "command", "env", "volumes")

GRACE_SECONDS_MIN = 1

LAUNCH_COMMAND = ["python3", f"{names.TOOLS_FOLDER}/bin/flyer-launch"]


def build_pods(
    job: FlyerJob, start: Start, nodes: Mapping[str, PlacedNode], settings: PodSettings
) -> list[dict[str, Any]]:
    """One manifest per node, in rank order. `nodes` has an entry for each node of the assignment.

    Raises `PodsRefusedError` for a job that has `refusals`.
    """
    if reasons := list(refusals(job)):
        raise PodsRefusedError(job.key, reasons)
    return [
        _pod(job, start, node_rank, nodes[assigned.name], settings)
        for node_rank, assigned in enumerate(start.assignment.nodes)
    ]


def _pod(
    job: FlyerJob, start: Start, node_rank: int, node: PlacedNode, settings: PodSettings
) -> dict[str, Any]:
    spec = _template_spec(job)
    trainer = spec["containers"][job.spec.template.spec.containers.index(job.spec.template.trainer)]
    _wrap(trainer, settings)
    add_tools(spec, trainer, settings)
    add_sidecar(spec, trainer, settings)
    add_environment(trainer, _environment(job, start, node_rank))
    _fill_node(job, trainer, node)
    if job.spec.collectives.inject:
        add_shared_memory(spec, trainer)
    if job.spec.collectives.daemon:
        add_daemon(spec, trainer, settings)
    if spec.get("hostNetwork") and spec.get("dnsPolicy") in (None, "ClusterFirst"):
        # With ClusterFirst such a pod uses its node's resolver, which cannot resolve Services.
        spec["dnsPolicy"] = "ClusterFirstWithHostNet"
    spec["restartPolicy"] = "Never"
    # An eviction of the pod takes no longer than a preemption by the operator. With a period of 0,
    # a deleted pod would disappear before its processes end, and its node would look empty.
    longest = math.ceil(job.spec.preemption.max_checkpoint_grace_period.seconds)
    requested = spec.get("terminationGracePeriodSeconds")
    granted = min(requested, longest) if isinstance(requested, int) else longest
    spec["terminationGracePeriodSeconds"] = max(granted, GRACE_SECONDS_MIN)
    spec.setdefault("hostname", names.host_name(job.metadata.name, start.attempt, node_rank))
    spec.setdefault("subdomain", job.metadata.name)
    if settings.priority_class:
        spec.setdefault("priorityClassName", settings.priority_class)
    _place(spec, node)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": _metadata(job, start, node_rank, trainer["name"]),
        "spec": spec,
    }


def _template_spec(job: FlyerJob) -> dict[str, Any]:
    """The template as the user wrote it, without empty lists for omitted fields."""
    spec: dict[str, Any] = without_nulls(job.spec.template.to_object()["spec"])
    for body in (spec, *spec["containers"]):
        for field in _MODELLED_LISTS:
            if body.get(field) == []:
                del body[field]
    return spec


def _metadata(job: FlyerJob, start: Start, node_rank: int, trainer: str) -> dict[str, Any]:
    template_metadata = job.spec.template.metadata.to_object()
    return {
        "name": names.pod_name(job.metadata.name, start.attempt, node_rank),
        "namespace": job.metadata.namespace,
        "labels": {
            "app.kubernetes.io/name": job.metadata.name,
            "app.kubernetes.io/managed-by": "fire-flyer",
            **template_metadata.get("labels", {}),
            names.LABEL_JOB: job.metadata.name,
            names.LABEL_HISTORY: names.label_value(_history_id(job)),
            names.LABEL_ATTEMPT: str(start.attempt),
            names.LABEL_NODE_RANK: str(node_rank),
            names.LABEL_JOBSET_INDEX: str(node_rank),
            names.LABEL_JOBSET_GLOBAL_INDEX: str(node_rank),
            names.LABEL_JOBSET_REPLICAS: str(len(start.assignment.nodes)),
            names.LABEL_JOBSET_RESTARTS: str(start.attempt - 1),
        },
        "annotations": {
            names.ANNOTATION_DEFAULT_CONTAINER: trainer,
            **template_metadata.get("annotations", {}),
        },
        "ownerReferences": [
            {
                "apiVersion": job.api_version,
                "kind": job.kind,
                "name": job.metadata.name,
                "uid": job.metadata.uid or "",
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ],
    }


def _wrap(trainer: dict[str, Any], settings: PodSettings) -> None:
    """Run the command through the launcher; Kubernetes still expands $(NAME) in its arguments."""
    words = [*trainer["command"], *trainer.get("args", [])]
    trainer["command"] = list(LAUNCH_COMMAND)
    trainer["args"] = ["--start-seconds", f"{settings.start_seconds:g}", "--", *words]
    # The launcher writes the first failing rank's traceback to the termination message.
    trainer.setdefault("terminationMessagePolicy", "FallbackToLogsOnError")


def _environment(job: FlyerJob, start: Start, node_rank: int) -> dict[str, str]:
    """Variables known before the start; the launcher adds each rank's."""
    nodes, ranks_per_node = len(start.assignment.nodes), job.spec.ranks_per_node
    history_id = _history_id(job)
    return {
        "FLYER_JOB": job.key,
        "FLYER_CHAIN": history_id,
        "FLYER_ATTEMPT": str(start.attempt),
        "FLYER_NODE": start.assignment.nodes[node_rank].name,
        "FLYER_ZONE": start.assignment.nodes[node_rank].zone,
        "FLYER_TOPOLOGY": names.TOPOLOGY_PATH,
        "FLYER_SOCKET": names.SOCKET_PATH,
        "GROUP_RANK": str(node_rank),
        "GROUP_WORLD_SIZE": str(nodes),
        "LOCAL_WORLD_SIZE": str(ranks_per_node),
        "WORLD_SIZE": str(nodes * ranks_per_node),
        "PET_NNODES": str(nodes),
        "PET_NPROC_PER_NODE": str(ranks_per_node),
        "PET_NODE_RANK": str(node_rank),
        "PYTHONPATH": LIBRARY_FOLDER,
        # All attempts form one run in Weights & Biases.
        "WANDB_RUN_ID": names.label_value(history_id),
        "WANDB_RESUME": "allow",
    }


def _history_id(job: FlyerJob) -> str:
    return (job.status.history.id if job.status else "") or job.metadata.uid or ""


def requested_of_nodes(allocatable: Mapping[str, str]) -> tuple[str, bool, bool]:
    """The properties of a node that the requests of its pod depend on."""
    gpus, hfreduce, nccl = (
        str(allocatable.get(name, "0"))
        for name in (
            names.RESOURCE_GPU, names.RESOURCE_RDMA_HFREDUCE, names.RESOURCE_RDMA_NCCL,
        )
    )  # fmt: skip
    return gpus, hfreduce != "0", nccl != "0"


def _fill_node(job: FlyerJob, trainer: dict[str, Any], node: PlacedNode) -> None:
    """Request all GPUs of the node, unless the user requests GPUs."""
    requested = {
        name
        for kind in ("limits", "requests")
        for name in trainer.get("resources", {}).get(kind, {})
        if name.endswith("/gpu") or "/mig-" in name
    }
    gpus = str(node.allocatable.get(names.RESOURCE_GPU, "0"))
    if not requested and gpus != "0":
        add_resource(trainer, names.RESOURCE_GPU, gpus)
    if job.spec.collectives.inject:
        add_traffic_classes(trainer, node.allocatable)


def _place(spec: dict[str, Any], node: PlacedNode) -> None:
    """Dedicated node: the operator binds. Shared node: kube-scheduler, once the gate is removed."""
    tolerations = spec.get("tolerations") or []
    if all(toleration.get("key") != names.DEDICATED_KEY for toleration in tolerations):
        dedicated_toleration = {
            "key": names.DEDICATED_KEY,
            "operator": "Exists",
            "effect": "NoSchedule",
        }
        spec["tolerations"] = [*tolerations, dedicated_toleration]
    if node.dedicated:
        spec["schedulerName"] = names.SCHEDULER_NAME
        return
    add_named(spec, "schedulingGates", {"name": names.GATE})
    affinity = spec.setdefault("affinity", {}).setdefault("nodeAffinity", {})
    required = affinity.setdefault("requiredDuringSchedulingIgnoredDuringExecution", {})
    # Terms are alternatives, so each must require this node.
    terms = required.get("nodeSelectorTerms") or [{}]
    required["nodeSelectorTerms"] = [
        {**term, "matchFields": [*term.get("matchFields", []), _is_node(node.name)]}
        for term in terms
    ]


def _is_node(name: str) -> dict[str, Any]:
    return {"key": "metadata.name", "operator": "In", "values": [name]}
