"""The examples of the guide run unchanged."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "guides" / "storage.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", GUIDE.read_text(), re.DOTALL | re.MULTILINE)


def test_the_python_example_runs(cluster: Any) -> None:
    (example,) = blocks("python")
    assert '"/tmp/3fs/cluster.json"' in example
    exec(example.replace("/tmp/3fs/cluster.json", str(cluster.file)), {})


def test_the_shell_example_runs(cluster: Any, tmp_path: Path) -> None:
    example = next(block for block in blocks("sh") if "THREEFS_CLUSTER" in block)
    example = example.replace("/tmp/3fs", str(cluster.folder)).replace("--size 1G", "--size 4M")
    (tmp_path / "model.bin").write_bytes(os.urandom(1000))
    program = f'threefs() {{ "{sys.executable}" -m threefs "$@"; }}\n{example}'
    result = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "models" / "model.bin").exists()
