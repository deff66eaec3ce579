"""Rust modules with the same parent have no import cycles.

A module uses another one if a file of the first, or of its folder, names an item of the other. A
parent and its children may name each other. A name belongs to the file that defines it, also where
it is imported through a re-export.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING, TypeAlias

import pytest

from tests.test_tidy import tracked

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LIBRARIES = [path for path in tracked(".rs") if path.name == "lib.rs"]
LITERALS = re.compile(r'//[^\n]*|/\*.*?\*/|b?"(?:\\.|[^"\\])*"', re.DOTALL)
TESTS = re.compile(r"#\[cfg\((?:all\()?(?:test|loom)\b[^\]]*\]\s*(?:#\[[^\]]*\]\s*)*")
USE = re.compile(r"\b(?:pub(?:\([^)]*\))?\s+)?use\s+([^;]+);")
MODULE = re.compile(r"\bmod\s+(\w+)\s*;")
PATH = re.compile(r"(?<![\w:])(\w+(?:::\w+)+)")
ITEM = r"\b(?:fn|struct|enum|trait|type|const|static|union)\s+{}\b"

Module: TypeAlias = tuple[str, ...]


def without_tests(text: str) -> str:
    """The text without the items that only tests compile."""
    while match := TESTS.search(text):
        depth = 0
        end = match.end()
        for end in range(match.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth < 0 or (depth == 0 and text[end] in "};,"):
                break
        text = text[: match.start()] + text[end + 1 :]
    return text


def imports(tree: str) -> Iterator[tuple[list[str], str]]:
    """The paths of a `use` tree, each with the name that it introduces."""
    tree = tree.strip()
    if braces := re.fullmatch(r"([\w:\s]*)\{(.*)\}", tree, re.DOTALL):
        prefix = [part.strip() for part in braces[1].split("::") if part.strip()]
        depth, start = 0, 0
        inner = braces[2] + ","
        for at, letter in enumerate(inner):
            depth += {"{": 1, "}": -1}.get(letter, 0)
            if letter == "," and depth == 0:
                if inner[start:at].strip():
                    for path, name in imports(inner[start:at]):
                        yield (prefix, prefix[-1]) if name == "self" else (prefix + path, name)
                start = at + 1
        return
    path, _, alias = (part.strip() for part in re.sub(r"\s+as\s+", "|", tree).partition("|"))
    parts = [part.strip() for part in path.split("::")]
    yield parts, alias or parts[-1]


@dataclass
class Source:
    """One file: its imports by name, the glob imports, and the code without both."""

    code: str
    names: dict[str, list[str]] = field(default_factory=dict)
    globs: list[list[str]] = field(default_factory=list)

    @classmethod
    def of(cls, text: str) -> Source:
        source = cls("")

        def take(match: re.Match[str]) -> str:
            for path, name in imports(match[1]):
                if name == "*":
                    source.globs.append(path[:-1])
                else:
                    source.names[name] = path
            return ""

        source.code = USE.sub(take, text)
        return source


class Crate:
    """The modules of a crate, and which of them name items of which."""

    def __init__(self, files: dict[Module, str]) -> None:
        self.sources = {
            module: Source.of(without_tests(LITERALS.sub('""', text)))
            for module, text in files.items()
        }

    @classmethod
    def read(cls, library: Path) -> Crate:
        files: dict[Module, str] = {}

        def visit(module: Module, path: Path) -> None:
            files[module] = path.read_text()
            text = without_tests(LITERALS.sub('""', files[module]))
            folder = path.parent if path.name in ("lib.rs", "mod.rs") else path.with_suffix("")
            for name in MODULE.findall(text):
                for child in (folder / f"{name}.rs", folder / name / "mod.rs"):
                    if child.exists():
                        visit((*module, name), child)

        visit((), library)
        return cls(files)

    def home(self, module: Module, path: list[str], seen: frozenset[object]) -> Module | None:
        """The module that defines what `path` names in `module`; none outside the crate."""
        at, rest = module, list(path)
        if rest[0] == "crate":
            at, rest = (), rest[1:]
        elif rest[0] == "self":
            rest = rest[1:]
        elif rest[0] == "super":
            while rest and rest[0] == "super":
                at, rest = at[:-1], rest[1:]
        elif (*at, rest[0]) not in self.sources and rest[0] not in self.sources[at].names:
            return None
        while rest and (*at, rest[0]) in self.sources:
            at, rest = (*at, rest[0]), rest[1:]
        if not rest or (at, rest[0]) in seen:
            return at
        seen |= {(at, rest[0])}
        source = self.sources[at]
        if rest[0] in source.names:
            return self.home(at, source.names[rest[0]] + rest[1:], seen)
        if not re.search(ITEM.format(re.escape(rest[0])), source.code):
            for path_of_glob in source.globs:
                target = self.home(at, [*path_of_glob, rest[0]], seen)
                if target and re.search(ITEM.format(rest[0]), self.sources[target].code):
                    return target
        return at

    def uses(self, module: Module) -> Iterator[tuple[Module, str]]:
        """The modules whose items this one names, each with one such name."""
        source = self.sources[module]
        paths = [match.split("::") for match in PATH.findall(source.code)]
        words = set(re.findall(r"\w+", source.code))
        named = [path for name, path in source.names.items() if name in words]
        # An import that the code does not name is a re-export: its users name its home.
        globs = [path for path in source.globs if path and path[0] in ("crate", "super", "self")]
        for path in [*paths, *named, *globs]:
            target = self.home(module, path, frozenset())
            if target is not None and target != module:
                yield target, path[-1]

    def cycles(self) -> list[str]:
        """For each parent module the first cycle among its children, as arrows between files."""
        arrows: dict[Module, dict[Module, set[Module]]] = defaultdict(lambda: defaultdict(set))
        reasons: dict[tuple[Module, Module], str] = {}
        for module in self.sources:
            for target, name in self.uses(module):
                parts = enumerate(zip(module, target, strict=False))
                common = next((at for at, (ours, theirs) in parts if ours != theirs), None)
                if common is None:
                    continue  # one contains the other
                here, there = module[: common + 1], target[: common + 1]
                arrows[module[:common]][here].add(there)
                reasons[here, there] = f"{'::'.join(module)} -> {'::'.join(target)}: {name}"
        cycles = []
        for level in arrows.values():
            try:
                TopologicalSorter(level).prepare()
            except CycleError as error:
                path = error.args[1]
                pairs = zip(path[1:], path, strict=False)
                cycles.append("; ".join(reasons[pair] for pair in pairs))
        return cycles


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.parts[-3])
def test_sibling_modules_have_no_import_cycles(library: Path) -> None:
    assert not Crate.read(library).cycles()


def test_a_cycle_is_detected_through_reexports_and_folders() -> None:
    files = {
        (): "mod shape; mod draw; pub use shape::Shape;",
        ("shape",): "use crate::draw::Pen; pub struct Shape(Pen);",
        ("draw",): "mod pen; pub use pen::Pen;",
        ("draw", "pen"): "pub struct Pen;",
    }
    assert not Crate(files).cycles()
    files["draw", "pen"] = "use crate::Shape; pub struct Pen; fn draw(_: Shape) {}"
    (cycle,) = Crate(files).cycles()
    assert sorted(cycle.split("; ")) == ["draw::pen -> shape: Shape", "shape -> draw::pen: Pen"]
    files["draw", "pen"] = "pub struct Pen; #[cfg(test)] mod tests { use crate::Shape; Shape }"
    assert not Crate(files).cycles()
