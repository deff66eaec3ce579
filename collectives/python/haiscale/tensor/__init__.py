"""Tensor parallelism: the matrices of each layer divided over the ranks of an NVLink pair.

    tensor.parallelize(model, meshes.dense["tp"], tensor.LLAMA, head_width=64)

`plan` has the parts of models and their checks, `layers` what modules of each part compute, and
`exchanges` the collectives between them. Parameters are DTensors, for optimizers, checkpoints and
clipping; modules compute with plain tensors. `loss_parallel` is torch's.
"""

from torch.distributed.tensor.parallel import loss_parallel

from haiscale.tensor.layers import parallelize
from haiscale.tensor.plan import HUGGING_FACE, LLAMA, Plan, PlanError, SizeError

__all__ = [
    "HUGGING_FACE",
    "LLAMA",
    "Plan",
    "PlanError",
    "SizeError",
    "loss_parallel",
    "parallelize",
]
