"""A model in the layout of the meshes: what each axis does to it, and how a step is computed.

- tp: haiscale.tensor divides the matrices of each layer
- shard: haiscale.fsdp divides all parameters, a layer at a time
- pp: haiscale.pipeline gives each rank some of the layers
- dp: replicas, averaged by haiscale.ddp or by haiscale.fsdp, whose mesh has them as another axis
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from haiscale import tensor
from haiscale.ddp import DistributedDataParallel
from haiscale.fsdp import fully_shard, overlap
from haiscale.mesh import Meshes
from haiscale.pipeline.module import Pipeline
from haiscale.pipeline.schedules import build
from model import Llama, loss_of


class Trainer:
    """Trains a model that every rank has created with the same seed.

    `state` is what a checkpoint has: the model as this rank has it. `microbatches` is the number of
    forward and backward passes of a step.
    """

    def __init__(self, model: Llama, meshes: Meshes, microbatches: int) -> None:
        self.meshes, self.microbatches = meshes, microbatches
        sizes = meshes.layout.sizes
        # Replicas of divided matrices are averaged as shards of size 1: torch's DTensors again.
        self.is_sharded = sizes.shard > 1 or (sizes.tp > 1 and sizes.dp > 1)
        self.divide(model)
        if self.is_sharded:
            self.shard(model)
        if sizes.pp > 1:
            self.state = self.pipeline(model)
        else:
            self.state = model
        self.optimizer = torch.optim.AdamW(self.state.parameters(), betas=(0.9, 0.95))
        if sizes.pp == 1:
            self.model = self.sharded(model) if self.is_sharded else self.replicated(model)

    # What each axis does

    def divide(self, model: Llama) -> None:
        """tp."""
        mesh, head_width = self.meshes.dense["tp"], model.size.head_width
        tensor.parallelize(model, mesh, tensor.LLAMA, head_width=head_width)

    def shard(self, model: Llama) -> None:
        """shard, and dp with it."""
        mesh = self.meshes.dense["dp", "shard"]
        for layer in model.in_order().values():
            fully_shard(layer, mesh=mesh)
        if self.meshes.layout.sizes.pp == 1:
            fully_shard(model, mesh=mesh)

    def pipeline(self, model: Llama) -> Pipeline:
        """pp, and dp with it."""
        sizes, dense = self.meshes.layout.sizes, self.meshes.dense
        blocks = [len(range(k, model.size.layers, sizes.pp)) for k in range(sizes.pp)]
        blocks[0] += 1  # the embedding
        blocks[-1] += 2  # norm and output
        return Pipeline(
            model.in_order(),
            build("1F1B", ranks=sizes.pp, microbatches=self.microbatches),
            loss_of,
            group=dense.get_group("pp"),
            data_group=self.replicas(),
            split=blocks,
        )

    def sharded(self, model: Llama) -> Llama:
        """The step of each layer follows the average of its gradients."""
        overlap(model, self.optimizer)
        return model

    def replicated(self, model: Llama) -> torch.nn.Module:
        """dp alone; the step of each bucket follows the average of its gradients."""
        group = self.replicas()
        if group is None:
            return model
        return DistributedDataParallel(model, process_group=group, optimizer=self.optimizer)

    def replicas(self) -> dist.ProcessGroup | None:
        """Ranks whose gradients haiscale.ddp averages."""
        if self.is_sharded or self.meshes.layout.sizes.dp == 1:
            return None
        return self.meshes.dense.get_group("dp")

    # A step

    def step(self, tokens: torch.Tensor, learning_rate: float) -> float:
        """Trains on this rank's sequences; returns their mean loss."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.zero_grad(set_to_none=True)
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        if isinstance(self.state, Pipeline):
            loss = self.state.step(inputs, targets)
        else:
            loss = self.accumulate(inputs, targets)
        self.after_backward()
        self.optimizer.step()
        return loss

    def accumulate(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        """Gradients of all micro-batches; they are averaged over the ranks with the last one."""
        total = 0.0
        pairs = zip(inputs.chunk(self.microbatches), targets.chunk(self.microbatches), strict=True)
        for number, (x, y) in enumerate(pairs, 1):
            with self.accumulating(more=number < self.microbatches):
                loss = loss_of(self.model(x), y) / self.microbatches
                loss.backward()
            total += loss.item()
        return total

    def accumulating(self, *, more: bool):
        """While there are more micro-batches, gradients are not averaged."""
        if isinstance(self.model, DistributedDataParallel):
            return self.model.no_sync() if more else nullcontext()
        if self.is_sharded:
            self.model.set_requires_gradient_sync(not more)
        return nullcontext()

    def after_backward(self) -> None:
        """Nothing: gradients are averaged by now, or will be before they are used."""
