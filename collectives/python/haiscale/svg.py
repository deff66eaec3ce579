"""Elements of SVG. Text from outside is escaped, and characters that XML forbids are replaced."""

from __future__ import annotations

import re
from html import escape
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["document", "rect", "text"]

_FORBIDDEN: Final = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def document(
    width: float, height: float, parts: Sequence[str], dark: Mapping[str, str] | None = None
) -> str:
    """A document with a white background.

    `dark` has the colour of a dark theme for each colour of the document, the background's too.
    """
    rules = [f'[fill="{colour}"] {{fill: {other}}}' for colour, other in (dark or {}).items()]
    style = f"<style>@media (prefers-color-scheme: dark) {{{' '.join(rules)}}}</style>"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
            f'viewBox="0 0 {width:g} {height:g}" font-size="12" '
            'font-family="system-ui, sans-serif">',
            *([style] if rules else []),
            f'<rect width="{width:g}" height="{height:g}" fill="#ffffff"/>',
            *parts,
            "</svg>\n",
        ]
    )


def rect(x: float, y: float, width: float, height: float, fill: str, title: str = "") -> str:
    """A rectangle, with a text that a browser shows under the pointer."""
    shape = f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}"'
    return f"{shape}><title>{_safe(title)}</title></rect>" if title else f"{shape}/>"


def text(x: float, y: float, words: str, extra: str = 'fill="#333"') -> str:
    """A line of text."""
    return f'<text x="{x:.1f}" y="{y:.1f}" {extra}>{_safe(words)}</text>'


def _safe(words: str) -> str:
    return escape(_FORBIDDEN.sub("\ufffd", words))
