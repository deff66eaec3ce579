"""Commands of every kind: a forked script behaves like one in a new interpreter."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
from flyer.job.fork_server import PodExit

REPORT = """
import atexit, json, os, pickle, sys
class Thing: pass
atexit.register(print, "exit function")
print(json.dumps({
    "argv": sys.argv, "path0": sys.path[0], "name": __name__, "file": __file__,
    "package": __package__, "spec": getattr(__spec__, "name", None), "cwd": os.getcwd(),
    "pickled": type(pickle.loads(pickle.dumps(Thing()))) is Thing,
    "main": sys.modules["__main__"].Thing is Thing,
    "doc": __doc__, "open_files": sorted(os.listdir("/proc/self/fd"))[:3],
    "sigterm": str(__import__("signal").getsignal(15)),
    "sigint": str(__import__("signal").getsignal(2)).split(" at ")[0],
}))
raise SystemExit(5)
"""


@pytest.fixture
def package(tmp_path):
    folder = tmp_path / "work"
    (folder / "trainer").mkdir(parents=True)
    (folder / "trainer" / "__init__.py").touch()
    for path in ("trainer/__main__.py", "trainer/run.py", "script.py"):
        (folder / path).write_text(REPORT)
    return folder


async def run(fork_server, spec, watch):
    pod = await fork_server.spawn(spec)
    async with asyncio.timeout(60):
        return await pod.wait(), watch.log_of(spec, 0)


@pytest.mark.parametrize(
    "words",
    [
        ["script.py", "a", "-b"],
        ["-u", "script.py"],
        ["./script.py"],
        ["-m", "trainer", "x"],
        ["-m", "trainer.run"],
        ["-X", "dev", "script.py"],
        ["-m", "no_such_module"],
        ["no_such_script.py"],
    ],
)
async def test_a_python_command_reports_the_same_as_under_the_interpreter(
    fork_server, make_pod, watch, package, words
):
    plain = subprocess.run(
        [sys.executable, *words],
        cwd=package,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    spec = make_pod(command=["python"], args=words, working_dir=str(package))
    exit_, output = await run(fork_server, spec, watch)
    assert exit_ == PodExit(plain.returncode)
    expected = (plain.stdout + plain.stderr).replace(sys.executable, "PYTHON")
    if output.startswith("{"):
        assert json.loads(output.splitlines()[0]) == json.loads(expected.splitlines()[0])
        assert output.splitlines()[1:] == expected.splitlines()[1:]
    else:
        assert (
            output.splitlines()[-1].partition(":")[2] == expected.splitlines()[-1].partition(":")[2]
        )


async def test_a_command_that_is_not_python(fork_server, make_pod, watch):
    spec = make_pod(command=["sh", "-c", 'echo "rank $RANK of $WORLD_SIZE"; exit 6'])
    assert await run(fork_server, spec, watch) == (PodExit(6), "rank 0 of 1\n")


async def test_a_traceback_from_another_interpreter_is_found_in_its_output(
    fork_server, make_pod, watch
):
    code = "try:\n  1/0\nexcept Exception as e:\n  raise ValueError('boo') from e"
    spec = make_pod(command=[sys.executable, "-X", "dev", "-c", code])
    exit_, output = await run(fork_server, spec, watch)
    assert exit_ == PodExit(1)
    from flyer.job.failure import read_failure

    assert read_failure(spec.run_dir).traceback == output
    assert "ZeroDivisionError" in output


async def test_variables_that_an_interpreter_reads_at_its_start_take_effect(
    fork_server, make_pod, watch, tmp_path
):
    (tmp_path / "mine.py").write_text("NAME = 'mine'")
    spec = make_pod("import mine; print(mine.NAME)", env={"PYTHONPATH": str(tmp_path)})
    assert await run(fork_server, spec, watch) == (PodExit(0), "mine\n")


async def test_the_search_path_and_the_standard_streams_are_fresh(fork_server, make_pod, watch):
    spec = make_pod(
        "import sys, os; print('' in sys.path, sys.stdout.line_buffering, os.getsid(0))"
    )
    exit_, output = await run(fork_server, spec, watch)
    assert exit_ == PodExit(0)
    empty, buffered, session = output.split()
    assert (empty, buffered) == ("False", "True")
    assert int(session) == json.loads(Path(spec.run_dir, "pids.json").read_text())["launcher"]


async def test_torchrun_is_started_once_per_node(fork_server, make_pod, watch, tmp_path):
    program = tmp_path / "torchrun"
    program.write_text(
        "#!/bin/sh\necho $PET_NPROC_PER_NODE $PET_NODE_RANK ${RANK-none} $FLYER_JOB\n"
    )
    program.chmod(0o755)
    spec = make_pod(command=[str(program), "x.py"], ranks_per_node=4)
    assert await run(fork_server, spec, watch) == (PodExit(0), "4 0 none default/gpt\n")
    assert len(list(Path(spec.log_dir).iterdir())) == 1


async def test_a_multiprocessing_pool_works_and_ends_in_a_rank(fork_server, make_pod, watch):
    spec = make_pod(
        """
        import multiprocessing
        import flyer.job
        def square(x):
            return x * x
        flyer.job.current()
        for method in ("fork", "spawn"):
            if __name__ == "__main__":
                with multiprocessing.get_context(method).Pool(2) as pool:
                    print(pool.map(square, range(3)), flush=True)
        """
    )
    assert await run(fork_server, spec, watch) == (PodExit(0), "[0, 1, 4]\n[0, 1, 4]\n")


@pytest.mark.parametrize("method", ["fork", "spawn"])
async def test_a_worker_process_of_the_script_ends_on_sigterm(fork_server, make_pod, watch, method):
    spec = make_pod(
        f"""
        import multiprocessing, signal
        import flyer.job
        flyer.job.current()
        def wait(running):
            running.set()
            signal.pause()
        if __name__ == "__main__":
            context = multiprocessing.get_context({method!r})
            running = context.Event()
            worker = context.Process(target=wait, args=(running,))
            worker.start()
            running.wait()
            worker.terminate()
            worker.join()
            print(worker.exitcode)
        """
    )
    assert await run(fork_server, spec, watch) == (PodExit(0), "-15\n")
