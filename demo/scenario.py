"""Scenario of the demo: each step waits for its effect instead of a fixed time."""

from __future__ import annotations

import json
import re
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from demo import corpus
from demo.stack import EXAMPLE, URGENT, Stack, kill_all

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from demo.observer import Observer

STEP_SECONDS = 180.0
JOB_SECONDS = 600.0
RESYNC_SECONDS = 60.0
RESTART_AFTER_SECONDS = 3.0
STEPS_BEFORE_PREEMPTION = 30
STEPS_AFTER_CHECKPOINT = 4


@dataclass
class ScenarioLog:
    """Actions of the scenario, each with its time in seconds since the epoch."""

    started_at: float = field(default_factory=time.time)
    uploaded: corpus.Uploaded = corpus.NOTHING
    storage_kills: list[tuple[float, str]] = field(default_factory=list)
    storage_returns: list[tuple[float, str]] = field(default_factory=list)
    node_kills: list[tuple[float, str]] = field(default_factory=list)
    suspends: list[tuple[float, str]] = field(default_factory=list)


class Scenario:
    """Runs the steps. `say` is called with each step, `report` with the progress of a step."""

    def __init__(
        self, folder: Path, say: Callable[[str], None], report: Callable[[float], None]
    ) -> None:
        self.folder, self.say, self.report = folder, say, report
        self.stack = Stack(folder, RESTART_AFTER_SECONDS)
        self.log = ScenarioLog()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.__exit__()

    # --- steps --------------------------------------------------------------------------------

    def start_storage(self) -> None:
        """One mgmtd, one meta, three storage services; chains of three replicas."""
        self.say("3FS starts: mgmtd, meta, three storage services, chains of three replicas")
        self.stack.start_storage()

    def upload(self) -> None:
        """Real text, over 10 MB, written with the batch API, read back and compared."""
        sources = corpus.find_sources(corpus.CORPUS_BYTES_MAX)
        total = 2 * sum(len(content) for _, content in sources)
        self.say(
            f"{len(sources)} source files, {total / 2e6:.0f} MB of text, written to 3FS and read"
        )
        uploaded = 0

        def report(more: int) -> None:
            nonlocal uploaded
            uploaded += more
            self.report(uploaded / total)

        self.log.uploaded = corpus.upload(self.stack.files, "/corpus", sources, report)

    def start_driver(self) -> None:
        """The first `flyer run` becomes the driver of the cluster."""
        self.say("job gpt needs 4 nodes: it gets nodes of both zones")
        self.stack.start_driver(str(EXAMPLE))

    def preempt(self) -> None:
        """A job of high priority needs the nodes: gpt is signalled, saves and releases them."""
        observer = self._seen
        observer.wait(
            f"step {STEPS_BEFORE_PREEMPTION} of gpt",
            STEP_SECONDS,
            lambda: observer.step("gpt") >= STEPS_BEFORE_PREEMPTION,
        )
        self.say("job urgent (high) arrives and needs gpt's nodes: gpt saves and releases them")
        self.log.suspends.append((time.time(), "urgent arrives"))
        self.stack.client.run(URGENT)
        observer.wait("urgent's end", JOB_SECONDS, lambda: self._state("urgent") == "Succeeded")
        self.say("urgent has ended: gpt resumes from its checkpoint")
        before = observer.step("gpt")
        observer.wait("gpt's next steps", STEP_SECONDS, lambda: observer.step("gpt") > before + 2)

    def kill_storage(self) -> None:
        """SIGKILL to a storage service in the middle of a checkpoint."""
        name = self._wait_for_open_checkpoint()
        service = "storage-2"
        killed = self.stack.service_pid(service)
        self.stack.kill_service(service)
        self.log.storage_kills.append((time.time(), service))
        self.say(f"kill -9 {service} while {name} is being written")
        threading.Thread(target=self._await_resync, args=(service, killed), daemon=True).start()
        checkpoint_count = len(self._seen.seen.checkpoints)
        self._seen.wait(
            "a checkpoint after the storage kill",
            STEP_SECONDS,
            lambda: len(self._seen.seen.checkpoints) > checkpoint_count,
        )

    def kill_node(self) -> None:
        """SIGKILL to every process of a node, some steps after a checkpoint."""
        observer = self._seen

        def steps_since_checkpoint() -> int:
            job = observer.job("gpt")
            saved = job.checkpoint.step if job and job.checkpoint else 0
            return observer.step("gpt") - saved

        observer.wait(
            "steps after a checkpoint",
            STEP_SECONDS,
            lambda: steps_since_checkpoint() >= STEPS_AFTER_CHECKPOINT,
        )
        attempt = observer.seen.jobs["default/gpt"].attempt
        victim = next(n for n in reversed(self.stack.client.nodes()) if n.job.endswith("gpt"))
        self.say(f"node {victim.name} is killed: a spare node of zone {victim.zone} replaces it")
        self.log.node_kills.append((time.time(), victim.name))
        kill_all(victim.pids)
        observer.wait(
            "gpt's restart",
            STEP_SECONDS,
            lambda: (
                observer.seen.jobs["default/gpt"].attempt > attempt
                and self._state("gpt") == "Running"
            ),
        )

    def finish(self) -> None:
        """The end of gpt; then the same steps run again without any interruption."""
        manifest = self.folder / "reference.yaml"
        suspended = {"  nodes: 4": "  suspend: true\n  nodes: 4"}
        manifest.write_text(variant(EXAMPLE, "gpt-reference", **suspended))
        # Submitted before gpt ends, because the driver exits without unfinished jobs. Suspended
        # until all nodes are back, so that its ranks are distributed over the zones as gpt's.
        self.stack.client.run(manifest)
        self._seen.wait("gpt's end", JOB_SECONDS, lambda: self._state("gpt") == "Succeeded")
        self._seen.wait("every node's return", RESYNC_SECONDS, self._all_nodes_free)
        self.say("gpt has ended; the same steps run again without interruption")
        self.stack.client.resume("gpt-reference")
        self._seen.wait(
            "gpt-reference's end", JOB_SECONDS, lambda: self._state("gpt-reference") == "Succeeded"
        )

    # --- results ------------------------------------------------------------------------------

    def result(self, name: str) -> dict[str, object]:
        """The `result.json` that a job wrote next to its checkpoints."""
        document: dict[str, object] = json.loads(
            self.stack.files.read_file(f"/ckpt/{name}/result.json")
        )
        return document

    def steps_by_attempt(self, name: str) -> dict[int, list[tuple[int, float]]]:
        """(step, loss) as rank 0 printed them, by attempt: the steps that were executed."""
        steps: dict[int, list[tuple[int, float]]] = {}
        for line in self.stack.client.logs(name, rank=0):
            if match := re.match(r"step (\d+)/\d+ loss ([\d.]+)", line.text):
                entry = (int(match[1]), float(match[2]))
                steps.setdefault(line.attempt, []).append(entry)
        return steps

    # --- helpers ------------------------------------------------------------------------------

    @property
    def _seen(self) -> Observer:
        self.stack.check()
        return self.stack.observer

    def _state(self, name: str) -> str:
        job = self._seen.job(name)
        return job.state if job else ""

    def _all_nodes_free(self) -> bool:
        return all(node.state == "Ready" for node in self.stack.client.nodes())

    def _wait_for_open_checkpoint(self) -> str:
        """The name of a checkpoint folder that is being written right now."""
        temporary: list[str] = []

        def writing() -> bool:
            temporary[:] = [
                name for name in self.stack.files.listdir("/ckpt/gpt") if ".tmp" in name
            ]
            return bool(temporary)

        self._seen.wait("a checkpoint that is being written", STEP_SECONDS, writing)
        return temporary[0]

    def _await_resync(self, service: str, killed: int | None) -> None:
        deadline = time.monotonic() + RESYNC_SECONDS
        while time.monotonic() < deadline:
            time.sleep(0.2)
            back = self.stack.service_pid(service) not in (killed, None)
            if back and self.stack.all_chains_whole():
                self.log.storage_returns.append((time.time(), service))
                return


def variant(manifest: Path, name: str, **replaced: str) -> str:
    """The example's manifest under another name, with separate checkpoints.

    `replaced` maps strings of the manifest to their replacements. The copy is in another folder
    than its script, so its working directory is set.
    """
    text = manifest.read_text().replace("name: gpt", f"name: {name}")
    text = text.replace("/ckpt/gpt", f"/ckpt/{name}")
    for old, new in replaced.items():
        text = text.replace(old, new)
    command = "command: [python, train.py]"
    return text.replace(command, f"workingDir: {manifest.parent}\n          {command}")
