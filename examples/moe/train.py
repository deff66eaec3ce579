"""Trains a mixture of experts: the Llama of examples/llama with other feed-forward parts.

    train.py --ep 4                 # with eight ranks: dp 8, experts on 4 ranks, 2 replicas of each

Each block has many small experts, of which a token uses a few, and a shared one that every token
passes (Dai et al., 2024, "DeepSeekMoE"). `haiscale.moe` sends the tokens. Data, checkpoints and
suspension are those of examples/llama, the other axes too.
"""

import argparse
import sys
from pathlib import Path

import torch.distributed as dist
from haiscale import moe
from haiscale.fsdp import fully_shard
from haiscale.mesh import Meshes
from haiscale.tensor import Plan, parallelize

sys.path.append(str(Path(__file__).parents[1] / "llama"))
from loop import arguments, microbatches, start, train
from model import SIZES, FeedForward, Llama, Size
from parallel import Trainer

PLAN = Plan(
    columns=("*attention.w[qkv]",),
    rows=("*attention.wo",),
    norms=("*attention_norm", "norm"),
    embedding=("tok_embeddings",),
    head=("output",),
    replicated=("*ffn_norm", "*feed_forward*"),
    heads=("*attention.w[qkv]",),
)
"""tp divides the attention; ranks of one tp group send the same tokens to their own experts."""


def main() -> None:
    parser = arguments(__doc__, checkpoints="/ckpt/moe")
    parser.add_argument("--ep", type=int, default=1, help="ranks that share the experts of a block")
    parser.add_argument("--ep-nodes", type=int, default=1, help="nodes over which they are spread")
    parser.add_argument("--experts", type=int, default=16, help="experts of a block")
    parser.add_argument("--chosen", type=int, default=4, help="experts of a token")
    args = parser.parse_args()
    meshes = start(args)
    model = mixture(args, meshes)
    train(args, meshes, ExpertTrainer(model, meshes, microbatches(args, meshes)))


def mixture(args: argparse.Namespace, meshes: Meshes) -> Llama:
    """A Llama whose tokens pass one shared and some routed experts, together as large as its own
    feed-forward part."""
    size: Size = SIZES[args.size]
    links = moe.connect(meshes)
    hidden = size.hidden // (args.chosen + 1)

    def feed_forward() -> moe.MoE:
        return moe.MoE(
            size.width,
            hidden,
            args.experts,
            moe.Routing(top_k=args.chosen),
            links=links,
            shared=FeedForward(size.width, hidden),
        )

    return Llama(size, feed_forward)


class ExpertTrainer(Trainer):
    """Experts are averaged over the ranks that have the same ones, everything else over all."""

    def __init__(self, model: Llama, meshes: Meshes, microbatches: int) -> None:
        ranks = meshes.dense["dp", "shard"].mesh.flatten().tolist()
        self.data = dist.new_group(ranks, use_local_synchronization=True)
        """Ranks with this rank's layers that read different data."""
        super().__init__(model, meshes, microbatches)
        self.blocks = self.state.module if meshes.layout.sizes.pp > 1 else model

    def divide(self, model: Llama) -> None:
        mesh = self.meshes.dense["tp"]
        parallelize(model, mesh, PLAN, head_width=model.size.head_width)

    def shard(self, model: Llama) -> None:
        """Experts are divided among their replicas, by rows; then everything else."""
        if self.meshes.expert is not None:
            for block in model.layers:
                fully_shard(block.feed_forward.experts, mesh=self.meshes.expert["expert_dp"])
        super().shard(model)

    def replicas(self) -> None:
        """haiscale.ddp would give every rank the same experts: see `after_backward`."""

    def after_backward(self) -> None:
        if not self.is_sharded:
            experts = self.data
            if self.meshes.expert is not None:
                experts = self.meshes.expert.get_group("expert_dp")
            moe.average_gradients(self.blocks, self.data, experts)

    def step(self, tokens, learning_rate: float) -> float:
        loss = super().step(tokens, learning_rate)
        moe.balance(self.blocks, self.data)
        return loss


if __name__ == "__main__":
    main()
