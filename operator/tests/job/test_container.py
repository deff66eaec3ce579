"""The launcher as a container's first process, with a simulated sidecar."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from flyer.job.install import install, main

if TYPE_CHECKING:
    from collections.abc import Iterator

SECONDS = 60.0
ORDER = {
    "job": "gpt",
    "namespace": "lab",
    "chain": "c1",
    "attempt": 2,
    "node": "a1",
    "zone": "A",
    "node_rank": 1,
    "nodes": 2,
    "ranks_per_node": 2,
    "master_addr": "10.0.0.1",
    "master_port": 20001,
    "stop_grace_seconds": 20.0,
}


class Sidecar:
    """Serves the launcher's socket, one connection at a time."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "launcher.sock"
        self.listen()

    def listen(self) -> None:
        self.server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.server.settimeout(SECONDS)
        self.server.bind(str(self.path))
        self.server.listen()

    def accept(self) -> None:
        self.connection, _ = self.server.accept()
        self.connection.settimeout(SECONDS)
        self.lines = self.connection.makefile("rb")

    def receive(self, **expected: Any) -> dict[str, Any]:
        """The next message that has these fields."""
        while True:
            line = self.lines.readline()
            assert line, f"the launcher closed the connection before {expected}"
            message = json.loads(line)
            if expected.items() <= message.items():
                return message

    def send(self, **message: Any) -> None:
        self.connection.sendall(json.dumps(message).encode() + b"\n")

    def start(self, key: str | None = None, **changes: Any) -> None:
        self.accept()
        self.receive(op="launcher", state="waiting")
        self.send(kind="start", key=key, pod=ORDER | changes, output_seconds=0.1)
        self.receive(op="launcher", state="running")

    def close(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            self.lines.close()
            self.connection.close()
        self.server.close()
        self.path.unlink(missing_ok=True)


class Container:
    def __init__(self, tools: Path, folder: Path) -> None:
        self.tools, self.folder = tools, folder
        self.process: subprocess.Popen[bytes] | None = None

    def run(self, script: str, *options: str, env: dict[str, str] | None = None) -> None:
        path = self.folder / "script.py"
        path.write_text(textwrap.dedent(script))
        self.launch(["python3", str(path)], *options, env=env)

    def launch(self, words: list[str], *options: str, env: dict[str, str] | None = None) -> None:
        environment = {
            name: value for name, value in os.environ.items() if name in ("PATH", "HOME")
        }
        environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
        command = ["python3", str(self.tools / "bin" / "flyer-launch")]
        command += ["--run-folder", str(self.folder / "run"), *options, "--", *words]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**environment, **(env or {})},
        )

    def end(self) -> tuple[int, str, str]:
        assert self.process is not None
        out, err = self.process.communicate(timeout=SECONDS)
        return self.process.returncode, out.decode(), err.decode()


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flyer")
    assert "flyer.job" in install(folder)
    return folder


@pytest.fixture
def container(tools: Path, tmp_path: Path) -> Iterator[Container]:
    (tmp_path / "run").mkdir()
    launcher = Container(tools, tmp_path)
    yield launcher
    if launcher.process is not None and launcher.process.poll() is None:
        launcher.process.kill()
        launcher.process.wait()


@pytest.fixture
def sidecar(container: Container) -> Iterator[Sidecar]:
    fake_sidecar = Sidecar(container.folder / "run")
    yield fake_sidecar
    fake_sidecar.close()


def test_ranks_run_with_their_environment_and_one_log(
    container: Container, sidecar: Sidecar
) -> None:
    container.run(
        """
        import os, sys, flyer.job
        names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT",
                 "FLYER_JOB", "FLYER_ATTEMPT", "FLYER_ZONE", "MINE", "OMP_NUM_THREADS"]
        print(*(os.environ[name] for name in names))
        print("problem", file=sys.stderr)
        """,
        env={"MINE": "kept", "OMP_NUM_THREADS": "5"},
    )
    sidecar.start()
    ended = sidecar.receive(op="ended")
    assert (ended["code"], ended["failure"]) == (0, None)
    sidecar.send(kind="done")
    status, out, err = container.end()
    assert (status, err) == (0, "")
    assert sorted(out.splitlines()) == [
        "rank 2 | 2 4 0 1 10.0.0.1 20001 lab/gpt 2 A kept 5",
        "rank 2 | problem",
        "rank 3 | 3 4 1 1 10.0.0.1 20001 lab/gpt 2 A kept 5",
        "rank 3 | problem",
    ]


def test_no_rank_starts_before_the_start_request(container: Container, sidecar: Sidecar) -> None:
    container.run("print('ran')")
    sidecar.accept()
    sidecar.receive(op="launcher", state="waiting")
    assert container.process is not None
    container.process.send_signal(signal.SIGTERM)
    status, out, _ = container.end()
    assert (status, out) == (143, "")


def test_without_an_order_the_launcher_exits_in_time_with_the_reason(container: Container) -> None:
    container.run("print('ran')", "--start-seconds", "0.3")
    status, out, err = container.end()
    assert (status, out) == (75, "")
    assert "the gang was not started within 0.3 s" in err


def test_a_failing_rank_is_reported_with_its_traceback(
    container: Container, sidecar: Sidecar
) -> None:
    container.run(
        """
        import os, time
        if os.environ["RANK"] == "3":
            raise ValueError("seven")
        time.sleep(60)
        """
    )
    sidecar.start()
    ended = sidecar.receive(op="ended")
    sidecar.send(kind="done")
    assert ended["code"] == 1
    assert (ended["failure"]["rank"], ended["failure"]["exit_status"]) == (3, 1)
    assert ended["failure"]["traceback"].endswith("ValueError: seven\n")
    status, out, _ = container.end()
    assert status == 1
    lines = out.splitlines()
    assert "rank 3 | ValueError: seven" in lines
    assert "rank 3 on node a1: exit status 1" in lines
    assert lines[-1] == "ValueError: seven"  # the final message for the user


def test_the_traceback_of_another_program_is_taken_from_its_output(
    container: Container, sidecar: Sidecar
) -> None:
    script = "echo Traceback '(most recent call last):'; echo 'Error: no'; exit 3"
    container.launch(["sh", "-c", script])
    sidecar.start(ranks_per_node=1, node_rank=0, nodes=1)
    ended = sidecar.receive(op="ended")
    assert ended["code"] == 3
    assert ended["failure"]["traceback"] == "Traceback (most recent call last):\nError: no\n"
    sidecar.send(kind="done")
    assert container.end()[0] == 3


@pytest.mark.parametrize(
    ("error", "code"),
    [
        ("hfreduce._native.CollectiveError: hfreduced on this node ended", 75),
        ("torch.distributed.DistNetworkError", 75),
        ("ValueError: no CollectiveError", 1),
    ],
)
def test_a_lost_peer_in_the_output_of_a_program_sets_the_exit_status(
    container: Container, sidecar: Sidecar, error: str, code: int
) -> None:
    traceback = f"Traceback (most recent call last):\n  File x, line 1\n{error}\nof job j\n"
    marked = "".join(f"[rank0]: {line}\n" for line in traceback.splitlines())  # as torch prints it
    container.launch(["sh", "-c", 'printf %s "$1"; exit 1', "sh", marked])
    sidecar.start(ranks_per_node=1, node_rank=0, nodes=1)
    ended = sidecar.receive(op="ended")
    assert ended["code"] == code
    failure = ended["failure"]
    assert (failure["traceback"], failure["exit_status"]) == (traceback, 1)
    assert failure["peer_lost"] == (code == 75)
    sidecar.send(kind="done")
    assert container.end()[0] == code


def test_lines_are_never_interleaved_and_long_lines_are_split(
    container: Container, sidecar: Sidecar
) -> None:
    container.run(
        """
        import os, sys
        letter = "ab"[int(os.environ["LOCAL_RANK"])]
        for number in range(500):
            print(number, letter * 200)
        print(letter * 20000)
        sys.stdout.write("no end")
        """
    )
    sidecar.start()
    with ThreadPoolExecutor(1) as pool:
        ending = pool.submit(container.end)  # a full pipe would block the ranks
        sidecar.receive(op="ended")
        sidecar.send(kind="done")
        status, out, _ = ending.result()
    assert status == 0
    for rank, letter in ((2, "a"), (3, "b")):
        whole, text = [], ""
        for line in out.splitlines():
            match = re.fullmatch(rf"rank {rank} ([|~]) (.*)", line)
            if match:
                assert len(match[2]) <= 8192
                text += match[2]
                if match[1] == "|":
                    whole.append(text)
                    text = ""
        assert whole == [f"{n} {letter * 200}" for n in range(500)] + [letter * 20000, "no end"]


def test_output_without_a_newline_is_written(container: Container, sidecar: Sidecar) -> None:
    container.run(
        """
        import os, pathlib, sys, time
        if os.environ["LOCAL_RANK"] == "0":
            sys.stdout.write("50%")
            sys.stdout.flush()
        while not pathlib.Path(os.environ["FLYER_TOPOLOGY"]).exists():
            time.sleep(0.01)
        """
    )
    sidecar.start()
    assert container.process is not None
    assert container.process.stdout is not None
    assert container.process.stdout.readline() == b"rank 2 ~ 50%\n"
    (container.folder / "run" / "topology.json").write_text("{}")
    sidecar.receive(op="ended")
    sidecar.send(kind="done")
    assert container.end()[0] == 0


STEPS = """
    import flyer.job, sys, time
    job = flyer.job.current()
    print("ready", flush=True)
    while not job.suspend_requested():
        time.sleep(0.01)
    print("saving", flush=True)
    sys.exit(104)
"""


@pytest.mark.parametrize("way", ["terminate", "SIGTERM"])
def test_a_sigterm_reaches_every_rank(container: Container, sidecar: Sidecar, way: str) -> None:
    container.run(STEPS)
    sidecar.start()
    process = container.process
    assert process is not None
    assert process.stdout is not None
    ready = 0
    while ready < 2:  # the warning about the missing job socket is a line, too
        ready += process.stdout.readline().endswith(b"ready\n")
    if way == "terminate":
        sidecar.send(kind="terminate")
    else:
        process.send_signal(signal.SIGTERM)
    assert sidecar.receive(op="ended")["code"] == 104
    sidecar.send(kind="done")
    status, out, _ = container.end()
    assert status == 104
    assert {"rank 2 | saving", "rank 3 | saving"} <= set(out.splitlines())


def test_a_kill_order_sends_sigterm_before_sigkill(container: Container, sidecar: Sidecar) -> None:
    container.run(
        """
        import os, signal, time
        signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"not now\\n"))
        print("ready", flush=True)
        while True:
            time.sleep(0.01)
        """
    )
    sidecar.start()
    process = container.process
    assert process is not None
    assert process.stdout is not None
    ready = 0
    while ready < 2:
        ready += process.stdout.readline().endswith(b"ready\n")
    sidecar.send(kind="kill")
    sidecar.send(kind="kill")
    assert sidecar.receive(op="ended")["code"] == -9
    sidecar.send(kind="done")
    status, out, _ = container.end()
    assert status == -9
    assert {"rank 2 | not now", "rank 3 | not now"} <= set(out.splitlines())


@pytest.mark.parametrize("kind", ["terminate", "kill"])
def test_an_attempt_may_end_before_it_starts(
    container: Container, sidecar: Sidecar, kind: str
) -> None:
    container.run("print('ran')")
    sidecar.accept()
    sidecar.send(kind=kind)
    status, out, err = container.end()
    assert (status, out) == (75, "")
    assert "ended before the gang started" in err


def test_a_restarted_sidecar_receives_the_launcher_s_state(
    container: Container, sidecar: Sidecar
) -> None:
    container.run(STEPS)
    sidecar.start()
    sidecar.close()
    sidecar.listen()
    sidecar.accept()
    sidecar.receive(op="launcher", state="running")
    sidecar.send(kind="terminate")
    assert sidecar.receive(op="ended")["code"] == 104
    sidecar.send(kind="done")
    assert container.end()[0] == 104


def test_a_lost_sidecar_does_not_block_the_launcher(container: Container, sidecar: Sidecar) -> None:
    container.run("print('ran')")
    sidecar.start()
    sidecar.close()
    started = time.monotonic()
    status, out, _ = container.end()
    assert status == 0
    assert "rank 2 | ran" in out
    assert time.monotonic() - started < 30


def test_invalid_orders_of_the_sidecar_are_ignored(container: Container, sidecar: Sidecar) -> None:
    container.run("print('ran')")
    sidecar.accept()
    sidecar.connection.sendall(b'\xff\n[]\n{"kind": "start"}\n')
    sidecar.send(kind="start", pod=ORDER | {"ranks_per_node": 0})
    status, out, err = container.end()
    assert (status, out) == (2, "")
    assert "`ranks_per_node` is 0, not from 1 to 1024" in err


@pytest.mark.parametrize("own", [None, "/mine/key"])
def test_the_key_of_the_collectives_is_in_a_private_file(
    own: str | None, container: Container, sidecar: Sidecar
) -> None:
    container.run(
        """
        import os, stat
        path = os.environ["HFREDUCE_KEY_FILE"]
        found = [path]
        if os.path.exists(path):
            found += [oct(stat.S_IMODE(os.stat(path).st_mode)), open(path).read()]
        print(*found)
        """,
        env={"HFREDUCE_KEY_FILE": own} if own else {},
    )
    sidecar.start(ranks_per_node=1, key="5c" * 32)
    sidecar.receive(op="ended")
    sidecar.send(kind="done")
    _, out, _ = container.end()
    default_key = f"{container.folder}/run/ranks/hfreduce.key 0o600 {'5c' * 32}"
    assert out.splitlines() == [f"rank 1 | {own or default_key}"]


def test_the_user_s_pythonpath_has_priority(container: Container, sidecar: Sidecar) -> None:
    module_folder = container.folder / "mine"
    module_folder.mkdir()
    (module_folder / "own.py").write_text("x = 1")
    container.run(
        """
        import own, os, sys, flyer.job, subprocess
        print(sys.path[1] == os.path.dirname(own.__file__), flyer.job.__file__)
        code = "import own, flyer.job; print(flyer.job.__file__)"
        print(subprocess.check_output(["python3", "-c", code], text=True), end="")
        """,
        env={"PYTHONPATH": str(module_folder)},
    )
    sidecar.start(ranks_per_node=1)
    sidecar.receive(op="ended")
    sidecar.send(kind="done")
    _, out, _ = container.end()
    where = container.tools / "lib" / "flyer" / "job" / "__init__.py"
    assert out.splitlines() == [f"rank 1 | True {where}", f"rank 1 | {where}"]


def test_a_repeated_installation_and_one_without_permission(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path)]) == 0
    (tmp_path / "lib" / "flyer" / "job" / "stale.py").write_text("")
    assert main([str(tmp_path)]) == 0
    assert not (tmp_path / "lib" / "flyer" / "job" / "stale.py").exists()
    file = tmp_path / "file"
    file.write_text("")
    assert main([str(file)]) == 1
    assert main([]) == 2
    assert "usage: flyer-install DIR" in capsys.readouterr().err


def test_hfreduce_and_haiscale_are_installed_from_their_shared_wheel(tmp_path: Path) -> None:
    pytest.importorskip("hfreduce", exc_type=ImportError)
    assert install(tmp_path) == ["flyer.job", "hfreduce", "haiscale"]
    assert (tmp_path / "lib" / "haiscale" / "py.typed").is_file()
    assert not (tmp_path / "lib" / "haiscale" / "tests").exists()


def test_a_reserved_port_can_be_bound_with_so_reuseaddr() -> None:
    from flyer.job.rendezvous_port import reserve_port

    with reserve_port() as holder:
        port = holder.getsockname()[1]
        with socket.socket() as plain, pytest.raises(OSError, match="in use"):
            plain.bind(("", port))
        with socket.create_server(("", port)):  # sets SO_REUSEADDR
            socket.create_connection(("127.0.0.1", port)).close()
        with socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True):
            socket.create_connection(("127.0.0.1", port)).close()


async def test_the_probe_waits_for_the_socket(tmp_path: Path) -> None:
    probe = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "flyer.sidecar.main",
        "probe",
        env={**os.environ, "FLYER_RUN_FOLDER": str(tmp_path)},
    )
    server = await asyncio.start_unix_server(lambda *_: None, str(tmp_path / "launcher.sock"))
    async with asyncio.timeout(SECONDS):
        assert await probe.wait() == 0
    server.close()
