"""`flyer` and `kubectl flyer` against an API server in memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from flyer.cli import completion, completion_scripts, target
from flyer.cli.main import kubectl, main
from flyer.cli.target import Target
from flyer.cli.verbs import VERBS
from ruamel.yaml import YAML

from .test_kube_client import TIME, log_of, running

if TYPE_CHECKING:
    from pathlib import Path

    from .conftest import Cluster


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


class Shell:
    """Runs `flyer` in this process, in a folder without a local cluster."""

    def __init__(self, folder: Path, capture: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self._capture = capture

    def run(self, *words: str, program: str = "flyer") -> Done:
        before, sys.argv = sys.argv, [program, *words]
        status = 0
        try:
            (kubectl if program == "kubectl-flyer" else main)()
        except SystemExit as end:
            status = int(end.code or 0)
        finally:
            sys.argv = before
            target._plugin = False
        output = self._capture.readouterr()
        return Done(status, output.out, output.err)


@pytest.fixture
def shell(
    tmp_path: Path,
    kubeconfig: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Shell:
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("FLYER_STATE", raising=False)
    return Shell(folder, capsys)


def test_the_program_is_installed_for_kubectl(
    cluster: Cluster, tmp_path: Path, kubeconfig: Path
) -> None:
    cluster.add_job("one", namespace="ml")
    result = subprocess.run(
        [sys.executable, "-c", "from flyer.cli.main import kubectl; kubectl()", "ps"],
        cwd=tmp_path, capture_output=True, text=True, timeout=110,
        env={**os.environ, "KUBECONFIG": str(kubeconfig), "NO_COLOR": "1"},
    )  # fmt: skip
    assert "ml/one" in result.stdout
    assert result.stderr == ""


def test_without_a_local_cluster_the_target_is_kubectl_s(cluster: Cluster, shell: Shell) -> None:
    cluster.add_job("one", namespace="ml")
    cluster.add_job("two")
    listed = shell.run("ps", "-o", "json")
    assert [job["name"] for job in json.loads(listed.stdout)] == ["one"], listed.stderr
    # kubectl's own options, after the verb.
    listed = shell.run("ps", "-A", "-o", "json", program="kubectl-flyer")
    assert sorted(job["name"] for job in json.loads(listed.stdout)) == ["one", "two"]
    listed = shell.run("ps", "-n", "default", "--context", "test")
    assert listed.stdout.split()[:2] == ["NAME", "STATE"]
    assert "two" in listed.stdout
    assert listed.stderr == ""


def test_a_change_and_its_exit_statuses(cluster: Cluster, shell: Shell) -> None:
    cluster.add_job("one", namespace="ml")
    cluster.set_status("one", running(), "ml")
    result = shell.run("priority", "one", "high")
    assert (result.returncode, result.stderr) == (0, "ml/one has priority high\n")
    assert cluster.job("one", "ml")["spec"]["priority"] == "high"
    assert shell.run("stop", "one").returncode == 0
    assert cluster.job("one", "ml")["spec"]["stop"] == "Graceful"
    missing = shell.run("show", "none")
    assert missing.returncode == 102
    assert missing.stderr.startswith("error: job `ml/none`")
    refused = shell.run("priority", "one", "urgent", "-o", "json")
    assert refused.returncode == 2
    assert json.loads(refused.stderr)["error"]["code"] == "BadInput"
    nowhere = shell.run("ps", "--kubeconfig", "missing.yaml")
    assert nowhere.returncode == 107


def test_why_nodes_queues_quotas_top_logs_show(cluster: Cluster, shell: Shell) -> None:
    cluster.add_nodes("a1")
    cluster.add_job("one", namespace="ml", priority="high")
    progress = {"step": 12, "time": TIME}
    cluster.set_status("one", running(progress=progress), "ml")
    cluster.add_job("two", 1, namespace="ml")
    first = {"reason": "WaitingForNodes", "message": "ml/one of ml has 1", "job": "ml/one"}
    pending = {"reason": "WaitingForNodes", "message": "1 of 1 missing", "reasons": [first]}
    pending |= {"position": 1, "time": TIME}
    cluster.set_status("two", {"phase": "Queued", "pending": pending}, "ml")
    why = shell.run("why", "two")
    assert "ml/one of ml has 1" in why.stdout, why.stderr
    cluster.add_job("big", 9, namespace="ml")
    never = {"verdict": "Never", "reason": "InsufficientNodes", "message": "wants 9 nodes"}
    cluster.set_status("big", {"phase": "Queued", "pending": never}, "ml")
    assert shell.run("why", "big").returncode == 105
    assert "ml/one" in shell.run("nodes").stdout
    assert "default" in shell.run("queues").stdout
    assert shell.run("quotas").stderr == "no quotas\n"
    top = shell.run("top", "--interval", "0.1", "-o", "json")
    assert json.loads(top.stdout)[0]["unsavedSteps"] == 12
    assert json.loads(shell.run("show", "one", "-o", "json").stdout)["object"]["kind"] == "FlyerJob"
    for words in (["ps"], ["show", "one"], ["why", "two"], ["nodes"], ["queues"], ["quotas"]):
        answer = json.loads(shell.run(*words, "-o", "json").stdout)
        assert YAML(typ="safe").load(shell.run(*words, "-o", "yaml").stdout) == answer, words


def test_run_exits_with_the_exit_status_of_the_job(cluster: Cluster, shell: Shell) -> None:
    cluster.add_namespace("ml")
    (shell.folder / "job.yaml").write_text(
        "apiVersion: fireflyer.dev/v1alpha1\nkind: FlyerJob\nmetadata: {name: one}\n"
        "spec: {nodes: 1, template: {spec: {containers: [{name: trainer}]}}}\n"
    )

    def operate() -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                cluster.job("one", "ml")
                break
            except Exception:
                time.sleep(0.05)
        cluster.add_pod("one", 1, 0, log_of("rank 0 | hello"), namespace="ml")
        cluster.set_status("one", running(), "ml")
        exits = [{"node": "a1", "outcome": "Failed", "exitStatus": 7, "time": TIME}]
        cluster.set_status("one", {"phase": "Failed", "reason": "RankFailed", "exits": exits}, "ml")

    thread = threading.Thread(target=operate)
    thread.start()
    result = shell.run("run", "job.yaml")
    thread.join()
    assert result.stdout == "hello\n", result.stderr
    assert "ml/one created" in result.stderr
    assert result.returncode == 7


def test_the_selection_of_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kubeconfig: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FLYER_STATE", raising=False)
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    assert Target().is_kube
    assert not Target(state=tmp_path).is_kube
    assert Target().key("one") == "one"
    (tmp_path / ".flyer" / "two-zones" / "jobs").mkdir(parents=True)
    (tmp_path / ".flyer" / "two-zones" / "lock").touch()
    assert not Target().is_kube
    assert Target().key("one") == "default/one"
    assert Target(kube=True).is_kube
    assert Target(context="test").is_kube
    assert Target(namespace="ml").key("one") == "ml/one"
    with pytest.raises(Exception, match="conflicts with the options of Kubernetes"):
        _ = Target(state=tmp_path, kube=True).is_kube


def test_the_completion_scripts_are_up_to_date() -> None:
    for name, text in completion.files().items():
        file_text = (completion.FOLDER / name).read_text()
        assert file_text == text, "run python -m flyer.cli.completion"


@pytest.mark.parametrize("words", [["flyer", "su"], ["flyer", "ps", "--kube"]])
def test_bash_completes(words: list[str]) -> None:
    script = completion_scripts.script("bash") + (
        f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _flyer; "
        'echo "${COMPREPLY[@]}"'
    )
    result = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    assert result.stdout.split() in (["suspend"], ["--kube", "--kubeconfig"]), result.stderr


LIBRARIES = ("pydantic", "kubernetes", "aiohttp", "ruamel", "rich", "typer", "asyncio")
SLOW = ("argparse", "dataclasses", "inspect", "json", "subprocess", "typing_extensions")
"""Slow modules of the standard library: each costs as much as the rest of `--help`."""


def imported(*words: str) -> set[str]:
    """The modules that a command line has imported when it ends."""
    look = (
        "import sys, atexit\n"
        "atexit.register(lambda: print(*sys.modules, file=sys.stderr))\n"
        f"sys.argv = ['flyer', *{words!r}]\n"
        "from flyer.cli.main import main\n"
        "main()\n"
    )
    result = subprocess.run(
        [sys.executable, "-I", "-c", look], capture_output=True, text=True, timeout=110
    )
    assert result.stdout, result.stderr
    return {name.split(".")[0] for name in result.stderr.split()} | set(result.stderr.split())


@pytest.mark.parametrize("words", [("--help",), ("completion", "bash"), ("ps", "--help")], ids=str)
def test_a_command_line_imports_no_slow_module(words: tuple[str, ...]) -> None:
    """Verbs import their modules when they are called; help imports no library."""
    modules = imported(*words)
    assert modules.isdisjoint(LIBRARIES)
    if words == ("--help",):
        assert modules.isdisjoint(SLOW)
    own_modules = {name for name in modules if name.startswith("flyer.")}
    assert own_modules <= {
        "flyer.cli", "flyer.cli.main", "flyer.cli.arguments", "flyer.cli.verbs", "flyer.cli.output",
        "flyer.cli.target", "flyer.cli.completion_scripts", "flyer.errors",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["pss"], "did you mean `ps`?"),
        (["-n", "ml", "ps"], "put options after the command"),
        (["ps", "--watsh"], "unrecognized arguments: --watsh"),
        (["ps", "--wat"], "unrecognized arguments: --wat"),
        (["logs", "one", "--rank", "-1"], "invalid value `-1`: expected an integer >= 0"),
        (["top", "--interval", "soon"], "invalid value `soon`: expected a number >= 0.1"),
        (["show"], "the following arguments are required: JOB"),
        (["ps", "-o", "xml"], "invalid choice: 'xml'"),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, list) else "",
)
def test_a_usage_error_has_a_hint(shell: Shell, words: list[str], message: str) -> None:
    result = shell.run(*words)
    assert result.returncode == 2
    assert message in result.stderr
    assert "hint: " in result.stderr
    again = shell.run(*words, *([] if "-o" in words else ["-o", "json"]))
    assert again.stderr.startswith('{"error"' if "-o" not in words else "error:")


def test_the_help_of_every_verb_lists_its_options(shell: Shell) -> None:
    for verb in VERBS:
        result = shell.run(verb.name, "--help")
        assert result.returncode == 0
        for option in verb.arguments:
            for name in option.spellings if option.is_option else ():
                assert name in result.stdout
    assert shell.run().returncode == 2
