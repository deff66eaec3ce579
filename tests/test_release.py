"""Preconditions of a release and of the public forge's workflows."""

import re
import shutil
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from scripts.release import ReleaseError, images, release_version, rust_components
from tests.stages import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
MANIFESTS = [
    "Cargo.toml", "CHANGELOG.md", "pyproject.toml", "operator/pyproject.toml",
    "deviceplugin/pyproject.toml", "collectives/python/pyproject.toml",
    "csi-3fs/python/pyproject.toml", "charts/fire-flyer/Chart.yaml",
]  # fmt: skip


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in MANIFESTS:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_all_parts_have_one_version(tree: Path) -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", release_version(tree))


def test_a_part_with_another_version_is_named(tree: Path) -> None:
    manifest = tree / "operator" / "pyproject.toml"
    manifest.write_text(
        re.sub(r'^version = ".*"', 'version = "9.9.9"', manifest.read_text(), flags=re.MULTILINE)
    )
    with pytest.raises(ReleaseError, match=r"operator/pyproject.toml has 9\.9\.9"):
        release_version(tree)


def test_a_version_without_a_changelog_is_refused(tree: Path) -> None:
    (tree / "CHANGELOG.md").write_text("# Changelog\n\n## 0.0.1\n")
    with pytest.raises(ReleaseError, match=r"CHANGELOG\.md has no section"):
        release_version(tree)


def test_the_bill_of_materials_lists_third_party_packages() -> None:
    packages = [
        {"id": "a", "name": "half", "version": "2.7.1", "license": "MIT OR Apache-2.0"},
        {"id": "b", "name": "fabric", "version": "0.1.0", "license": "Apache-2.0"},
    ]
    (component,) = rust_components({"packages": packages, "workspace_members": ["b"]})
    assert component["purl"] == "pkg:cargo/half@2.7.1"
    assert component["licenses"] == [{"expression": "MIT OR Apache-2.0"}]


def test_the_published_images_are_those_of_the_chart() -> None:
    values = YAML(typ="safe").load(ROOT / "charts" / "fire-flyer" / "values.yaml")
    names = {name.rpartition("/")[2].partition(":")[0] for name in images("1.2.3")}
    assert names == {"controller", "collectives", "node-agent", "storage"}
    assert len(names & {re.sub("([A-Z])", r"-\1", key).lower() for key in values["images"]}) == 4


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_run_targets_of_the_makefile(workflow: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    jobs = YAML(typ="safe").load(workflow)["jobs"]
    targets: set[str] = set()
    for job in jobs.values():
        matrix = job.get("strategy", {}).get("matrix", {})
        for step in job.get("steps", ()):
            for words in re.findall(r"\bmake ([a-z][a-z -]*)", step.get("run", "")):
                targets.update(words.split())
        for row in (*matrix.get("stage", ()), *matrix.get("target", ())):
            targets.update(row.split())
        assert "timeout-minutes" in job or "needs" in job
    missing = [name for name in targets if not re.search(rf"^{name}\b.*:", makefile, re.MULTILINE)]
    assert not missing


def test_the_github_workflow_runs_every_stage() -> None:
    ci = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    local = (ROOT / ".ci" / "run").read_text()
    for target in ("check-static", "site", "release-check"):
        assert target in ci
        assert target in local
    assert "test-kubernetes" in ci
