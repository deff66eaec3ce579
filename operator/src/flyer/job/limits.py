"""Length limits of a job's messages, for their receivers and for their storage. Pure."""

from __future__ import annotations

__all__ = ["PATH_CHARS_MAX", "REASON_CHARS_MAX", "TRACEBACK_CHARS_MAX", "is_text", "readable"]

# Linux takes no longer path.
PATH_CHARS_MAX = 4_096
REASON_CHARS_MAX = 1_024
# Escaped six-fold it still fits a line of the protocols.
TRACEBACK_CHARS_MAX = 4_096


def is_text(value: str) -> bool:
    """Whether UTF-8 can say it: JSON may hold half a surrogate pair, Python undecoded bytes."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def readable(value: str) -> str:
    """For people: what is no character is shown as �."""
    if is_text(value):
        return value
    return "".join("\N{REPLACEMENT CHARACTER}" if "\ud800" <= c <= "\udfff" else c for c in value)
