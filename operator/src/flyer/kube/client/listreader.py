"""A list's JSON as it arrives: its objects one after the other, never the whole text at once.

The answer for ten thousand objects is tens of megabytes, and Python's values for it ten times as
much; what is kept of an object is little.
"""

from __future__ import annotations

import codecs
import json
import re
from typing import Any, Final

__all__ = ["ListReader"]

# An object that is not whole yet is read in vain: so not with each packet.
GATHER_CHARS: Final = 1 << 18
_BETWEEN: Final = re.compile(r"[\s,]*")
_COLON: Final = re.compile(r"\s*:\s*")


class ListReader:
    """Feed it bytes. ValueError: this is not a list."""

    def __init__(self, gather_chars: int = GATHER_CHARS) -> None:
        self.version = ""
        """Of the list; known at its end."""
        self._decode = codecs.getincrementaldecoder("utf-8")().decode
        self._scan = json.JSONDecoder().raw_decode
        self._gather_chars = gather_chars
        self._text = ""
        self._added: list[str] = []
        self._added_chars = 0
        self._where = "before"  # before, members, items, after

    def feed(self, chunk: bytes) -> list[dict[str, Any]]:
        """The objects that are whole now."""
        text = self._decode(chunk)
        self._added.append(text)
        self._added_chars += len(text)
        # As much as is left: an object of any size is tried a few times.
        if self._added_chars < max(self._gather_chars, len(self._text)):
            return []
        return self._read()

    def end(self) -> list[dict[str, Any]]:
        """The last objects. ValueError: the text was torn."""
        items = self._read()
        if self._where != "after":
            raise ValueError(f"the list ends amid its {self._where}")
        return items

    def _read(self) -> list[dict[str, Any]]:
        text = self._text + "".join(self._added)
        self._added, self._added_chars = [], 0
        at = 0
        items: list[dict[str, Any]] = []
        while (begin := _end_of_space(text, at)) < len(text) and self._where != "after":
            step = self._item if self._where == "items" else self._member
            try:
                at = step(text, begin, items)
            except _NotWholeError:
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
            raise _NotWholeError
        if name == "items" and text[colon.end()] == "[":
            self._where = "items"
            return colon.end() + 1
        value, end = self._value(text, colon.end())
        if name == "metadata":
            self.version = value.get("resourceVersion", "")
        return end

    def _value(self, text: str, at: int) -> tuple[Any, int]:
        """One value, and where it ends. What ends the text may go on: a number, or a torn value."""
        try:
            value, end = self._scan(text, at)
        except ValueError:
            raise _NotWholeError from None
        if end >= len(text):
            raise _NotWholeError
        return value, end


class _NotWholeError(Exception):
    """The rest has not come yet."""


def _end_of_space(text: str, at: int) -> int:
    found = _BETWEEN.match(text, at)
    assert found is not None, "matches everything"
    return found.end()
