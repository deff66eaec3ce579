"""No process of a pod outlives it, whichever of its processes is killed."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from flyer.job.fork_server import ForkServerError, PodExit

# A rank whose processes try to survive: a child, a grandchild, and one in a separate session.
SURVIVOR = """
    import json, os, pathlib, signal, subprocess, sys, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    sleep = ["sleep", "300"]
    children = [
        subprocess.Popen(sleep).pid,
        subprocess.Popen(sleep, start_new_session=True).pid,
        int(subprocess.run(["sh", "-c", "setsid sleep 300 >/dev/null & echo $!"],
                           stdout=subprocess.PIPE, check=True).stdout),
    ]
    sign = pathlib.Path(os.environ["SIGN"] + os.environ["RANK"])
    sign.with_suffix(".partial").write_text(json.dumps([os.getpid(), *children]))
    sign.with_suffix(".partial").rename(sign)
    time.sleep(300)
"""


async def start_survivors(fork_server, make_pod, watch, tmp_path):
    spec = make_pod(SURVIVOR, ranks_per_node=2, env={"SIGN": str(tmp_path / "up")})
    pod = await fork_server.spawn(spec)
    pids = [pod.pid]
    for rank in range(2):
        pids += json.loads(await watch.appears(Path(f"{tmp_path}/up{rank}")))
    assert all(watch.alive(pid) for pid in pids)
    return pod, pids


async def test_when_the_pod_is_killed(fork_server, make_pod, watch, tmp_path):
    pod, pids = await start_survivors(fork_server, make_pod, watch, tmp_path)
    pod.kill()
    async with asyncio.timeout(60):
        assert await pod.wait() == PodExit(signal=9)
    assert not any(watch.alive(pid) for pid in pids)


async def test_when_the_launcher_is_killed(fork_server, make_pod, watch, tmp_path):
    pod, pids = await start_survivors(fork_server, make_pod, watch, tmp_path)
    os.kill(pod.pid, signal.SIGKILL)
    async with asyncio.timeout(60):
        assert await pod.wait() == PodExit(signal=9)
    assert not any(watch.alive(pid) for pid in pids)


async def test_when_the_ranks_are_killed(fork_server, make_pod, watch, tmp_path):
    pod, pids = await start_survivors(fork_server, make_pod, watch, tmp_path)
    ranks = json.loads(Path(pod.spec.run_dir, "pids.json").read_text())["ranks"]
    for pid in ranks.values():
        os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(60):
        assert await pod.wait() == PodExit(signal=9)
    assert not any(watch.alive(pid) for pid in pids)


async def test_when_a_rank_succeeds_and_leaves_children(fork_server, make_pod, watch, tmp_path):
    script = SURVIVOR.replace("time.sleep(300)", "pass")
    pod = await fork_server.spawn(make_pod(script, env={"SIGN": str(tmp_path / "up")}))
    async with asyncio.timeout(60):
        assert await pod.wait() == PodExit(0)
    pids = json.loads((tmp_path / "up0").read_text())
    assert not any(watch.alive(pid) for pid in pids)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_when_the_fork_server_is_killed(fork_server, make_pod, watch, tmp_path, number):
    pod, pids = await start_survivors(fork_server, make_pod, watch, tmp_path)
    os.kill(fork_server.pid, number)
    async with asyncio.timeout(60):
        assert await pod.wait() == PodExit(signal=9)
        await fork_server.lost.wait()
    assert watch.gone(pids)
    with pytest.raises(ForkServerError, match="has exited"):
        await fork_server.spawn(make_pod("pass"))


async def test_when_a_stopped_launcher_loses_its_fork_server(
    fork_server, make_pod, watch, tmp_path
):
    pod, pids = await start_survivors(fork_server, make_pod, watch, tmp_path)
    os.killpg(pod.pid, signal.SIGSTOP)
    os.kill(fork_server.pid, signal.SIGKILL)
    async with asyncio.timeout(60):
        await fork_server.lost.wait()
    group = [
        pod.pid,
        *json.loads(Path(pod.spec.run_dir, "pids.json").read_text())["ranks"].values(),
    ]
    assert watch.gone(group)
    for pid in set(pids) - set(group):  # outside the group of a stopped launcher: a known limit
        if watch.alive(pid):
            os.kill(pid, signal.SIGKILL)


async def test_when_the_driver_closes(fork_server, make_pod, watch, tmp_path):
    _, pids = await start_survivors(fork_server, make_pod, watch, tmp_path)
    await fork_server.close()
    assert not any(watch.alive(pid) for pid in [fork_server.pid, *pids])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
async def test_when_the_driver_is_killed(make_pod, watch, tmp_path, number):
    spec = make_pod(SURVIVOR, ranks_per_node=2, env={"SIGN": str(tmp_path / "up")})
    (tmp_path / "driver.py").write_text(
        textwrap.dedent(
            f"""
            import asyncio, pathlib
            from flyer.job.pod import PodSpec
            from flyer.job.fork_server import ForkServer
            async def main():
                fork_server = await ForkServer.start()
                pod = await fork_server.spawn(PodSpec.from_json({spec.to_json()!r}))
                pathlib.Path("{tmp_path}/pids").write_text(f"{{fork_server.pid}} {{pod.pid}}")
                await pod.wait()
            asyncio.run(main())
            """
        )
    )
    driver = subprocess.Popen([sys.executable, str(tmp_path / "driver.py")])
    try:
        pids = [int(word) for word in (await watch.appears(tmp_path / "pids")).split()]
        for rank in range(2):
            pids += json.loads(await watch.appears(Path(f"{tmp_path}/up{rank}")))
    finally:
        driver.send_signal(number)
        driver.wait(60)
    assert watch.gone(pids)


async def test_when_the_driver_dies_while_the_fork_server_still_imports(watch, tmp_path):
    (tmp_path / "slow_module.py").write_text(
        f"import os, pathlib, time\n"
        f"pathlib.Path('{tmp_path}/pid').write_text(str(os.getpid()))\ntime.sleep(300)\n"
    )
    (tmp_path / "driver.py").write_text(
        "import asyncio\nfrom flyer.job.fork_server import ForkServer\n"
        "asyncio.run(ForkServer.start(['slow_module']))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    driver = subprocess.Popen([sys.executable, str(tmp_path / "driver.py")], env=environment)
    try:
        pid = int(await watch.appears(tmp_path / "pid"))
    finally:
        driver.kill()
        driver.wait(60)
    assert watch.gone([pid])


async def test_a_fork_server_whose_start_is_cancelled_is_killed(tmp_path, watch):
    from flyer.job.fork_server import ForkServer

    (tmp_path / "slow_module.py").write_text(
        f"import os, pathlib, time\n"
        f"pathlib.Path('{tmp_path}/pid').write_text(str(os.getpid()))\ntime.sleep(300)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    start = asyncio.create_task(
        ForkServer.start(["slow_module"], env=environment, timeout_seconds=60)
    )
    pid = int(await watch.appears(tmp_path / "pid"))
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert watch.gone([pid])
