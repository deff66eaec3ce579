"""The stages of `make test` and of `.ci/run` cover all tests."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.stages import ROOT, STAGES, stage_of


@pytest.mark.parametrize(
    ("path", "marks", "stage"),
    [
        ("operator/tests/engine/test_queue.py", set(), "unit"),
        ("tests/test_demo.py", {"slow"}, "services"),
        ("charts/tests/test_server.py", {"real_server"}, "services"),
        ("operator/tests/sim/test_histories.py", {"slow"}, "simulators"),
        ("csi-3fs/python/tests/fuse/test_files.py", {"slow"}, "mounts"),
        ("csi-3fs/python/tests/test_files.py", set(), "services"),
        ("operator/tests/engine/test_queue.py", {"soak"}, None),
    ],
)
def test_a_test_belongs_to_one_stage(path: str, marks: set[str], stage: str | None) -> None:
    assert stage_of(ROOT / path, marks) == stage


def test_make_runs_every_stage() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for stage in STAGES:
        assert re.search(rf"^test-{stage}:", makefile, re.MULTILINE)
        assert f"--stage {stage}" in makefile
        assert f"test-{stage}" in _recipe("test")


def test_every_rust_test_belongs_to_one_stage() -> None:
    folders = [crate / "tests" for crate in (ROOT / "fabric", *ROOT.glob("*/crates/*"))]
    names = {path.stem for folder in folders for path in folder.glob("*.rs")}
    names |= {path.parent.name for folder in folders for path in folder.glob("*/main.rs")}
    assert len(names) > 30
    services, simulators = _recipe("test-services"), _recipe("test-simulators")
    for name in names:
        assert (f"--test {name} " in services) != (f"--test {name} " in simulators), name


def test_ci_runs_the_checks_and_the_test_command() -> None:
    ci = (ROOT / ".ci" / "run").read_text()
    for target in ("check-static", "test"):
        assert re.search(rf"\s{target}(\s|:|$)", ci), target


def _recipe(target: str) -> str:
    command = ["make", "--dry-run", "--no-print-directory", target]
    result = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    return result.stdout


def test_the_stage_runner_reports_and_stops_at_a_failure(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "stages").symlink_to(ROOT / "scripts" / "stages")
    (tmp_path / "Makefile").write_text("good:\n\t@echo ran good\nbad:\n\t@exit 3\n")

    def run(*stages: str) -> subprocess.CompletedProcess[str]:
        script = [str(tmp_path / "scripts" / "stages"), *stages]
        return subprocess.run(script, capture_output=True, text=True, timeout=60, check=False)

    passed = run("good", "good")
    assert passed.returncode == 0
    assert passed.stdout.count("ran good") == 2
    assert "good passed in" in passed.stdout
    failed = run("bad", "good")
    assert failed.returncode != 0
    assert "stage 1/2: bad FAILED" in failed.stdout
    assert "ran good" not in failed.stdout
