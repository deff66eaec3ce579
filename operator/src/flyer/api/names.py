"""The names of the API: group, version, kinds, keys of our labels and annotations."""

from typing import Final

GROUP: Final = "fireflyer.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = "fireflyer.dev/v1alpha1"
KIND_JOB: Final = "FlyerJob"

# Who submitted a job. Kubernetes drivers set it from the authenticated caller; absent, a job's
# user is its namespace.
USER_ANNOTATION = "fireflyer.dev/user"

__all__ = ["API_VERSION", "GROUP", "KIND_JOB", "USER_ANNOTATION", "VERSION"]
