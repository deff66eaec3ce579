"""The objects of Fire-Flyer: models, loading of manifests, generation of the CRDs.

Nothing here decides anything: the engine does. Nothing here talks to anything: drivers do.
"""

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
from flyer.api.flyerquota import FlyerQuota, FlyerQuotaSpec, FlyerQuotaStatus, QuotaUse
from flyer.api.flyertopology import (
    FlyerTopology,
    FlyerTopologySpec,
    FlyerTopologyStatus,
    TokenHolder,
    Zone,
    ZoneCount,
)
from flyer.api.lifecycle import illegal
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
from flyer.api.phases import Phase, SuspendCode
from flyer.api.podtemplate import Container, EnvVar, PodSpec, PodTemplate
from flyer.api.priorities import Priority
from flyer.api.status import (
    AssignedNode,
    Assignment,
    Chain,
    Checkpoint,
    Eviction,
    Exit,
    FlyerJobStatus,
    OccupiedNode,
    Pending,
    PreviousNode,
    Progress,
    Suspension,
)
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
    "Chain",
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
    "ManifestError",
    "NodeHealth",
    "NodeHealthStatus",
    "ObjectMeta",
    "OccupiedNode",
    "Pending",
    "Phase",
    "PodSpec",
    "PodTemplate",
    "Preemption",
    "PreviousNode",
    "Priority",
    "Problem",
    "Progress",
    "QuotaUse",
    "StopMode",
    "SuspendCode",
    "Suspension",
    "Timestamp",
    "TokenHolder",
    "Zone",
    "ZoneCount",
    "format_timestamp",
    "illegal",
    "load_manifest",
    "parse_timestamp",
    "quantize",
]
