"""Pods of a real fork server: start, end, failure and stop."""

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest
from flyer.job.fork_server import ForkServer, ForkServerError, PodExit


async def ended(pod):
    async with asyncio.timeout(60):
        return await pod.wait()


async def test_two_pods_at_once_with_the_whole_environment(fork_server, make_pod, watch):
    script = """
        import json, os, sys
        print(json.dumps([dict(os.environ), sys.argv, __name__, __file__, sys.stdin.read()]))
    """
    specs = [
        make_pod(script, node_rank=n, nodes=2, ranks_per_node=2, args=["--x", "1"], zone="AB"[n])
        for n in range(2)
    ]
    pods = await asyncio.gather(*(fork_server.spawn(spec) for spec in specs))
    assert [await ended(pod) for pod in pods] == [PodExit(0)] * 2
    for rank in range(4):
        spec = specs[rank // 2]
        environment, argv, name, file, stdin = json.loads(watch.log_of(spec, rank))
        assert environment["RANK"] == str(rank)
        assert environment["LOCAL_RANK"] == str(rank % 2)
        assert environment["FLYER_ZONE"] == "AB"[rank // 2]
        assert environment["OMP_NUM_THREADS"] == "1"
        assert argv == [spec.command[1], "--x", "1"]
        assert (name, file, stdin) == ("__main__", spec.command[1], "")


async def test_a_rank_that_raises_is_reported_with_its_traceback(fork_server, make_pod, watch):
    spec = make_pod(
        """
        import os, time
        def work():
            if os.environ["RANK"] == "2":
                raise ValueError("boo")
            time.sleep(60)
        work()
        """,
        ranks_per_node=3,
    )
    pod = await fork_server.spawn(spec)
    assert await ended(pod) == PodExit(exit_status=1)
    failure = pod.failure()
    assert (failure.rank, failure.node, failure.exit_status) == (2, "a0", 1)
    assert failure.error_type == "builtins.ValueError"
    script = spec.command[1]
    assert failure.text().splitlines() == [
        "rank 2 on node a0: exit status 1",
        "Traceback (most recent call last):",
        f'  File "{script}", line 7, in <module>',
        "    work()",
        f'  File "{script}", line 5, in work',
        '    raise ValueError("boo")',
        "ValueError: boo",
    ]
    assert watch.log_of(spec, 2) == failure.traceback
    assert Path(spec.run_dir, "launcher.log").read_text().endswith("ValueError: boo\n")


async def test_the_first_failure_is_reported_although_its_clean_up_is_slow(
    fork_server, make_pod, tmp_path
):
    spec = make_pod(
        f"""
        import atexit, os, pathlib, time
        sign = pathlib.Path("{tmp_path}/failed")
        if os.environ["RANK"] == "1":
            atexit.register(time.sleep, 0.3)
            atexit.register(sign.touch)
            raise ValueError("the cause")
        while not sign.exists():
            time.sleep(0.001)
        raise KeyError("a consequence")
        """,
        ranks_per_node=2,
    )
    pod = await fork_server.spawn(spec)
    await ended(pod)
    assert pod.failure().traceback.endswith("ValueError: the cause\n")


async def test_an_error_about_a_peer_ends_with_its_own_status(fork_server, make_pod):
    spec = make_pod(
        """
        class CollectiveError(Exception):
            pass
        raise CollectiveError("rank 5 on node b0 is gone")
        """
    )
    pod = await fork_server.spawn(spec)
    assert await ended(pod) == PodExit(exit_status=75)
    assert pod.failure().peer_lost


async def test_a_killed_rank_is_reported_as_its_signal_and_not_its_victim(fork_server, make_pod):
    spec = make_pod(
        """
        import os, signal, time
        if os.environ["RANK"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
        """,
        ranks_per_node=2,
    )
    pod = await fork_server.spawn(spec)
    assert await ended(pod) == PodExit(signal=9)
    failure = pod.failure()
    assert (failure.rank, failure.outcome) == (0, "killed by SIGKILL")
    assert "output is in" in failure.text()


@pytest.mark.parametrize(
    ("ending", "status"),
    [
        ("raise SystemExit", 0),
        ("import sys; sys.exit(7)", 7),
        ("import sys; sys.exit('no data')", 1),
        ("import os; os._exit(9)", 9),
        ("def (", 1),
        ("import flyer.job; flyer.job.current().release(3)", 104),
    ],
)
async def test_exit_statuses_are_kept(fork_server, make_pod, ending, status):
    pod = await fork_server.spawn(make_pod(ending))
    assert await ended(pod) == PodExit(exit_status=status)
    assert (pod.failure() is None) == (status in (0, 104))


async def test_ranks_receive_sigterm_and_their_exit_statuses_count(fork_server, make_pod, watch):
    script = """
        import os, pathlib, signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(104))
        pathlib.Path(os.environ["SIGN"]).write_text("up")
        time.sleep(60)
    """
    spec = make_pod(script)
    spec.env["SIGN"] = sign = spec.run_dir + ".up"
    pod = await fork_server.spawn(spec)
    await watch.appears(Path(sign))
    pod.kill(signal.SIGTERM)
    assert await ended(pod) == PodExit(exit_status=104)


async def test_a_rank_that_ignores_sigterm_is_killed_at_the_deadline(fork_server, make_pod, watch):
    script = """
        import os, pathlib, signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        pathlib.Path(os.environ["SIGN"]).write_text("up")
        time.sleep(60)
    """
    spec = make_pod(script, stop_grace_seconds=0.2)
    spec.env["SIGN"] = sign = spec.run_dir + ".up"
    pod = await fork_server.spawn(spec)
    await watch.appears(Path(sign))
    pod.kill(signal.SIGTERM)
    assert await ended(pod) == PodExit(signal=9)


async def test_a_peer_that_ignores_sigterm_does_not_delay_a_failure_for_long(fork_server, make_pod):
    spec = make_pod(
        """
        import os, signal, time
        if os.environ["RANK"] == "0":
            time.sleep(0.2)
            raise SystemExit(3)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)
        """,
        ranks_per_node=2,
    )
    pod = await fork_server.spawn(spec)
    async with asyncio.timeout(60):
        assert await pod.wait() == PodExit(exit_status=3)


async def test_output_is_live_and_a_second_attempt_appends(fork_server, make_pod, watch):
    script = (
        "import time; print('hello'); print('error', file=__import__('sys').stderr); time.sleep(60)"
    )
    spec = make_pod(script)
    log = Path(spec.log_dir, "rank-0000.log")
    for attempt in (1, 2):
        pod = await fork_server.spawn(spec)
        async with asyncio.timeout(60):
            while await watch.appears(log) != "hello\nerror\n" * attempt:
                await asyncio.sleep(0.005)
        pod.kill()
        assert await ended(pod) == PodExit(signal=9)


async def test_a_traceback_of_an_earlier_attempt_is_not_reported(fork_server, make_pod):
    pod = await fork_server.spawn(make_pod("raise ValueError('old')"))
    await ended(pod)
    pod = await fork_server.spawn(make_pod("import os; os._exit(1)"))
    await ended(pod)
    assert pod.failure().traceback is None


async def test_the_error_of_a_pod_that_cannot_be_created_names_it(fork_server, make_pod, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ForkServerError, match=r"gpt@a0.*file"):
        await fork_server.spawn(make_pod(run_dir=str(tmp_path / "file" / "run")))
    assert await ended(await fork_server.spawn(make_pod("pass"))) == PodExit(0)


async def test_a_missing_working_dir_and_program_are_named(fork_server, make_pod, watch):
    spec = make_pod(working_dir="/no/such/folder")
    assert await ended(await fork_server.spawn(spec)) == PodExit(127)
    assert "/no/such/folder" in watch.log_of(spec, 0)
    spec = make_pod(command=["no-such-program"])
    assert await ended(await fork_server.spawn(spec)) == PodExit(127)
    assert "no-such-program" in watch.log_of(spec, 0)


async def test_the_fork_server_survives_garbage_and_reports_it(fork_server, make_pod, caplog):
    fork_server._writer.write(b"\x00garbage\n[]\n{}\n" + b'{"op": "dance", "pod": 99}\n')
    fork_server._writer.write(b"x" * 3_000_000 + b"\n")
    fork_server._writer.write(b'{"op": "spawn", "pod": 7, "spec": "{}"}\n')
    assert await ended(await fork_server.spawn(make_pod("pass"))) == PodExit(0)
    for named in ("garbage", "dance", "oversized", "missing"):
        assert named in caplog.text


async def test_modules_that_cannot_be_preloaded_are_reported_and_pods_run(make_pod, tmp_path):
    (tmp_path / "threaded.py").write_text(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    for preload, named in (("no_such_module", "no_such_module"), ("threaded", "starts threads")):
        fork_server = await ForkServer.start([preload], env=environment)
        try:
            assert named in fork_server.preload_problems[0]
            assert await ended(await fork_server.spawn(make_pod("pass"))) == PodExit(0)
        finally:
            await fork_server.close()


async def test_what_is_preloaded_is_not_imported_again(make_pod, tmp_path, watch):
    (tmp_path / "heavy.py").write_text(f"open({str(tmp_path / 'imports')!r}, 'a').write('x')\n")
    fork_server = await ForkServer.start(["heavy"], env={**os.environ, "PYTHONPATH": str(tmp_path)})
    try:
        spec = make_pod(
            "import heavy, threading; print(threading.active_count())", ranks_per_node=4
        )
        assert await ended(await fork_server.spawn(spec)) == PodExit(0)
        assert (tmp_path / "imports").read_text() == "x"
        assert watch.log_of(spec, 3) == "1\n"
    finally:
        await fork_server.close()


async def test_a_thread_that_continues_does_not_hide_a_failure(fork_server, make_pod):
    spec = make_pod(
        """
        import threading, time
        threading.Thread(target=time.sleep, args=(60,)).start()
        raise ValueError("boo")
        """
    )
    pod = await fork_server.spawn(spec)
    assert await ended(pod) == PodExit(exit_status=1)
    assert pod.failure().traceback.endswith("ValueError: boo\n")


async def test_a_child_that_the_script_forked_is_not_the_rank(fork_server, make_pod):
    spec = make_pod(
        """
        import os
        if os.fork() == 0:
            raise KeyError("the child")
        os.wait()
        raise ValueError("the rank")
        """
    )
    pod = await fork_server.spawn(spec)
    assert await ended(pod) == PodExit(exit_status=1)
    assert pod.failure().error_type == "builtins.ValueError"
