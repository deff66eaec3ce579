"""HaiScale: training layers for nodes whose accelerators share one network card.

The layers are thin: torch's modules, meshes and optimizers, over HFReduce's collectives.
Import a layer by its module, for example ``from haiscale.ddp import DistributedDataParallel``.

This module imports nothing: torch is loaded by the layer that needs it.
"""

__all__: list[str] = []
