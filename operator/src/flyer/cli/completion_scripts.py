"""The static completion scripts of the shells: completion starts no Python."""

from __future__ import annotations

from pathlib import Path

from flyer.errors import FlyerError

__all__ = ["FOLDER", "NAMES", "script"]

FOLDER = Path(__file__).parent / "completions"
NAMES = {"bash": "flyer.bash", "zsh": "_flyer", "fish": "flyer.fish"}


def script(shell: str) -> str:
    """The script of one shell."""
    if shell not in NAMES:
        raise FlyerError.usage(f"unknown shell `{shell}`", "use bash, zsh or fish")
    return (FOLDER / NAMES[shell]).read_text()
