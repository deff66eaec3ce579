"""Rings through the C library."""

from __future__ import annotations

from typing import TYPE_CHECKING

import usrbio

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from holding import HeldMount


def test_a_c_program_writes_and_reads_through_rings(
    mount: Callable[..., HeldMount], tmp_path: Path
) -> None:
    program = usrbio.compiled(usrbio.CRATE / "tests" / "c" / "io.c", tmp_path)
    usrbio.run(program, mount().target)
