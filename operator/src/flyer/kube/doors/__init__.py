"""Bounded TCP and HTTP servers for ports that any pod of the cluster network can reach.

`places` is the pure policy of who may keep a connection; `accept` applies it before anything is
read; `web` serves HTTP behind it; `status` is the separate process that serves probes and metrics.
"""

from flyer.kube.doors.accept import BoundedListener
from flyer.kube.doors.places import Admission, Place, Places, PlaceSettings

__all__ = ["Admission", "BoundedListener", "Place", "PlaceSettings", "Places"]
