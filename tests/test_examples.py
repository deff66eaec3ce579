"""The examples that train in any layout: suspended without loss, and continued in another one."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from demo import corpus
from demo.stack import ROOT, Stack

# The one of moe also runs the loop, the model and the layouts of llama.
pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.torch, pytest.mark.timeout(900)]

STEPS, STEPS_BEFORE_SUSPENSION, STEPS_IN_ANOTHER_LAYOUT = 24, 6, 28
STEP_SECONDS, JOB_SECONDS = 180.0, 300.0
LAYOUTS = {
    "llama": ('--pp, "2"', '--shard, "2"'),
    "moe": ('--ep, "2", --ep-nodes, "2"', '--dp, "2"'),
}
"""Of the example on two nodes, and of the job that continues on one node."""


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    """3FS with a small corpus."""
    with Stack(tmp_path, restart_after_seconds=3.0) as stack:
        stack.start_storage()
        corpus.upload(stack.files, "/corpus", corpus.find_sources(1 << 20), lambda _: None)
        yield stack


def manifest_of(example: str, folder: Path, name: str, **replaced: str) -> str:
    """The example's manifest with a tiny model, under another name."""
    path = ROOT / "examples" / example / "flyerjob.yaml"
    text = path.read_text()
    layout = text.partition("args: [")[2].partition(", --steps")[0]
    replacements = {
        f"name: {example}\n": f"name: {name}\n",
        "nodes: 4": "nodes: 2",
        "ranksPerNode: 2": "ranksPerNode: 1",
        "command:": f"workingDir: {path.parent}\n          command:",
        layout: f"{LAYOUTS[example][0]}, --size, tiny",
        '"60"': f'"{STEPS}"',
        **replaced,
    }
    for old, new in replacements.items():
        assert old in text, old
        text = text.replace(old, new)
    manifest = folder / f"{name}.yaml"
    manifest.write_text(text)
    return str(manifest)


@pytest.mark.parametrize("example", [pytest.param("llama", marks=pytest.mark.soak), "moe"])
def test_a_suspended_example_has_the_bits_of_another_and_continues_elsewhere(
    stack: Stack, tmp_path: Path, example: str
) -> None:
    other = f"{example}-other"
    manifests = [
        manifest_of(example, tmp_path, example),
        manifest_of(example, tmp_path, "alone", **{f"/ckpt/{example}": "/ckpt/alone"}),
        manifest_of(
            example, tmp_path, other,
            **{"  nodes: 2": "  suspend: true\n  nodes: 1", "ranksPerNode: 1": "ranksPerNode: 2",
               LAYOUTS[example][0]: LAYOUTS[example][1],
               f'"{STEPS}"': f'"{STEPS_IN_ANOTHER_LAYOUT}"'},
        ),
    ]  # fmt: skip
    stack.start_driver(manifests[0])
    client, seen = stack.client, stack.observer
    for manifest in manifests[1:]:
        client.run(manifest)

    def state(name: str) -> str:
        job = seen.job(name)
        return job.state if job else ""

    seen.wait("some steps", STEP_SECONDS, lambda: seen.step(example) >= STEPS_BEFORE_SUSPENSION)
    client.suspend(example)
    seen.wait("the suspension", STEP_SECONDS, lambda: state(example) == "Suspended")
    assert seen.step(example) < STEPS
    client.resume(example)
    for name in (example, "alone"):
        seen.wait(f"the end of {name}", JOB_SECONDS, lambda n=name: state(n) == "Succeeded")
    results = [
        json.loads(stack.files.read_file(f"/ckpt/{name}/result.json"))
        for name in (example, "alone")
    ]
    assert results[0] == results[1]
    assert results[0]["steps"] == STEPS
    client.resume(other)
    seen.wait(f"the end of {other}", JOB_SECONDS, lambda: state(other) == "Succeeded")
    lines = [line.text for line in client.logs(other, rank=0)]
    assert f"resumed from step {STEPS} of /ckpt/{example}/step-{STEPS}" in lines
    result = json.loads(stack.files.read_file(f"/ckpt/{example}/result.json"))
    assert result["steps"] == STEPS_IN_ANOTHER_LAYOUT
