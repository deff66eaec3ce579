"""Fully sharded data parallelism: torch's FSDP2, with gathers, scatters and steps that overlap.

Two lines differ from a script with torch's::

    from haiscale.fsdp import fully_shard, overlap
    overlap(model, optimizer)  # after the optimizer is made

`shard` has both functions, `reducer` the order of scatters and steps, `collectives` what torch
calls, `buffers` their memory, `steps` the optimizer on shards. `wrapper` and `full` have the
interface of HaiScale's training scripts. torch's private names are in `haiscale.internals.fsdp`.
"""

from torch.distributed.fsdp import BackwardPrefetch

from haiscale.fsdp.full import FullParametersError
from haiscale.fsdp.reducer import Reducer
from haiscale.fsdp.shard import fully_shard, overlap
from haiscale.fsdp.wrapper import FullyShardedDataParallel
from haiscale.overlap.errors import ModelMismatchError, StepError
from haiscale.overlap.steps import WholeStep

__all__ = [
    "BackwardPrefetch",
    "FullParametersError",
    "FullyShardedDataParallel",
    "ModelMismatchError",
    "Reducer",
    "StepError",
    "WholeStep",
    "fully_shard",
    "overlap",
]
