"""Text files in 3FS as one long row of bytes; each place where `context + 1` follow is a sample."""

import bisect
import itertools
import json

import torch


class Corpus:
    """Reads sequences from the files that `<folder>/index.json` lists as [path, length] pairs."""

    def __init__(self, files, folder: str, context: int) -> None:
        self.files, self.context = files, context
        index = json.loads(files.read_file(f"{folder}/index.json"))
        long_enough = [(path, length) for path, length in index if length > context]
        self.paths = [f"{folder}/{path}" for path, _ in long_enough]
        places = [length - context for _, length in long_enough]
        self.ends = list(itertools.accumulate(places))

    def __len__(self) -> int:
        """Number of samples: of places where one can start."""
        return self.ends[-1]

    def read(self, samples: list[int]) -> torch.Tensor:
        """A (samples, context + 1) tensor of bytes, read from 3FS with one batch call."""
        texts = self.files.batch_read([(*self._place(n), self.context + 1) for n in samples])
        return torch.stack(
            [torch.frombuffer(bytearray(t), dtype=torch.uint8) for t in texts]
        ).long()

    def _place(self, sample: int) -> tuple[str, int]:
        file = bisect.bisect_right(self.ends, sample)
        return self.paths[file], sample - (self.ends[file - 1] if file else 0)
