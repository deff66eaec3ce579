"""Data parallelism: gradients averaged during backward, steps during the next forward pass.

Two lines differ from a script with torch's::

    from haiscale.ddp import DistributedDataParallel
    ddp = DistributedDataParallel(model, optimizer=optimizer)

`buckets` is the layout, `reducer` the order of allreduces, `module` the wrapper, `haiscale.overlap`
the order of results and the optimizer, `saving` checkpoints of scripts for HAI. Without `optimizer`
(or `overlap`) it behaves as torch's DistributedDataParallel.
"""

from haiscale.ddp.module import DistributedDataParallel
from haiscale.ddp.saving import CheckpointError, init_checkpoint
from haiscale.overlap.errors import ModelMismatchError, StepError
from haiscale.overlap.steps import WholeStep

__all__ = [
    "CheckpointError",
    "DistributedDataParallel",
    "ModelMismatchError",
    "StepError",
    "WholeStep",
    "init_checkpoint",
]
