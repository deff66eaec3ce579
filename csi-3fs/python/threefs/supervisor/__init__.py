"""A whole cluster on one machine: one process per service, restarted when it dies.

`options` says what is wanted, `folder` owns the data folder (lock, key, ports), `ports` finds free
ports and who holds taken ones, `plan` turns both into services, `processes` runs them, `serve` is
the loop. Nothing survives the supervisor: services die with it, even when it is killed.
"""

from threefs.supervisor.options import ServeOptions
from threefs.supervisor.serve import Supervisor

__all__ = ["ServeOptions", "Supervisor"]
