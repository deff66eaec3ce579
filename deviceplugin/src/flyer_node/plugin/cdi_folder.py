"""CDI folders of the container runtime: writes the agent's specifications, reads NVIDIA's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from flyer_node.plugin.cdi_spec import FILES, documents, nvidia_devices

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from flyer_node.plugin.node_view import NodeView

__all__ = ["CdiFolder", "nvidia_cdi_gpus"]

SPECIFICATION_BYTES_MAX = 4 << 20
"""NVIDIA's specification of a node with 16 GPUs has about 200 KiB."""

log = structlog.get_logger()


class CdiFolder:
    """The folder that the agent writes to."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, view: NodeView) -> str:
        """Writes the specifications of `view`; returns the error, or an empty string.

        A restarted container requests its devices again, so a file is replaced atomically and
        removed only with the last device of its kind.
        """
        specifications = documents(view)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for name in FILES.values():
                if name in specifications:
                    _replace(self._folder / name, specifications[name])
                else:
                    (self._folder / name).unlink(missing_ok=True)
        except OSError as error:
            reason = f"{self._folder} cannot be written: {error.strerror or error}"
            log.warning(
                "CDI specifications not written", folder=str(self._folder), error=str(error)
            )
            return reason
        return ""


def nvidia_cdi_gpus(folders: Sequence[Path]) -> frozenset[str]:
    """UUIDs of the GPUs that the specifications of NVIDIA's toolkit list."""
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
            log.warning("ignoring unreadable CDI specification", file=str(path), error=str(error))


def _replace(path: Path, text: str) -> None:
    try:
        if path.read_text(encoding="utf-8") == text:
            return
    except (OSError, ValueError):
        pass  # missing or damaged
    # The runtime reads files that end in .json or .yaml.
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_text(text, encoding="utf-8")
    fresh.chmod(0o644)
    fresh.replace(path)
