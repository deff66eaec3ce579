"""kopf handlers for FlyerQuota and FlyerTopology.

Handlers parse an object, call a pure function and return a status. FlyerJobs, nodes and pods are
not handled here: kopf keeps whole objects and writes to each one that it handles, while the
scheduler needs a few fields of many objects. Scheduling does not depend on kopf.
"""

from flyer.kube.handlers.runner import Handlers

__all__ = ["Handlers"]
