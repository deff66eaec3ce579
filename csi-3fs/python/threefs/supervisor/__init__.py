"""A whole cluster on one machine: one process per service, restarted when it dies.

`options` has the options, `folder` owns the data folder (lock, key, ports), `ports` finds free
ports and the owners of used ones, `plan` derives the services, `processes` runs them, `serve` is
the loop.
No service survives the supervisor, even if it is killed.
"""

from threefs.supervisor.options import ServeOptions
from threefs.supervisor.serve import Supervisor

__all__ = ["ServeOptions", "Supervisor"]
