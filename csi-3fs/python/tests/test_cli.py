"""The command line: results on stdout, errors in one line, exit statuses for scripts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from threefs.cli import main

if TYPE_CHECKING:
    from pathlib import Path


@dataclass
class Done:
    returncode: int
    stdout: bytes
    stderr: bytes


@pytest.fixture
def threefs_command(
    cluster: Any, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> Any:
    """Call the entry point in this process: starting Python takes longer than the command."""

    def run(*arguments: str, **changes: str) -> Done:
        monkeypatch.setenv("THREEFS_CLUSTER", str(cluster.file))
        for name, value in changes.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["threefs", *arguments])
        capfdbinary.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capfdbinary.readouterr()
        return Done(int(ended.value.code or 0), captured.out, captured.err)

    return run


def test_the_package_is_executable(cluster: Any) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "threefs", "cat", "--cluster", str(cluster.file), "/none"],
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 102
    assert result.stderr == b"threefs: error: `/none`: no such file or directory\n"


def test_copy_list_and_print(threefs_command: Any, folder: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "deep" / "er").mkdir(parents=True)
    contents = {"a": b"1", "deep/b": os.urandom(3_000_000), "deep/er/c": b""}
    for name, data in contents.items():
        (source / name).write_bytes(data)
    assert threefs_command("cp", "-r", str(source), f"3fs:{folder}/copy").returncode == 0
    assert threefs_command("cp", "-r", f"3fs:{folder}/copy", str(tmp_path / "back")).returncode == 0
    for name, data in contents.items():
        assert (tmp_path / "back" / name).read_bytes() == data
    assert threefs_command("ls", f"{folder}/copy").stdout == b"a\ndeep\n"
    long = threefs_command("ls", "-l", f"{folder}/copy").stdout.decode().splitlines()
    assert long[0].startswith("-rw-r--r--")
    assert long[0].split()[1] == "1"
    assert long[1].startswith("drwxr-xr-x")
    assert threefs_command("cat", f"{folder}/copy/deep/b").stdout == contents["deep/b"]
    entries = json.loads(threefs_command("ls", "-o", "json", f"{folder}/copy").stdout)
    assert [(entry["name"], entry["kind"], entry["size"]) for entry in entries] == [
        ("a", "file", 1),
        ("deep", "directory", 0),
    ]


def test_a_copy_over_a_longer_file_truncates_it(
    threefs_command: Any, folder: str, tmp_path: Path
) -> None:
    (tmp_path / "long").write_bytes(b"long" * 1000)
    (tmp_path / "short").write_bytes(b"short")
    for name in ("long", "short"):
        threefs_command("cp", str(tmp_path / name), f"3fs:{folder}/file")
    assert threefs_command("cat", f"{folder}/file").stdout == b"short"


def test_a_large_file_is_copied_in_both_directions(
    threefs_command: Any, folder: str, tmp_path: Path
) -> None:
    (tmp_path / "large").write_bytes(os.urandom(40_000_001))
    assert threefs_command("cp", str(tmp_path / "large"), f"3fs:{folder}/").returncode == 0
    assert threefs_command("cp", f"3fs:{folder}/large", str(tmp_path / "back")).returncode == 0
    assert (tmp_path / "back").read_bytes() == (tmp_path / "large").read_bytes()


def test_status_shows_every_target(threefs_command: Any) -> None:
    result = threefs_command("status")
    assert result.returncode == 0
    text = result.stdout.decode()
    assert text.count("SERVING") == 9
    assert "3 of 3 whole" in text
    status = json.loads(threefs_command("status", "-o", "json").stdout)
    assert status["cluster"]["chains_whole"] == 3
    assert len(status["routing"]["nodes"]) == 3


def test_bench_reports_rates(threefs_command: Any, cluster: Any) -> None:
    result = threefs_command(
        "bench", "--size", "8M", "--batch", "4M", "--raw", str(cluster.folder), "-o", "json"
    )
    figures = json.loads(result.stdout)
    assert figures["bytes"] == 8 << 20
    assert figures["write_bytes_per_second"] > 0
    assert figures["read_bytes_per_second"] > 0
    assert figures["write_share_of_raw"] > 0
    assert figures["read_bytes_other"] == 8 << 20
    assert threefs_command("ls", "/").stdout.count(b"bench") == 0


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["ls", "/none"], 102, "`/none`"),
        (["cat", "/none"], 102, "`/none`"),
        (["cp", "a", "b"], 2, "one side must be in 3FS"),
        (["cp", "/nowhere/at/all", "3fs:/x"], 102, "does not exist on this machine"),
        (["cp", "3fs:/none", "/tmp/x"], 102, "`/none`"),
        (["cp", "3fs:/", "/tmp/x"], 1, "use -r"),
        (["bench", "--size", "lots"], 2, "size `lots`"),
        (["frobnicate"], 2, "frobnicate"),
        (["ls", "--cluster", "/none/cluster.json"], 102, "threefs serve"),
    ],
)
def test_errors_are_one_line_and_a_status(
    threefs_command: Any, arguments: list[str], status: int, words: str
) -> None:
    result = threefs_command(*arguments)
    assert result.returncode == status, result.stderr
    assert words in result.stderr.decode()
    assert b"Traceback" not in result.stderr
    assert result.stdout == b""


def test_an_unreachable_cluster_has_a_distinct_exit_status(
    threefs_command: Any, cluster: Any, tmp_path: Path
) -> None:
    contents = cluster.status_file()
    contents["mgmtd"] = ["127.0.0.1:9"]
    (tmp_path / "cluster.json").write_text(json.dumps(contents))
    result = threefs_command("status", "--timeout", "0.5", THREEFS_CLUSTER=str(tmp_path))
    assert result.returncode == 107
    assert b"mgmtd at 127.0.0.1:9" in result.stderr


@pytest.mark.parametrize("command", ["serve", "status", "ls", "cp", "cat", "bench"])
def test_every_command_has_an_example(threefs_command: Any, command: str) -> None:
    assert b"threefs " in threefs_command(command, "--help").stdout
    assert b"Example" in threefs_command(command, "--help").stdout
