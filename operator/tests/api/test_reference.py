"""docs/reference/api.md is generated from the models."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from flyer.api import reference

if TYPE_CHECKING:
    import pytest

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "api.md"


def test_the_page_is_the_generated_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert PAGE.read_text() == reference.page(), "run python -m flyer.api.reference"
    assert reference.main(["--file", str(tmp_path / "api.md"), "--check"]) == 1
    assert "run python -m flyer.api.reference" in capsys.readouterr().err


def test_every_field_is_described() -> None:
    for line in reference.page().splitlines():
        if line.startswith(("| `spec", "| `status")):
            assert line.split("|")[4].strip(), line
