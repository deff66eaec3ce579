"""Length limits of a job's messages, for their receivers and for their storage. Pure."""

from __future__ import annotations

__all__ = ["PATH_CHARS_MAX", "REASON_CHARS_MAX", "TRACEBACK_CHARS_MAX", "is_text", "readable"]

# PATH_MAX of Linux.
PATH_CHARS_MAX = 4_096
REASON_CHARS_MAX = 1_024
# Fits a line of the protocols even if every character is escaped (six bytes each).
TRACEBACK_CHARS_MAX = 4_096


def is_text(value: str) -> bool:
    """Whether UTF-8 can encode it: JSON may hold lone surrogates, Python undecoded bytes."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def readable(value: str) -> str:
    """Text for display: characters that UTF-8 cannot encode become �."""
    if is_text(value):
        return value
    return "".join("\N{REPLACEMENT CHARACTER}" if "\ud800" <= c <= "\udfff" else c for c in value)
