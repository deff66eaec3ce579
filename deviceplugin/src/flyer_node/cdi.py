"""The container runtime's CDI folders: writes the agent's specifications, reads NVIDIA's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from flyer_node.plugin.cdi import FILES, documents, nvidia_devices

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from flyer_node.plugin.resources import NodeView

__all__ = ["CdiFolder", "nvidia_specifications"]

SPECIFICATION_BYTES_MAX = 4 << 20
"""NVIDIA's specification of a node with 16 GPUs has about 200 KiB."""

log = structlog.get_logger()


class CdiFolder:
    """The folder that the agent writes to."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, view: NodeView) -> str:
        """Makes the files those of `view`; why a grant cannot name them, or nothing.

        A container that restarts asks for its devices again, so a file is replaced in one step and
        removed only with the last device of its kind.
        """
        wanted = documents(view)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for name in FILES.values():
                if name in wanted:
                    _replace(self._folder / name, wanted[name])
                else:
                    (self._folder / name).unlink(missing_ok=True)
        except OSError as error:
            reason = f"{self._folder} cannot be written: {error.strerror or error}"
            log.warning("no CDI specifications", folder=str(self._folder), error=str(error))
            return reason
        return ""


def nvidia_specifications(folders: Sequence[Path]) -> frozenset[str]:
    """UUIDs of the GPUs that a specification of NVIDIA's toolkit names."""
    return nvidia_devices(text for folder in folders for text in _texts(folder))


def _texts(folder: Path) -> Iterator[str]:
    try:
        paths = sorted(folder.iterdir())
    except OSError:
        return
    for path in paths:
        if path.suffix not in {".json", ".yaml"} or path.name in FILES.values():
            continue
        try:
            if path.stat().st_size <= SPECIFICATION_BYTES_MAX:
                yield path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            log.warning("CDI specification ignored", file=str(path), error=str(error))


def _replace(path: Path, text: str) -> None:
    try:
        if path.read_text(encoding="utf-8") == text:
            return
    except (OSError, ValueError):
        pass  # not there yet, or damaged
    # The runtime reads files that end in .json or .yaml.
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_text(text, encoding="utf-8")
    fresh.chmod(0o644)
    fresh.replace(path)
