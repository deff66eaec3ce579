"""Names of the API: group, version, kinds, keys of labels and annotations."""

from typing import Final

GROUP: Final = "fireflyer.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = "fireflyer.dev/v1alpha1"
KIND_JOB: Final = "FlyerJob"
KIND_QUOTA: Final = "FlyerQuota"
KIND_TOPOLOGY: Final = "FlyerTopology"
KIND_HEALTH: Final = "NodeHealth"
KIND_THREEFS: Final = "ThreeFSCluster"

PLURAL_JOBS: Final = "flyerjobs"
PLURAL_QUOTAS: Final = "flyerquotas"
PLURAL_TOPOLOGIES: Final = "flyertopologies"
PLURAL_HEALTHS: Final = "nodehealths"
PLURAL_THREEFS: Final = "threefsclusters"

# The one FlyerTopology of a cluster.
TOPOLOGY_NAME: Final = "cluster"

# Who submitted a job. An admission policy stamps it from the authenticated caller; absent, a job's
# user is its namespace.
USER_ANNOTATION = "fireflyer.dev/user"
# Who last changed what the job is asked to do (suspend, stop, priority, requeue): stamped likewise.
CHANGED_BY_ANNOTATION = "fireflyer.dev/changed-by"
# Why, in that person's own words.
REASON_ANNOTATION = "fireflyer.dev/reason"
# The attempt that is to checkpoint, release its nodes and queue again immediately. The number of
# any other attempt has no effect.
REQUEUE_ANNOTATION = "fireflyer.dev/requeue"
# Kueue's: the queue of a job that names none itself.
QUEUE_LABEL: Final = "kueue.x-k8s.io/queue-name"
# The controller name of this scheduler. It runs jobs that name it, and jobs that name none.
MANAGER: Final = "fireflyer.dev/flyerjob-controller"

__all__ = [
    "API_VERSION",
    "CHANGED_BY_ANNOTATION",
    "GROUP",
    "KIND_HEALTH",
    "KIND_JOB",
    "KIND_QUOTA",
    "KIND_THREEFS",
    "KIND_TOPOLOGY",
    "MANAGER",
    "PLURAL_HEALTHS",
    "PLURAL_JOBS",
    "PLURAL_QUOTAS",
    "PLURAL_THREEFS",
    "PLURAL_TOPOLOGIES",
    "QUEUE_LABEL",
    "REASON_ANNOTATION",
    "REQUEUE_ANNOTATION",
    "TOPOLOGY_NAME",
    "USER_ANNOTATION",
    "VERSION",
]
