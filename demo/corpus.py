"""Corpus: writes the source files of this machine's Python standard library to 3FS.

`python -m demo.corpus` does that for the cluster that THREEFS_CLUSTER names.
"""

from __future__ import annotations

import json
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import threefs

CORPUS_BYTES_MAX = 32 << 20
BATCH_BYTES = 4 << 20
"""Bytes of one batch call: enough to keep every chain busy, small enough to show progress."""


@dataclass(frozen=True)
class Uploaded:
    """Result of an upload, and whether the data read back is identical."""

    files: int
    bytes: int
    identical: bool


NOTHING = Uploaded(files=0, bytes=0, identical=False)


def find_sources(limit_bytes: int) -> list[tuple[str, bytes]]:
    """The standard library's `.py` files as (relative path, content), in a fixed order."""
    root = Path(sysconfig.get_path("stdlib"))
    sources: list[tuple[str, bytes]] = []
    total = 0
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if "site-packages" in relative.parts or "dist-packages" in relative.parts:
            continue
        content = path.read_bytes()
        if content and total < limit_bytes:
            sources.append((str(relative), content))
            total += len(content)
    return sources


def upload(
    files: threefs.Client,
    folder: str,
    sources: list[tuple[str, bytes]],
    report: Callable[[int], None],
) -> Uploaded:
    """Writes the sources and their index with the batch API, reads them back and compares.

    `report` gets the finished bytes, first while writing and then while reading.
    """
    for parent in sorted({str((Path(folder) / name).parent) for name, _ in sources}):
        files.mkdir(parent, parents=True)
    for batch in _batches(sources):
        files.batch_write([(f"{folder}/{name}", 0, content) for name, content in batch])
        report(sum(len(content) for _, content in batch))
    identical = True
    for batch in _batches(sources):
        contents = files.batch_read(
            [(f"{folder}/{name}", 0, len(content)) for name, content in batch]
        )
        identical &= all(
            bytes(content_read) == content
            for content_read, (_, content) in zip(contents, batch, strict=True)
        )
        report(sum(len(content) for _, content in batch))
    index = [(name, len(content)) for name, content in sources]
    files.write_file(f"{folder}/index.json", json.dumps(index).encode())
    return Uploaded(len(sources), sum(length for _, length in index), identical)


def _batches(sources: list[tuple[str, bytes]]) -> Iterator[list[tuple[str, bytes]]]:
    batch: list[tuple[str, bytes]] = []
    size = 0
    for name, content in sources:
        batch.append((name, content))
        size += len(content)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def main() -> None:
    """Uploads with a progress bar."""
    import threefs
    from rich.console import Console
    from rich.progress import Progress

    sources = find_sources(CORPUS_BYTES_MAX)
    with threefs.connect() as files, Progress(console=Console(stderr=True)) as progress:
        total = 2 * sum(len(content) for _, content in sources)
        task = progress.add_task("corpus", total=total)
        result = upload(files, "/corpus", sources, lambda more: progress.advance(task, more))
    verdict = "identical" if result.identical else "DIFFERENT"
    print(f"{result.files} files, {result.bytes} bytes in /corpus, read back {verdict}")
    raise SystemExit(not result.identical)


if __name__ == "__main__":
    main()
