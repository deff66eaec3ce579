"""The repository keeps its promises: links lead somewhere, pictures parse, files stay readable."""

import re
import subprocess
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

ROOT = Path(__file__).resolve().parents[1]
TRACKED = [
    ROOT / name
    for name in subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\0")
    if name and (ROOT / name).is_file()
]


def tracked(*suffixes: str) -> list[Path]:
    return [path for path in TRACKED if path.suffix in suffixes]


@pytest.mark.parametrize("page", tracked(".md"), ids=lambda path: str(path.relative_to(ROOT)))
def test_links_between_pages_have_existing_targets(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    local = [target for target in targets if not re.match(r"[a-z]+:", target)]
    missing = [target for target in local if not (page.parent / target).exists()]
    assert not missing


@pytest.mark.parametrize("picture", tracked(".svg"), ids=lambda path: path.name)
def test_pictures_are_well_formed(picture: Path) -> None:
    assert ET.parse(picture).getroot().tag.endswith("svg")


def test_files_have_one_subject() -> None:
    """A file of more than 500 lines has several subjects: split it, do not raise this limit."""
    long = {
        str(path.relative_to(ROOT)): lines
        for path in tracked(".py", ".rs")
        if (lines := path.read_text().count("\n")) > 500 and "_pb2" not in path.name
    }
    assert not long


def test_every_member_of_the_python_workspace_has_a_description() -> None:
    root = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for member in root["tool"]["uv"]["workspace"]["members"]:
        project = tomllib.loads((ROOT / member / "pyproject.toml").read_text())["project"]
        assert project["description"]
        assert project["license"] == "Apache-2.0"


def test_parts_of_the_collective_driver_import_in_one_direction() -> None:
    """A part knows neither the driver nor the parts above it (the head of `driver/mod.rs`)."""
    folder = ROOT / "collectives/crates/hfreduce-engine/src/driver"
    whole = {"mod", "waiting", "failure", "diagnosis"}
    imports: dict[str, set[str]] = {}
    for path in folder.rglob("*.rs"):
        inner = path.relative_to(folder).parts[0] != path.name
        part = path.relative_to(folder).parts[0].removesuffix(".rs")
        prefix = r"crate::driver" if inner else r"(?:super|crate::driver)"
        used = re.findall(rf"^(?:pub )?use {prefix}::(\w+|\{{)", path.read_text(), re.MULTILINE)
        if part not in whole:
            imports.setdefault(part, set()).update(used)
    known = set(imports)
    assert {"local", "channel", "p2p", "tree_links"} <= known
    assert {name: used - known for name, used in imports.items() if used - known} == {}
    TopologicalSorter({name: used - {name} for name, used in imports.items()}).prepare()
