"""Mutability of FlyerJobSpec: what a change of each field does to a job that has nodes.

Every field is in exactly one list.
"""

# What decides where a job runs and what it runs: fixed as `nodes` is, while it has nodes and once
# it has ended. An admission policy keeps it so, and that a stop is not taken back: rules of the CRD
# would compare templates with every write of the status. `nodes` is compared with the status.
FIXED_FIELDS = ("ranks_per_node", "node_class", "zone", "cross_zone", "template")
# Applied by the engine immediately; active_deadline only if it is lowered.
CHANGEABLE_FIELDS = (
    "priority", "suspend", "stop", "active_deadline", "progress_deadline", "max_restarts",
    "preemption",
)  # fmt: skip
# Not applied by the engine while the job has nodes. `nodes` and `managed_by` have rules in the CRD.
DEFERRED_FIELDS = (
    "nodes", "queue", "ttl_seconds_after_finished", "checkpoint", "collectives", "managed_by",
)  # fmt: skip

__all__ = ["CHANGEABLE_FIELDS", "DEFERRED_FIELDS", "FIXED_FIELDS"]
