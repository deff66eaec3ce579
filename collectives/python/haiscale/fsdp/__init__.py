"""Fully sharded data parallelism: torch's FSDP2, with gathers, scatters and steps that overlap.

Two lines differ from a script with torch's::

    from haiscale.fsdp import fully_shard, overlap
    overlap(model, optimizer)  # after the optimizer is made

`shard` has both functions, `reducer` the order of scatters and steps, `collectives` what torch
calls, `buffers` their memory, `steps` the optimizer on shards. torch's private names are in
`haiscale.internals.fsdp`.
"""

from haiscale.fsdp.reducer import Reducer
from haiscale.fsdp.shard import fully_shard, overlap
from haiscale.overlap.errors import ModelMismatchError, StepError
from haiscale.overlap.steps import WholeStep

__all__ = ["ModelMismatchError", "Reducer", "StepError", "WholeStep", "fully_shard", "overlap"]
