"""Examples in the pages are valid: manifests are accepted, values render, names exist."""

import ast
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flyer.api.flyerquota import FlyerQuotaSpec
from flyer.api.flyertopology import FlyerTopologySpec
from flyer.api.manifest import load_manifest
from flyer.cli.verbs import VERBS
from flyer.client import Client
from flyer.local.cluster import load_cluster
from ruamel.yaml import YAML

from charts import helm
from charts.tests.conftest import BUILD_SECONDS, CHART, KUBERNETES, REGISTRY
from testcluster.handle import Cluster, wait_for
from tests.doc_blocks import PAGES, ROOT, Block, blocks

HOWS = {
    "file", "render", "manifest", "run", "compile", "names", "json", "local", "make", "options",
    "diff", "dry", "cluster", "end", "elsewhere", "session", "skip",
}  # fmt: skip
PROGRAMS_TYPED = re.compile(
    r"^(\$ )?(\.venv/bin/|sudo |make|helm|kubectl|flyer|threefs|hfreduce|python|cargo|pip|docker)\b"
)
FLAGS_OF_INSTALL = {"--wait": 0, "--create-namespace": 0, "--timeout": 1, "--kube-version": 1}
"""Flags that rendering does without, with the number of words after them."""


def named(*hows: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("block", blocks(*hows), ids=lambda block: block.where)


def commands(block: Block) -> Iterator[list[str]]:
    for line in block.text.replace("\\\n", " ").splitlines():
        if line.strip() and not line.startswith("#"):
            yield shlex.split(line)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reader's folder: the repository's chart, and every file that a page shows."""
    root = tmp_path_factory.mktemp("reader")
    (root / "charts").symlink_to(ROOT / "charts")
    for block in blocks("file"):
        target = root / block.detail
        assert not target.exists(), f"{block.where}: {block.detail} is shown twice"
        target.write_text(block.text)
    return root


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_names_its_check(page: Path) -> None:
    page_blocks = [block for block in blocks() if block.page == page]
    unmarked = [block.where for block in page_blocks if block.how not in HOWS and not block.picture]
    assert not unmarked, "write `<!-- test: HOW -->` above it; tests/doc_blocks.py lists them"


@named("skip")
def test_a_skipped_block_has_a_reason(block: Block) -> None:
    assert len(block.detail.split()) >= 2


def test_blocks_without_a_check_contain_no_commands() -> None:
    for block in blocks():
        if not block.how:
            typed = [line for line in block.text.splitlines() if PROGRAMS_TYPED.match(line)]
            assert not typed, f"{block.where}: say that it is sh, and how it is checked"


@named("elsewhere")
def test_a_block_tested_elsewhere_is_in_that_test(block: Block) -> None:
    """The test reads the page, or has each command's program and verb."""
    tests = [ROOT / path for path in block.detail.split()]
    text = "\n".join(path.read_text() for path in tests)
    # What runs the README is named after it.
    if block.page.name in text or tests[0].stem == f"test_{block.page.stem.lower()}":
        return
    for command in commands(block):
        words = [item for item in command[:2] if re.fullmatch(r"[a-z-]+", item)]
        assert words, command
        for word in words:
            assert re.search(rf"\b{re.escape(word)}\b", text), f"{word} in {block.detail}"


@named("json")
def test_json_blocks_are_valid(block: Block) -> None:
    assert json.loads(block.text)


@named("local")
def test_cluster_files_are_valid(block: Block, tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(block.text)
    assert load_cluster(tmp_path / "cluster.yaml").engine_nodes()


@named("make")
def test_make_targets_exist(block: Block) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for command in commands(block):
        assert command[0] == "make"
        assert re.search(rf"^{command[1]}:", makefile, re.MULTILINE), command[1]


@named("options")
def test_options_are_those_of_the_program(block: Block) -> None:
    module = block.detail.replace(".", "/") + ".py"
    source = (ROOT / module).read_text()
    for command in commands(block):
        assert command[:3] == ["python", "-m", block.detail]
        for word in command[3:]:
            if word.startswith("-"):
                assert f'"{word}"' in source, word


@named("names")
def test_imported_and_called_names_exist(block: Block) -> None:
    tree = ast.parse(block.text)
    imports = [
        statement for statement in tree.body if isinstance(statement, ast.Import | ast.ImportFrom)
    ]
    names: dict[str, Any] = {}
    exec(compile(ast.Module(imports, []), block.where, "exec"), names)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            assert callable(eval(ast.unparse(node.func), {**names, "client": Client}))


@named("compile", "file", "names")
def test_python_compiles(block: Block) -> None:
    if block.language == "python":
        compile(block.text, block.where, "exec")


@named("render")
@pytest.mark.timeout(BUILD_SECONDS)
def test_helm_commands_render(block: Block, folder: Path) -> None:
    for command in commands(block):
        assert command[:2] in (["helm", "install"], ["helm", "upgrade"], ["helm", "template"])
        words, remaining = [], command[2:]
        while remaining:
            word = remaining.pop(0)
            if word in FLAGS_OF_INSTALL:
                del remaining[: FLAGS_OF_INSTALL[word]]
            else:
                words.append(word)
        result = subprocess.run(
            [helm.find(), "template", *words, "--kube-version", KUBERNETES],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        assert "kind: Deployment" in result.stdout


PROGRAMS = {"hfreduce-perf": "hfreduce.perf", "hfreduce-doctor": "hfreduce.doctor"}


@named("run")
def test_commands_succeed(block: Block, tmp_path: Path) -> None:
    for command in commands(block):
        words = command[: command.index("#")] if "#" in command else command
        result = subprocess.run(
            [sys.executable, "-m", PROGRAMS[words[0]], *words[1:]],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        allowed = block.detail.split() or ["0"]
        assert str(result.returncode) in allowed, result.stderr


@named("dry")
@pytest.mark.slow
def test_a_real_server_accepts_the_commands(block: Block, definitions: Cluster) -> None:
    name = "reader-s-own"
    definitions.apply({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}})
    try:
        before = definitions.get("node", name)
        for program, *words in commands(block):
            assert program == "kubectl"
            named = [name if word == "NODE" else word for word in words]
            assert name in definitions.kubectl(*named, "--dry-run=server")
        after = definitions.get("node", name)
        assert after["metadata"].get("labels") == before["metadata"].get("labels")
    finally:
        definitions.kubectl("delete", "node", name)


def objects(block: Block) -> list[dict[str, Any]]:
    return [item for item in YAML(typ="safe").load_all(block.text) if item]


@named("manifest")
def test_models_accept_the_manifests(block: Block, tmp_path: Path) -> None:
    for item in objects(block):
        if item["kind"] == "FlyerJob":
            file = tmp_path / "job.yaml"
            file.write_text(json.dumps(item))
            load_manifest(file)
        elif item["kind"] in {"FlyerQuota", "FlyerTopology"}:
            model = FlyerQuotaSpec if item["kind"] == "FlyerQuota" else FlyerTopologySpec
            model.model_validate_json(json.dumps(item["spec"]))


@pytest.fixture(scope="module")
def definitions(control_plane: Cluster) -> Cluster:
    for path in sorted((ROOT / "crds").glob("*.yaml")):
        control_plane.kubectl("apply", "--server-side", "-f", str(path))
    control_plane.kubectl("wait", "crd", "--all", "--for=condition=Established")
    wait_for("the default account", lambda: control_plane.get("serviceaccounts"))
    # Pages name singletons: what other tests left of them is in the way of a dry run.
    control_plane.kubectl("delete", "flyertopologies,flyerquotas", "--all")
    return control_plane


@named("manifest")
@pytest.mark.slow
def test_a_real_server_accepts_the_manifests(block: Block, definitions: Cluster) -> None:
    for item in objects(block):
        output = definitions.kubectl(
            "create", "--dry-run=server", "--validate=strict", "-f", "-", stdin=json.dumps(item)
        )
        assert "created" in output


@named("cluster", "end", "elsewhere", "skip")
@pytest.mark.timeout(BUILD_SECONDS)
def test_names_in_commands_are_those_of_the_chart(block: Block) -> None:
    if block.language != "sh":
        return
    rendered = _everything()
    components = set(re.findall(r"app\.kubernetes\.io/component: (\S+)", rendered))
    for component in re.findall(r"app\.kubernetes\.io/component=([\w-]+)", block.text):
        assert component in components
    names = set(re.findall(r"^  name: (\S+)$", rendered, re.MULTILINE))
    for pod in re.findall(r"\b(threefs-\w+)-0\b", block.text):
        assert pod in names
    for name in re.findall(r"kubernetes\.io/service-name=([\w-]+)", block.text):
        assert name in names
    for container in re.findall(r"-c ([a-z-]+)(?=\s)", block.text):
        # The last two are in pods of jobs.
        assert f"- name: {container}\n" in rendered or container in {"trainer", "flyer-sidecar"}


def _everything() -> str:
    result = subprocess.run(
        [
            *(helm.find(), "template", "x", str(CHART), "--kube-version", KUBERNETES),
            *("--set", f"images.registry={REGISTRY},images.allowTags=true"),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return result.stdout


@named("cluster", "end", "elsewhere", "skip")
def test_verbs_of_flyer_exist(block: Block) -> None:
    if block.language != "sh":
        return
    verbs = {command[1] for command in commands(block) if command[0] == "flyer"}
    assert verbs <= {verb.name for verb in VERBS}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_job_of_the_tutorial_runs_on_one_machine(folder: Path, tmp_path: Path) -> None:
    """Runs the script and manifest with `flyer run`, faster and without the pod's volume."""
    [manifest_block] = [block for block in blocks("manifest") if "name: count" in block.text]
    [script] = [block for block in blocks("file") if block.detail == "count.py"]
    count = tmp_path / "count.py"
    count.write_text(script.text.replace("time.sleep(0.5)", "time.sleep(0.01)"))
    [job] = objects(manifest_block)
    job["spec"]["template"]["spec"].pop("volumes")
    [container] = job["spec"]["template"]["spec"]["containers"]
    container.pop("volumeMounts")
    container["command"] = [sys.executable, str(count)]
    manifest = tmp_path / "job.yaml"
    manifest.write_text(json.dumps(job))
    result = subprocess.run(
        [
            sys.executable, "-m", "flyer.cli", "run", str(manifest),
            "--cluster", str(ROOT / "examples" / "clusters" / "two-zones.yaml"),
            "--state", str(tmp_path / "state"),
        ],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-2000:]
    assert "step 120/120" in result.stdout
