"""The objects of Fire-Flyer: models, loading of manifests, generation of the CRDs.

Nothing here decides anything: the engine does. Nothing here talks to anything: drivers do.
"""

from flyer.api.durations import Duration
from flyer.api.flyerjob import (
    CheckpointPolicy,
    Collectives,
    CrossZone,
    FlyerJob,
    FlyerJobSpec,
    ObjectMeta,
    Preemption,
)
from flyer.api.manifest import ManifestError, Problem, load_manifest
from flyer.api.names import API_VERSION, GROUP, KIND_JOB, USER_ANNOTATION, VERSION
from flyer.api.podtemplate import Container, EnvVar, PodSpec, PodTemplate
from flyer.api.priorities import Priority
from flyer.api.status import (
    AssignedNode,
    Assignment,
    Chain,
    Checkpoint,
    Condition,
    Eviction,
    Exit,
    FlyerJobStatus,
    OccupiedNode,
    Pending,
    Phase,
    PreviousNode,
    Progress,
    SuspendCode,
    Suspension,
)
from flyer.api.timestamps import Timestamp, format_timestamp, parse_timestamp, quantize

__all__ = [
    "API_VERSION",
    "GROUP",
    "KIND_JOB",
    "USER_ANNOTATION",
    "VERSION",
    "AssignedNode",
    "Assignment",
    "Chain",
    "Checkpoint",
    "CheckpointPolicy",
    "Collectives",
    "Condition",
    "Container",
    "CrossZone",
    "Duration",
    "EnvVar",
    "Eviction",
    "Exit",
    "FlyerJob",
    "FlyerJobSpec",
    "FlyerJobStatus",
    "ManifestError",
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
    "SuspendCode",
    "Suspension",
    "Timestamp",
    "format_timestamp",
    "load_manifest",
    "parse_timestamp",
    "quantize",
]
