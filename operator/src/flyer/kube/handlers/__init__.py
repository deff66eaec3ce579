"""kopf: the life cycle of the small kinds (FlyerQuota, FlyerTopology).

Handlers parse, call a pure function, and return status. FlyerJobs, nodes and pods never come here:
kopf keeps whole objects and writes to each one that it handles, while the scheduler needs a few
fields of very many. Whatever kopf does or fails to do, scheduling goes on.
"""

from flyer.kube.handlers.runner import Handlers

__all__ = ["Handlers"]
