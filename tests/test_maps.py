"""Maps name only what exists: paths in pages, modules in the tables of `lib.rs`."""

import re
from pathlib import Path

import pytest

from tests.test_tidy import ROOT, tracked

TOPS = sorted(path.name for path in ROOT.iterdir() if path.is_dir())
PATH = re.compile(rf"`((?:{'|'.join(map(re.escape, TOPS))})/[^`\s]*)`")
BUILT = ("build/", "target/", ".venv/")
"""Made by commands."""
PAGES = [
    path
    for path in tracked(".md")
    if "decisions" not in path.parts
    and path.name not in ("CHANGELOG.md", "pull_request_template.md")
]
"""Decisions and the changelog describe their day."""
LIBRARIES = [path for path in tracked(".rs") if path.name == "lib.rs"]
ROW = re.compile(r"^//! (?:\| |- )((?:\[?`[a-z_:]+`\]?(?:, )?)+)(?: \||:)", re.MULTILINE)
STEP = re.compile(r"^\| \d+ \| `([^`]+)` \| (.+) \|$", re.MULTILINE)


def expanded(text: str) -> list[str]:
    """`a/{b,c}.py` as `a/b.py` and `a/c.py`."""
    if not (braces := re.search(r"\{([^{}]*)\}", text)):
        return [text]
    before, after = text[: braces.start()], text[braces.end() :]
    return [path for part in braces[1].split(",") for path in expanded(before + part + after)]


def exists(path: str) -> bool:
    """Whether such a path exists, from the root or, for tests, from its part; `*` matches."""
    plain = path.partition("::")[0].partition("#")[0].rstrip("/")
    if re.search(r"[A-Z]{2,}|…|<", Path(plain).name):  # placeholder for a name
        plain = str(Path(plain).parent)
    parts = ("", "*/", "*/*/", "*/*/*/") if plain.startswith("tests/") else ("",)
    return any(path for part in parts for path in ROOT.glob(part + plain))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_paths_in_a_page_exist(page: Path) -> None:
    named = PATH.findall(page.read_text())
    paths = [path for text in named if not text.startswith(BUILT) for path in expanded(text)]
    assert not [path for path in paths if not exists(path)]


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.parts[-3])
def test_modules_in_a_crates_map_exist(library: Path) -> None:
    text = library.read_text()
    listed = {
        name.partition("::")[0]
        for row in ROW.findall(text)
        for name in re.findall(r"[a-z_:]+", row)
    }
    declared = set(re.findall(r"^\s*(?:pub(?:\([a-z]+\))? )?mod ([a-z_0-9]+)", text, re.MULTILINE))
    reexports = set(re.findall(r"^pub use ([a-z_0-9]+)", text, re.MULTILINE))
    assert listed <= declared | reexports, f"not modules: {sorted(listed - declared - reexports)}"


@pytest.mark.parametrize("name", ["write-path", "allreduce-path"])
def test_functions_on_a_path_through_the_code_exist(name: str) -> None:
    steps = STEP.findall((ROOT / f"docs/internals/{name}.md").read_text())
    assert len(steps) > 20
    missing = [
        f"{path}: {name}"
        for path, text in steps
        for name in re.findall(r"`(?:\w+(?:::|\.))?(\w+)(?<!\.rs)`", text)
        if not re.search(rf"\b(?:fn|def) {name}\b", (ROOT / path).read_text())
    ]
    assert not missing


def test_the_maps_are_not_empty() -> None:
    rows = [row for library in LIBRARIES for row in ROW.findall(library.read_text())]
    assert len(rows) > 100


def test_a_missing_path_is_detected() -> None:
    assert expanded("a/{b,c}/d.py") == ["a/b/d.py", "a/c/d.py"]
    assert exists("tests/test_maps.py")
    assert not exists("tests/{gone}.py")
