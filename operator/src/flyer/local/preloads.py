"""Preloads: guesses which heavy modules ranks will import, to import them once per machine.

Only modules that are known to be safe to import before a fork, and that the script itself names,
are preloaded; a wrong guess costs time or memory, never correctness.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Final

from flyer.local.pod_specs import working_folder

if TYPE_CHECKING:
    from pathlib import Path

    from flyer.api import FlyerJob

__all__ = ["preloads_of"]

SAFE_MODULES: Final = ("numpy", "torch")
# torch.optim imports the compiler's front end when the first optimizer is built: 900 modules that
# would cost every rank of every attempt seconds.
IMPLIED_MODULES: Final = {"torch": ("torch._dynamo",)}
SCRIPT_BYTES_MAX: Final = 1 << 20


def preloads_of(job: FlyerJob) -> list[str]:
    """The modules worth preloading for one job: those that its script imports."""
    container = job.spec.template.trainer
    words = [*container.command, *container.args]
    if not words or not words[0].rpartition("/")[2].startswith("python"):
        return []
    script = next((word for word in words[1:] if word.endswith(".py")), None)
    if script is None:
        return []
    imported = _imported(working_folder(job) / script)
    safe_modules = [name for name in SAFE_MODULES if name in imported]
    return safe_modules + [
        implied for name in safe_modules for implied in IMPLIED_MODULES.get(name, ())
    ]


def _imported(script: Path) -> set[str]:
    """Top-level modules that a script imports anywhere in its text."""
    try:
        if script.stat().st_size > SCRIPT_BYTES_MAX:
            return set()
        tree = ast.parse(script.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return set()
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module.partition(".")[0])
    return names
