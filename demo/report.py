"""Builds the summary and the timeline from the observations."""

from __future__ import annotations

import itertools
import statistics
import time
from typing import TYPE_CHECKING

from demo.summary import Summary
from demo.timeline import Bar, Mark, Timeline

if TYPE_CHECKING:
    from demo.scenario import Scenario


def summarise(scenario: Scenario, memory_peak_bytes: int, wall_s: float) -> Summary:
    """Every figure is read from the jobs' output, the scheduler's objects or the processes."""
    observer, log = scenario.stack.observer, scenario.log
    job = scenario.stack.client.job("gpt")
    result, reference = scenario.result("gpt"), scenario.result("gpt-reference")
    by_attempt = scenario.steps_by_attempt("gpt")
    lost_in = steps_lost(by_attempt)
    outcomes = {attempt.attempt: attempt.outcome for attempt in job.attempts}
    suspended = [a for a in lost_in if outcomes.get(a) in ("Suspended", "Preempted", "Released")]
    losses = [pair for attempt in sorted(by_attempt) for pair in by_attempt[attempt]]
    rates = observer.seen.rates.get("gpt", [])
    return Summary(
        bit_identical=result["digest"] == reference["digest"],
        final_digest=str(result["digest"]),
        reference_digest=str(reference["digest"]),
        ranks=job.nodes * job.ranks_per_node,
        zones=len({node.zone for attempt in job.attempts[:1] for node in attempt.nodes}),
        zone_crossings_per_tree=list(result["zone_crossings_per_tree"]),  # type: ignore[call-overload]
        preemptions=len(suspended),
        node_failures=len(log.node_kills),
        storage_kills=len(log.storage_kills),
        steps_lost_by_suspend=sum(lost_in[a] for a in suspended),
        steps_lost_by_failure=sum(n for a, n in lost_in.items() if a not in suspended),
        checkpoints=len({(name, step) for _, name, step in observer.seen.checkpoints}),
        corpus_bytes=log.uploaded.bytes,
        corpus_identical=log.uploaded.identical,
        loss_first=losses[0][1],
        loss_last=losses[-1][1],
        allreduce_gigabytes_per_second=statistics.median(rates) if rates else 0.0,
        storage_resynced=len(log.storage_returns) == len(log.storage_kills),
        memory_peak_bytes=memory_peak_bytes,
        wall_s=round(wall_s, 1),
    )


def steps_lost(by_attempt: dict[int, list[tuple[int, float]]]) -> dict[int, int]:
    """Number of steps that had to be repeated, for each attempt with a successor."""
    attempts = sorted(number for number, steps in by_attempt.items() if steps)
    return {
        before: by_attempt[before][-1][0] - (by_attempt[after][0][0] - 1)
        for before, after in itertools.pairwise(attempts)
    }


def draw(scenario: Scenario) -> str:
    """The timeline of the whole run."""
    observer, log = scenario.stack.observer, scenario.log
    started = log.started_at
    nodes = sorted(observer.seen.nodes, key=lambda node: (node.zone, node.name))
    zones = {node.zone: [n.name for n in nodes if n.zone == node.zone] for node in nodes}
    services = sorted(
        {name for _, name in log.storage_kills} | {"storage-1", "storage-2", "storage-3"}
    )
    jobs = list(observer.seen.jobs.values())
    timeline = Timeline(
        groups=[
            *((f"zone {zone}", names) for zone, names in zones.items()),
            ("checkpoints", [job.name for job in jobs]),
            ("3FS", services),
        ]
    )
    for job in (scenario.stack.client.job(job.key) for job in jobs):
        for attempt in job.attempts:
            end = attempt.ended_at or job.finished_at or time.time()
            for node in attempt.nodes:
                timeline.bars.append(
                    Bar(
                        node.name,
                        job.name,
                        attempt.attempt,
                        attempt.started_at - started,
                        end - started,
                    )
                )
    for when, name, step in observer.seen.checkpoints:
        timeline.marks.append(
            Mark(name, "checkpoint", when - started, f"{name}: step {step} is durable")
        )
    for when, text in log.suspends:
        placed = scenario.stack.client.job("gpt").attempts[0].nodes
        timeline.marks += [Mark(node.name, "suspend", when - started, text) for node in placed]
    for when, name in log.node_kills + log.storage_kills:
        timeline.marks.append(Mark(name, "kill", when - started, f"{name} killed"))
    for when, name in log.storage_returns:
        timeline.marks.append(Mark(name, "resync", when - started, f"{name} resynced, all serving"))
    identical = scenario.result("gpt")["digest"] == scenario.result("gpt-reference")["digest"]
    verdict = "bit-identical to" if identical else "different from"
    return timeline.svg(
        "One model, interrupted and broken on purpose",
        f"the final weights of gpt are {verdict} those of gpt-reference, which nothing disturbed",
    )
