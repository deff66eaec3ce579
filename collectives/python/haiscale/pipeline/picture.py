"""Pictures of schedules as SVG, without a library: a row for each rank, a bar for each action.

python -m haiscale.pipeline.picture 1F1B --ranks 4 --microbatches 16 --output 1f1b.svg
python -m haiscale.pipeline.picture theirs.csv --hop 0.5
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from haiscale.pipeline.actions import Action, Kind, Schedule, ScheduleError, from_csv
from haiscale.pipeline.check import check
from haiscale.pipeline.schedules import NAMES, build
from haiscale.pipeline.timing import Span, in_flight, play
from haiscale.svg import document, rect, text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["main", "svg"]

COLOURS: Final = {
    Kind.FORWARD: ("#3b6fb6", "#9dbbe0"),
    Kind.BACKWARD: ("#5a9e6f", "#a8d1b4"),
    Kind.INPUT: ("#d9822b", "#f0bf8e"),
    Kind.WEIGHT: ("#8d6cab", "#c6b4d6"),
}
"""Of the first stage of a rank and of its other stages; they differ in lightness too."""
WORDS: Final = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT: "backward, input",
    Kind.WEIGHT: "backward, weights",
}
LEFT, RIGHT, TOP, ROW, BAR, PLOT_WIDTH = 150, 30, 78, 30, 24, 1200
LABEL_WIDTH: Final = 7
"""Of a digit in a bar."""
USAGE: Final = 2


def svg(
    schedule: Schedule, seconds: Callable[[Action], float] | None = None, hop: float = 0.0
) -> str:
    """The schedule as an SVG document; times as for `timing.play`."""
    timeline = play(schedule, hop=hop) if seconds is None else play(schedule, seconds, hop)
    scale = PLOT_WIDTH / timeline.end
    parts = [
        text(20, 28, f"{schedule.name}, {len(schedule.ranks)} ranks", 'font-size="18" fill="#111"'),
        text(
            20,
            48,
            f"{schedule.stages} stages, {schedule.microbatches} micro-batches, bubble "
            f"{100 * timeline.bubble:.1f} %; numbers are micro-batches",
            'fill="#555"',
        ),
    ]
    y = TOP
    for rank, spans in enumerate(timeline.ranks):
        held = in_flight(schedule, rank)
        parts.append(rect(LEFT, y, PLOT_WIDTH, BAR, "#f4f6f9"))
        name = f"rank {rank} ({held} in flight)"
        parts.append(text(LEFT - 10, y + 16, name, 'text-anchor="end" fill="#333"'))
        first = schedule.stages_of(rank)[0]
        parts += [part for span in spans for part in _bar(span, y, scale, first)]
        y += ROW
    used = [kind for kind in Kind if any(a.kind is kind for row in schedule.ranks for a in row)]
    parts += _legend(used, y + 20)
    return document(LEFT + PLOT_WIDTH + RIGHT, y + 44, parts)


def _bar(span: Span, y: int, scale: float, first: int) -> list[str]:
    action, start, end = span
    is_other = action.stage != first
    x, width = LEFT + start * scale, (end - start) * scale
    colour = COLOURS[action.kind][is_other]
    # A gap between bars.
    bar = rect(x, y, max(0.5, width - 1), BAR, colour, f"{action}: {start:g} to {end:g}")
    label = str(action.microbatch)
    if width < LABEL_WIDTH * len(label) + 2:
        return [bar]
    ink = "#111" if is_other else "#fff"
    middle = x + width / 2
    return [bar, text(middle, y + 16, label, f'text-anchor="middle" font-size="11" fill="{ink}"')]


def _legend(kinds: Sequence[Kind], y: int) -> list[str]:
    parts, x = [], LEFT
    for kind in kinds:
        for shift, colour in enumerate(COLOURS[kind]):
            parts.append(rect(x + 10 * shift, y - 10, 10, 12, colour))
        parts.append(text(x + 26, y, f"{kind}: {WORDS[kind]}"))
        x += 170
    return parts


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit status: 0, or 2 if the schedule is refused."""
    options = _parser().parse_args(arguments)
    try:
        schedule = _schedule(options)
        check(schedule)
    except (ScheduleError, OSError, UnicodeDecodeError) as error:
        sys.stderr.write(f"picture: {error}\n")
        return USAGE
    times = dict(zip((Kind.FORWARD, Kind.INPUT, Kind.WEIGHT), options.times, strict=True))
    times[Kind.BACKWARD] = times[Kind.INPUT] + times[Kind.WEIGHT]
    image = svg(schedule, lambda action: times[action.kind], options.hop)
    if options.output is None:
        sys.stdout.write(image)
    else:
        options.output.write_text(image, encoding="utf-8")
    return 0


def _schedule(options: argparse.Namespace) -> Schedule:
    if options.schedule.endswith(".csv"):
        path = Path(options.schedule)
        return from_csv(path.read_text(encoding="utf-8"), path.stem)
    return build(
        options.schedule,
        ranks=options.ranks,
        microbatches=options.microbatches,
        stages_per_rank=options.stages_per_rank,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m haiscale.pipeline.picture",
        description="Draw a pipeline schedule as SVG.",
        allow_abbrev=False,
    )
    parser.add_argument("schedule", help=f"a CSV file of torch, or one of {', '.join(NAMES)}")
    parser.add_argument("--ranks", type=int, default=4, metavar="P", help="default: 4")
    parser.add_argument("--microbatches", type=int, default=16, metavar="M", help="default: 16")
    parser.add_argument("--stages-per-rank", type=int, default=1, metavar="V", help="default: 1")
    parser.add_argument("--times", type=_times, default=(1.0, 1.0, 1.0), metavar="F,I,W",
                        help="times of the forward pass and of both parts of the backward pass; "
                        "default: 1,1,1")  # fmt: skip
    parser.add_argument("--hop", type=float, default=0.0, metavar="TIME",
                        help="time of a transfer between two ranks; default: 0")  # fmt: skip
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: standard output")
    return parser


def _times(text: str) -> tuple[float, ...]:
    values = tuple(float(part) for part in text.split(","))
    if len(values) != len(("F", "I", "W")) or not all(0 < value < float("inf") for value in values):
        raise argparse.ArgumentTypeError(f"invalid times {text!r}: expected F,I,W above 0")
    return values


if __name__ == "__main__":
    sys.exit(main())
