"""The documentation's cluster commands, run block by block.

Words in capitals are placeholders: a running job, its node, a claim.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from e2e.lib.jobs import diagnosis, job, pods_of, wait_phase
from e2e.lib.pods import TRAIN_IMAGE
from e2e.workloads import counting
from programs import binaries
from tests.doc_blocks import ROOT, Block, blocks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from e2e.lib import chart
    from testcluster.handle import Cluster

# The first test of a session starts the cluster, loads images and installs the chart.
pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(1800)]

NAMESPACE = "default"  # defaults of a reader without settings
TEAM = "research"  # the guides' example of a team's namespace
ENDLESS = "1000000"
SECONDS = 400.0  # above the time-outs of `kubectl wait` in the pages
TUTORIAL = ROOT / "docs/tutorial/kubernetes.md"
PAGES = sorted({block.page for block in blocks("cluster")})
OWN = re.compile(r"\b(JOB|NODE|NAMESPACE|CLAIM)\b")


class Reader:
    """A reader with a folder, a shell and a cluster."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        programs = folder / "bin"
        programs.mkdir()
        (programs / "kubectl").symlink_to(binaries.find("kubectl"))
        flyer = programs / "flyer"
        flyer.write_text(f'#!/bin/sh\nexec {sys.executable} -m flyer.cli "$@"\n')
        flyer.chmod(0o755)
        shutil.copy(cluster.kubeconfig, folder / "kubeconfig")
        self._environment = {
            **{name: value for name, value in os.environ.items() if name != "FLYER_STATE"},
            "PATH": f"{programs}:{os.environ['PATH']}",
            "KUBECONFIG": str(folder / "kubeconfig"),
        }

    def provides_the_examples(self) -> None:
        """The repository's examples, with the image that the nodes have; no job `count`."""
        self.cluster.kubectl(
            "delete", "flyerjob", "count", f"--namespace={NAMESPACE}", "--ignore-not-found"
        )
        shutil.copytree(ROOT / "examples", self.folder / "examples")
        path = self.folder / "examples/count/flyerjob.yaml"
        path.write_text(re.sub(r"image: \S+", f"image: {TRAIN_IMAGE}", path.read_text()))

    def types(self, block: Block, names: dict[str, str]) -> None:
        """Runs a block; raises AssertionError with its output if a command fails."""
        text = OWN.sub(lambda match: names[match[1]], block.text)
        # Commands that watch are ended after a moment.
        text = re.sub(r"^(.* -w)$", r"timeout 5 \1 || test $? = 124", text, flags=re.MULTILINE)
        self.runs(text, block.where)

    def runs(self, text: str, where: str) -> str:
        """The output of these commands; an AssertionError has it if one fails."""
        result = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=self.folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        if result.returncode != 0:
            state = diagnosis(self.cluster, NAMESPACE)
            raise AssertionError(f"{where}\n{text}\n{result.stdout}\n{state}")
        return result.stdout


@pytest.fixture(scope="module")
def reader(
    release: chart.Release, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Reader, dict[str, str]]]:
    """A reader with the tutorial's files, a running job and a claim."""
    cluster = release.cluster
    new_reader = Reader(cluster, tmp_path_factory.mktemp("reader"))
    texts = {block.how: block for block in blocks("file", "manifest") if block.page == TUTORIAL}
    (new_reader.folder / "count.py").write_text(texts["file"].text)
    manifest = re.sub(r"image: \S+", f"image: {TRAIN_IMAGE}", texts["manifest"].text)
    (new_reader.folder / "count.yaml").write_text(manifest)
    dataset = next(
        block
        for block in blocks("manifest")
        if "kind: PersistentVolumeClaim" in block.text and "name: dataset" in block.text
    )
    cluster.kubectl("apply", f"--namespace={NAMESPACE}", "--filename=-", stdin=dataset.text)
    cluster.kubectl("create", "namespace", TEAM)
    cluster.apply(job("own", 1, Path(counting.__file__).read_text(), ENDLESS), namespace=NAMESPACE)
    wait_phase(cluster, "own", NAMESPACE, "Running")
    (pod,) = pods_of(cluster, "own", NAMESPACE)
    names = {"JOB": "own", "NODE": pod["spec"]["nodeName"], "NAMESPACE": NAMESPACE}
    yield new_reader, {**names, "CLAIM": "dataset"}
    for kind in ("flyerjobs", "pvc"):
        cluster.kubectl("delete", kind, "--all", f"--namespace={NAMESPACE}", "--wait=false")
    cluster.kubectl("delete", "namespace", TEAM, "--wait=false")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT / "docs")))
def test_the_commands_of_a_page_succeed(page: Path, reader: tuple[Reader, dict[str, str]]) -> None:
    person, names = reader
    for block in blocks("cluster"):
        if block.page == page:
            person.types(block, names)


def test_the_commands_that_delete_everything(reader: tuple[Reader, dict[str, str]]) -> None:
    """After the pages, whose jobs no longer exist then."""
    person, names = reader
    for block in blocks("end"):
        person.types(block, names)
    assert not person.cluster.get("flyerjobs", namespace=NAMESPACE)


def test_a_session_prints_what_the_page_shows(reader: tuple[Reader, dict[str, str]]) -> None:
    """Commands after `$ ` and their output; words that contain digits may differ.

    Last, because its job needs all dedicated nodes.
    """
    person, _ = reader
    person.provides_the_examples()
    for block in blocks("session"):
        for step in block.text.split("\n$ ", maxsplit=-1):
            command, _, expected = step.removeprefix("$ ").partition("\n")
            if command.startswith("helm "):  # the release of the fixture
                continue
            printed = person.runs(command, block.where)
            assert fixed_words(printed) == fixed_words(expected), f"{block.where}\n{printed}"


def fixed_words(text: str) -> list[list[str]]:
    """The words of each line; numbers, ages and names of nodes become `#`."""
    lines = (line.split() for line in text.strip().splitlines())
    return [[re.sub(r"\S*\d\S*", "#", word) for word in line] for line in lines]
