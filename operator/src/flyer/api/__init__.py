"""The objects of Fire-Flyer: models, loading of manifests, generation of the CRDs.

Nothing here decides anything: the engine does. Nothing here talks to anything: drivers do.
"""

from flyer.api.assignment import AssignedNode, Assignment, OccupiedNode, Suspension
from flyer.api.attempts import (
    Checkpoint,
    Eviction,
    Exit,
    JobHistory,
    PastAttempt,
    PreviousNode,
    Progress,
)
from flyer.api.conditions import Condition
from flyer.api.durations import Duration
from flyer.api.flyerjob import (
    CheckpointPolicy,
    Collectives,
    CrossZone,
    FlyerJob,
    FlyerJobSpec,
    Preemption,
    StopMode,
)
from flyer.api.flyerquota import (
    FlyerQuota,
    FlyerQuotaSpec,
    FlyerQuotaStatus,
    QuotaScope,
    QuotaSubject,
    QuotaUse,
)
from flyer.api.flyertopology import (
    FinishedJobs,
    FlyerTopology,
    FlyerTopologySpec,
    FlyerTopologyStatus,
    PreemptionLimits,
    PriorityLimits,
    TokenHolder,
    Zone,
    ZoneCount,
)
from flyer.api.manifest import ManifestError, Problem, load_manifest
from flyer.api.metadata import ClusterMeta, ObjectMeta
from flyer.api.names import (
    API_VERSION,
    CHANGED_BY_ANNOTATION,
    GROUP,
    KIND_HEALTH,
    KIND_JOB,
    KIND_QUOTA,
    KIND_TOPOLOGY,
    PLURAL_HEALTHS,
    PLURAL_JOBS,
    PLURAL_QUOTAS,
    PLURAL_TOPOLOGIES,
    REASON_ANNOTATION,
    REQUEUE_ANNOTATION,
    TOPOLOGY_NAME,
    USER_ANNOTATION,
    VERSION,
)
from flyer.api.nodehealth import DeviceHealth, Drain, HealthState, NodeHealth, NodeHealthStatus
from flyer.api.pending import Pending, PendingReason, Unblock
from flyer.api.phases import Phase, SuspendCode
from flyer.api.podtemplate import Container, EnvVar, PodSpec, PodTemplate
from flyer.api.priorities import Priority
from flyer.api.status import FlyerJobStatus
from flyer.api.status_check import illegal
from flyer.api.timestamps import Timestamp, format_timestamp, parse_timestamp, quantize

__all__ = [
    "API_VERSION",
    "CHANGED_BY_ANNOTATION",
    "GROUP",
    "KIND_HEALTH",
    "KIND_JOB",
    "KIND_QUOTA",
    "KIND_TOPOLOGY",
    "PLURAL_HEALTHS",
    "PLURAL_JOBS",
    "PLURAL_QUOTAS",
    "PLURAL_TOPOLOGIES",
    "REASON_ANNOTATION",
    "REQUEUE_ANNOTATION",
    "TOPOLOGY_NAME",
    "USER_ANNOTATION",
    "VERSION",
    "AssignedNode",
    "Assignment",
    "Checkpoint",
    "CheckpointPolicy",
    "ClusterMeta",
    "Collectives",
    "Condition",
    "Container",
    "CrossZone",
    "DeviceHealth",
    "Drain",
    "Duration",
    "EnvVar",
    "Eviction",
    "Exit",
    "FinishedJobs",
    "FlyerJob",
    "FlyerJobSpec",
    "FlyerJobStatus",
    "FlyerQuota",
    "FlyerQuotaSpec",
    "FlyerQuotaStatus",
    "FlyerTopology",
    "FlyerTopologySpec",
    "FlyerTopologyStatus",
    "HealthState",
    "JobHistory",
    "ManifestError",
    "NodeHealth",
    "NodeHealthStatus",
    "ObjectMeta",
    "OccupiedNode",
    "PastAttempt",
    "Pending",
    "PendingReason",
    "Phase",
    "PodSpec",
    "PodTemplate",
    "Preemption",
    "PreemptionLimits",
    "PreviousNode",
    "Priority",
    "PriorityLimits",
    "Problem",
    "Progress",
    "QuotaScope",
    "QuotaSubject",
    "QuotaUse",
    "StopMode",
    "SuspendCode",
    "Suspension",
    "Timestamp",
    "TokenHolder",
    "Unblock",
    "Zone",
    "ZoneCount",
    "format_timestamp",
    "illegal",
    "load_manifest",
    "parse_timestamp",
    "quantize",
]
