"""Incremental reader of a list's JSON: yields its objects without holding the whole text.

The response for ten thousand objects is tens of megabytes, and its Python values ten times as
much; the cache keeps little of each object.
"""

from __future__ import annotations

import codecs
import json
import re
from typing import Any, Final

__all__ = ["ListReader"]

# Parsing an incomplete object is wasted work, so it is not tried with each packet.
GATHER_CHARS: Final = 1 << 18
_BETWEEN: Final = re.compile(r"[\s,]*")
_COLON: Final = re.compile(r"\s*:\s*")


class ListReader:
    """Reads chunks of bytes. ValueError: the text is not a list."""

    def __init__(self, gather_chars: int = GATHER_CHARS) -> None:
        self.version = ""
        """Version of the list; known at its end."""
        self._decode = codecs.getincrementaldecoder("utf-8")().decode
        self._scan = json.JSONDecoder().raw_decode
        self._gather_chars = gather_chars
        self._text = ""
        self._added: list[str] = []
        self._added_chars = 0
        self._where = "before"  # before, members, items, after

    def feed(self, chunk: bytes) -> list[dict[str, Any]]:
        """The objects that are complete now."""
        text = self._decode(chunk)
        self._added.append(text)
        self._added_chars += len(text)
        # At least as much as the unparsed rest: an object of any size is tried only a few times.
        if self._added_chars < max(self._gather_chars, len(self._text)):
            return []
        return self._read()

    def end(self) -> list[dict[str, Any]]:
        """The last objects. ValueError: the text is incomplete."""
        items = self._read()
        if self._where != "after":
            raise ValueError(f"the list ends in its {self._where}")
        return items

    def _read(self) -> list[dict[str, Any]]:
        text = self._text + "".join(self._added)
        self._added, self._added_chars = [], 0
        at = 0
        items: list[dict[str, Any]] = []
        while (start := _end_of_space(text, at)) < len(text) and self._where != "after":
            step = self._item if self._where == "items" else self._member
            try:
                at = step(text, start, items)
            except _IncompleteError:
                break
        self._text = text[at:]
        return items

    def _item(self, text: str, at: int, items: list[dict[str, Any]]) -> int:
        if text[at] == "]":
            self._where = "members"
            return at + 1
        value, end = self._value(text, at)
        items.append(value)
        return end

    def _member(self, text: str, at: int, _items: list[dict[str, Any]]) -> int:
        if self._where == "before":
            if text[at] != "{":
                raise ValueError(f"not an object: {text[at : at + 20]!r}")
            self._where = "members"
            return at + 1
        if text[at] == "}":
            self._where = "after"
            return at + 1
        if text[at] != '"':
            raise ValueError(f"not a member's name: {text[at : at + 20]!r}")
        name, end = self._value(text, at)
        colon = _COLON.match(text, end)
        if colon is None or colon.end() >= len(text):
            raise _IncompleteError
        if name == "items" and text[colon.end()] == "[":
            self._where = "items"
            return colon.end() + 1
        value, end = self._value(text, colon.end())
        if name == "metadata":
            self.version = value.get("resourceVersion", "")
        return end

    def _value(self, text: str, at: int) -> tuple[Any, int]:
        """One value and its end. A value at the end of the text may be incomplete."""
        try:
            value, end = self._scan(text, at)
        except ValueError:
            raise _IncompleteError from None
        if end >= len(text):
            raise _IncompleteError
        return value, end


class _IncompleteError(Exception):
    """The rest has not arrived yet."""


def _end_of_space(text: str, at: int) -> int:
    match = _BETWEEN.match(text, at)
    assert match is not None, "matches everything"
    return match.end()
