"""The generated stubs match the specification."""

from __future__ import annotations

from pathlib import Path

from threefs.csi.proto import generate


def test_generated_stubs_are_up_to_date(tmp_path: Path) -> None:
    fresh = generate.generate(tmp_path)
    committed = Path(generate.__file__).parent
    for name in generate.GENERATED:
        assert (fresh / name).read_text() == (committed / name).read_text(), (
            f"{name} is not what csi.proto generates: run `python -m threefs.csi.proto.generate`"
        )
