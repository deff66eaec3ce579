"""Runtime inside a job: standard library only, because it is injected into containers.

Scripts use `current()`. Drivers and sidecars use `flyer.job.pod`, `.fork_server`, `.launcher` and
`.server`. docs/job-contract.md is the contract that this package implements.
"""

from flyer.job.handle import Job, current
from flyer.job.pod import EXIT_SUSPENDED, PodSpec, PodSpecError

__all__ = ["EXIT_SUSPENDED", "Job", "PodSpec", "PodSpecError", "current"]
