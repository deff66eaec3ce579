"""Start orders of a gang's pods. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from flyer.engine import topology_document
from flyer.sidecar.wire import StartOrder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flyer.api import FlyerJob
    from flyer.engine import Start

__all__ = ["start_orders"]

STOP_GRACE_SECONDS_MAX: Final = 86400


def start_orders(
    job: FlyerJob,
    start: Start,
    addresses: Sequence[str],
    port: int,
    output_seconds: float,
    key: str | None,
) -> list[StartOrder]:
    """The orders in rank order, as `addresses`; `port` is free on the first node."""
    history_id = (job.status.history.id if job.status else "") or job.metadata.uid or ""
    preemption, progress_deadline = job.spec.preemption, job.spec.progress_deadline
    if progress_deadline is not None:
        output_seconds = min(output_seconds, progress_deadline.seconds / 4)
    # The largest part of the orders of a large gang: built once.
    topology = topology_document(
        job=start.job,
        chain=history_id,
        attempt=start.attempt,
        ranks_per_node=job.spec.ranks_per_node,
        assignment=start.assignment,
        addresses=dict(zip(start.assignment.names, addresses, strict=True)),
    )
    restore = start.restore_from
    return [
        StartOrder(
            job=start.job,
            chain=history_id,
            attempt=start.attempt,
            node=node.name,
            zone=node.zone,
            node_rank=node_rank,
            nodes=len(addresses),
            ranks_per_node=job.spec.ranks_per_node,
            master_addr=addresses[0],
            master_port=port,
            user_state=start.user_state,
            restore_step=restore.step if restore else None,
            restore_path=restore.path if restore else None,
            stop_grace_seconds=min(
                preemption.max_checkpoint_grace_period.seconds, STOP_GRACE_SECONDS_MAX
            ),
            output_seconds=output_seconds,
            topology=topology,
            key=key,
        )
        for node_rank, node in enumerate(start.assignment.nodes)
    ]
