"""Text files in 3FS as one long row of bytes, sampled by (seed, step, rank) and nothing else.

A sample depends on no state, so a resumed run reads what the uninterrupted one would have read.
"""

import bisect
import itertools
import json

import torch


class Corpus:
    """Draws sequences from the files that `<folder>/index.json` lists as [path, length] pairs."""

    def __init__(self, files, folder: str, context: int, seed: int) -> None:
        self.files, self.context, self.seed = files, context, seed
        index = json.loads(files.read_file(f"{folder}/index.json"))
        long_enough = [(path, length) for path, length in index if length > context]
        self.paths = [f"{folder}/{path}" for path, _ in long_enough]
        places = [length - context for _, length in long_enough]
        self.ends = list(itertools.accumulate(places))

    def batch(self, step: int, rank: int, size: int) -> torch.Tensor:
        """A (size, context + 1) tensor of bytes, read from 3FS with one batch call."""
        generator = torch.Generator().manual_seed(hash((self.seed, step, rank)) & 0x7FFF_FFFF)
        draws = torch.randint(self.ends[-1], (size,), generator=generator).tolist()
        texts = self.files.batch_read([(*self._place(draw), self.context + 1) for draw in draws])
        return torch.stack(
            [torch.frombuffer(bytearray(t), dtype=torch.uint8) for t in texts]
        ).long()

    def _place(self, draw: int) -> tuple[str, int]:
        file = bisect.bisect_right(self.ends, draw)
        return self.paths[file], draw - (self.ends[file - 1] if file else 0)
