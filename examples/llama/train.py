"""Trains the Llama of model.py on text in 3FS, in the layout that the options give.

    train.py --shard 2 --pp 2       # with eight ranks: dp 2 x shard 2 x pp 2

`parallel.py` has what each axis does, `loop.py` data, checkpoints and suspension. A checkpoint of
one layout loads in any other.
"""

from loop import arguments, microbatches, start, train
from model import SIZES, Llama
from parallel import Trainer


def main() -> None:
    args = arguments(__doc__, checkpoints="/ckpt/llama").parse_args()
    meshes = start(args)
    train(args, meshes, Trainer(Llama(SIZES[args.size]), meshes, microbatches(args, meshes)))


if __name__ == "__main__":
    main()
