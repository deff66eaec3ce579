"""Common programs on a mount."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import tarfile
import threading
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path


def run(*command: str | Path, folder: Path) -> str:
    environment = {
        **os.environ,
        "HOME": str(folder),
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_AUTHOR_NAME": "a",
        "GIT_AUTHOR_EMAIL": "a@example.org",
        "GIT_COMMITTER_NAME": "a",
        "GIT_COMMITTER_EMAIL": "a@example.org",
    }
    result = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_git(tree: Path) -> None:
    run("git", "init", "-q", "repo", folder=tree)
    repo = tree / "repo"
    for number in range(20):
        (repo / f"file-{number}.txt").write_text(f"{number}\n" * 100)
    run("git", "add", ".", folder=repo)
    run("git", "commit", "-qm", "first", folder=repo)
    (repo / "file-3.txt").write_text("changed\n")
    os.rename(repo / "file-4.txt", repo / "moved.txt")
    run("git", "add", "-A", folder=repo)
    run("git", "commit", "-qm", "second", folder=repo)
    assert run("git", "status", "--porcelain", folder=repo) == ""
    run("git", "fsck", "--strict", folder=repo)
    run("git", "clone", "-q", repo, "copy", folder=tree)
    assert (tree / "copy" / "file-3.txt").read_text() == "changed\n"
    run("git", "gc", "-q", folder=repo)
    assert len(run("git", "log", "--oneline", folder=repo).splitlines()) == 2


@pytest.mark.parametrize("journal", ["delete", "truncate", "persist", "wal"])
def test_sqlite(tree: Path, journal: str) -> None:
    path = tree / "data.sqlite"
    with sqlite3.connect(path, timeout=60) as base:
        assert base.execute(f"pragma journal_mode={journal}").fetchone()[0] == journal
        base.execute("create table counts (who integer, value integer)")

    def add(writer: int) -> None:
        own = sqlite3.connect(path, timeout=60)
        for value in range(5):
            with own:
                own.execute("insert into counts values (?, ?)", (writer, value))
        own.close()

    threads = [threading.Thread(target=add, args=(writer,)) for writer in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    base = sqlite3.connect(path)
    assert base.execute("select count(*), sum(value) from counts").fetchone() == (10, 20)
    assert base.execute("pragma integrity_check").fetchone() == ("ok",)
    base.close()


def test_tar_and_cp(tree: Path, tmp_path: Path) -> None:
    import email

    source = os.path.dirname(email.__file__)
    archive = tmp_path / "archive.tar"
    with tarfile.open(archive, "w") as tar:
        tar.add(source, "email", filter=lambda it: None if "__pycache__" in it.name else it)
    run("tar", "xf", archive, folder=tree)
    run("cp", "-a", "email", "again", folder=tree)
    run("diff", "-r", "email", "again", folder=tree)
    with tarfile.open(archive) as tar:
        for member in tar:
            path = tree / member.name
            if member.isfile():
                content = tar.extractfile(member)
                assert content is not None
                assert path.read_bytes() == content.read()
            assert int(path.stat().st_mtime) == int(member.mtime)
    run("rm", "-rf", "email", folder=tree)
    assert os.listdir(tree) == ["again"]


def test_a_python_package_runs_from_a_mount(tree: Path) -> None:
    package = tree / "site" / "package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from package.other import answer\n")
    (package / "other.py").write_text("answer = 42\n")
    run(sys.executable, "-m", "compileall", "-q", "site", folder=tree)
    script = "import sys; sys.path.insert(0, 'site'); import package; print(package.answer)"
    assert run(sys.executable, "-c", script, folder=tree) == "42\n"
    program = tree / "program"
    program.write_text("#!/bin/sh\necho ran\n")
    program.chmod(0o755)
    assert run(program, folder=tree) == "ran\n"
