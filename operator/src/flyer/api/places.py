"""Positions in a YAML file: the line and the field path."""

from __future__ import annotations

from typing import Any

from ruamel.yaml.comments import CommentedMap, CommentedSeq

__all__ = ["field_of", "line_of"]


def line_of(document: CommentedMap, path: tuple[str | int, ...]) -> int:
    """The line of the deepest part of `path` that the document has."""
    node: Any = document
    line: int = document.lc.line
    for part in path:
        if isinstance(node, CommentedMap) and part in node:
            line = node.lc.key(part)[0]
        elif isinstance(node, CommentedSeq) and isinstance(part, int) and part < len(node):
            line = node.lc.item(part)[0]
        else:
            break
        node = node[part]
    return line + 1


def field_of(path: tuple[str | int, ...]) -> str:
    """As `spec.template.containers[0].image`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text
