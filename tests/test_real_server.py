"""Tests with a real API server are run by `make e2e` and cannot be skipped there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

from tests.doc_blocks import ROOT

if TYPE_CHECKING:
    from pathlib import Path

PLACES = (
    "operator/tests/api/test_policies.py",
    "operator/tests/api/test_rules.py",
    "operator/tests/kube/scenarios/test_real_server.py",
    "charts/tests/test_server.py",
    "tests/test_docs.py",
)


def run_pytest(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_the_mark_selects_all_tests_with_a_real_server() -> None:
    result = run_pytest("--collect-only", "-q", "-m", "real_server", *PLACES)
    places = {line.partition("::")[0] for line in result.stdout.splitlines() if "::" in line}
    assert places == set(PLACES), result.stderr
    assert "test_a_real_server_accepts_the_manifests" in result.stdout
    assert "test_every_message_names_a_field" not in result.stdout


def test_make_runs_all_marked_tests_without_skips() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(r"^E2E := .*FLYER_E2E_REQUIRED=1 ", makefile, re.MULTILINE)
    assert re.search(r"^e2e: .*\btest-servers\b", makefile, re.MULTILINE)
    for target, arguments in {
        "test-servers": "-m real_server",
        "test-kubernetes": "$(KUBERNETES_SCENARIOS)",
        "e2e": "e2e/tests",
    }.items():
        recipe = re.search(rf"^{target}: .*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
        assert recipe, target
        assert recipe[1].startswith(f"\t$(E2E) {arguments}"), target


def test_the_tests_fail_if_a_required_server_is_not_built(tmp_path: Path) -> None:
    place = "operator/tests/kube/scenarios/test_real_server.py"
    nowhere = {"FLYER_E2E_CACHE": str(tmp_path), "FLYER_E2E_REQUIRED": ""}
    skipped = run_pytest("-q", place, **nowhere)
    assert skipped.returncode == 0, skipped.stdout
    assert re.search(r"^\d+ skipped in ", skipped.stdout, re.MULTILINE), skipped.stdout
    failed = run_pytest("-q", place, **{**nowhere, "FLYER_E2E_REQUIRED": "1"})
    assert failed.returncode == 1, failed.stdout
    assert "is not built; run `python -m testcluster build" in failed.stdout
