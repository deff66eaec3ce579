"""The Python side of `flyer`: the command line's verbs as methods, with types.

    import flyer.client

    with flyer.client.connect() as client:            # or connect("path/to/state")
        job = client.run("job.yaml")
        for event in client.events(follow=True, timeout_seconds=60):
            print(event.reason, event.message)
        client.wait(job.key, timeout_seconds=600)

It talks to the driver of a local cluster over its control socket. Errors are FlyerError, with a
message, a hint and the exit status that `flyer` would end with.
"""

from flyer.client.connection import Client, connect
from flyer.client.logs import LogLine
from flyer.client.watch_item import WatchItem
from flyer.errors import ExitStatus, FlyerError
from flyer.views import (
    AttemptView,
    CheckpointView,
    EventView,
    FailureView,
    JobView,
    NodeView,
    PlacedNode,
    ProgressView,
    QueueView,
    WhyReason,
    WhyView,
)

__all__ = [
    "AttemptView",
    "CheckpointView",
    "Client",
    "EventView",
    "ExitStatus",
    "FailureView",
    "FlyerError",
    "JobView",
    "LogLine",
    "NodeView",
    "PlacedNode",
    "ProgressView",
    "QueueView",
    "WatchItem",
    "WhyReason",
    "WhyView",
    "connect",
]
