"""A traced run of the example's GPT: four ranks on two nodes with one slow link each.

    python -m bench.training.traced [FOLDER]

Writes trace.svg and heatmap.svg, and the traces themselves to FOLDER/trace.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from haiscale.__main__ import main as haiscale
from haiscale.ddp import DistributedDataParallel
from haiscale.trace.record import record
from hfreduce.testing import Layout

from bench import netns, report
from bench.collectives.harness import BenchError
from bench.training.models import Model
from bench.training.rank import Spec, serve
from bench.training.session import Session

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch.distributed as dist

__all__ = ["main", "rank_main"]

GPT: Final = Model("gpt", width=128, layers=5, context=64)
BUCKET_MEBIBYTES: Final = 0.8
"""One layer."""
BATCH: Final = 8
STEPS: Final = 6
ZONES: Final = (1, 1)
RANKS_PER_NODE: Final = 2
MEGABITS: Final = 500


def rank_main(rank: int, size: int, orders: str, store: str, spec: Spec) -> None:
    """A rank: commands are `trace FOLDER`."""

    class Runner:
        def run(self, order: Sequence[str]) -> str:
            _train(rank, Path(order[1]))
            return "ok 0"

    def create(_groups: dict[str, dist.ProcessGroup]) -> Runner:
        return Runner()

    serve(rank, size, orders, store, spec, create)


def _train(rank: int, folder: Path) -> None:
    model = GPT.build()
    optimizer = GPT.optimizer(model)
    ddp = DistributedDataParallel(model, optimizer=optimizer, bucket_cap_mb=BUCKET_MEBIBYTES)
    data = GPT.data(rank, BATCH)
    for _ in record(range(STEPS), folder, model):
        optimizer.zero_grad()
        GPT.loss(ddp, data).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    ddp.synchronize()


def main(arguments: Sequence[str]) -> int:
    """Runs the ranks and draws; returns the exit status of ``haiscale trace``."""
    output = Path(arguments[0]) if arguments else report.OUTPUT
    folder = output / "trace"
    shutil.rmtree(folder, ignore_errors=True)
    with Session(rank_main) as session:
        spec = Spec("traced", GPT, ("hfreduce",))
        if why := netns.missing():
            report.say(f"links at full speed: {why}")
            layout = Layout.two_zones(1, RANKS_PER_NODE)
            group = session.start(spec, layout, transport="tcp")
        else:
            group = session.start_on_wire(spec, ZONES, RANKS_PER_NODE, MEGABITS)
        answers = group.ask(f"trace {folder.resolve()}")
        refused = [" ".join(words) for words in answers if words[:1] != ["ok"]]
        if refused:
            raise BenchError(f"traced: {refused[0]}")
    pictures = ["--svg", str(output / "trace.svg"), "--heatmap", str(output / "heatmap.svg")]
    return haiscale(["trace", str(folder), *pictures])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
