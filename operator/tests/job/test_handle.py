"""Job handle: suspension over the socket and by SIGTERM, reports, and use without a scheduler."""

import asyncio
import json
import signal
from pathlib import Path

import pytest
from flyer.job.fork_server import PodExit
from flyer.job.protocol import SuspendCode, Welcome
from flyer.job.server import JobServer


class Notebook:
    def __init__(self):
        self.calls = []
        self.changed = asyncio.Condition()

    def __getattr__(self, name):
        async def note(*arguments):
            async with self.changed:
                self.calls.append((name, *arguments))
                self.changed.notify_all()

        return note

    async def wait_for_call(self, name):
        async with asyncio.timeout(60), self.changed:
            await self.changed.wait_for(lambda: name in [call[0] for call in self.calls])


@pytest.fixture
async def job(tmp_path):
    notebook = Notebook()
    welcome = Welcome("default/gpt", "c1", 2, 7, 40, "/ckpt/step-40")
    server = JobServer(tmp_path / "s", welcome, notebook)
    await server.start()
    server.notebook = notebook
    server.path = str(tmp_path / "s")
    yield server
    await server.close()


async def ended(pod):
    async with asyncio.timeout(60):
        return await pod.wait()


TRAINER = """
    import flyer.job, time
    job = flyer.job.current()
    step = job.restore_step or 0
    while not job.suspend_requested():
        step += 1
        job.progress(step, loss=1.0)
        time.sleep(0.001)
    assert 0 < job.deadline - time.monotonic() < 31
    job.received()
    job.checkpoint(step, f"/ckpt/step-{step}", durable=True)
    print(job.reason, job.restore_path, job.user_state)
    job.release(step)
"""


async def test_a_suspension_from_signal_to_release(fork_server, make_pod, job, watch):
    spec = make_pod(TRAINER, socket_path=job.path)
    pod = await fork_server.spawn(spec)
    await job.notebook.wait_for_call("progress")
    assert job.notebook.calls[0][2] > 40
    job.signal(30, "preempted by default/b")
    await job.notebook.wait_for_call("release")
    names = [call[0] for call in job.notebook.calls if call[0] != "progress"]
    assert names == ["received", "checkpoint", "release"]
    assert job.suspend_code is SuspendCode.MAY_SUSPEND
    step = job.notebook.calls[-1][2]
    assert ("checkpoint", 0, step, f"/ckpt/step-{step}", True) in job.notebook.calls
    pod.kill(signal.SIGTERM)  # as the driver does once the nodes are released
    assert await ended(pod) == PodExit(104)
    assert watch.log_of(spec, 0) == "preempted by default/b /ckpt/step-40 7\n"


async def test_a_bare_sigterm_is_a_suspension_too_and_needs_no_socket(fork_server, make_pod, watch):
    spec = make_pod(
        """
        import flyer.job, os, pathlib, time
        job = flyer.job.current()
        assert (job.restore_path, job.user_state) == (None, 0)
        assert job.progress(1) is None and job.checkpoint(1, "/x", durable=True) is False
        pathlib.Path(os.environ["SIGN"]).write_text("up")
        while not job.suspend_requested():
            time.sleep(0.005)
        print(job.reason)
        job.release(1)
        """
    )
    spec.env["SIGN"] = sign = spec.run_dir + ".up"
    pod = await fork_server.spawn(spec)
    await watch.appears(Path(sign))
    pod.kill(signal.SIGTERM)
    assert await ended(pod) == PodExit(104)
    assert watch.log_of(spec, 0) == "SIGTERM\n"


async def test_a_script_that_never_connects_is_terminated_with_sigterm(
    fork_server, make_pod, job, watch
):
    spec = make_pod(
        "import os, pathlib, time\n"
        "pathlib.Path(os.environ['SIGN']).write_text('up')\n"
        "time.sleep(60)",
        socket_path=job.path,
    )
    spec.env["SIGN"] = sign = spec.run_dir + ".up"
    pod = await fork_server.spawn(spec)
    await watch.appears(Path(sign))
    job.signal(30, "preempted")
    assert job.ranks_seen == set()
    pod.kill(signal.SIGTERM)
    assert await ended(pod) == PodExit(signal=15)
    assert pod.failure() is None


async def test_the_last_step_is_reported_although_the_script_ends_immediately(
    fork_server, make_pod, job
):
    script = """
        import flyer.job
        for step in range(1, 1001):
            flyer.job.current().progress(step)
    """
    assert await ended(await fork_server.spawn(make_pod(script, socket_path=job.path))) == PodExit(
        0
    )
    steps = [call[2] for call in job.notebook.calls]
    assert steps[-1] == 1000
    assert len(steps) < 20


async def test_a_client_reconnects_to_a_restarted_server(fork_server, make_pod, job):
    pod = await fork_server.spawn(make_pod(TRAINER, socket_path=job.path))
    await job.notebook.wait_for_call("progress")
    await job.close()
    again = JobServer(job.path, Welcome("default/gpt", "c1", 2), Notebook())
    await again.start()
    try:
        again.signal(30, "after the restart")
        await again._handler.wait_for_call("release")
    finally:
        pod.kill()
        await ended(pod)
        await again.close()


async def test_hai_names_work_for_a_script_that_imports_hfai(fork_server, make_pod, job, watch):
    spec = make_pod(
        """
        import flyer.job.hfai; flyer.job.hfai.install()
        import hfai, json, os, time
        from hfai.client import receive_suspend_command, go_suspend, set_whole_life_state
        hfai.client.set_priority(30)
        state = hfai.client.get_whole_life_state()
        set_whole_life_state(99)
        while not receive_suspend_command():
            time.sleep(0.005)
        assert receive_suspend_command()
        print(json.dumps([state, hfai.client.get_whole_life_state()]), flush=True)
        go_suspend()
        """,
        socket_path=job.path,
    )
    pod = await fork_server.spawn(spec)
    await job.notebook.wait_for_call("user_state")
    job.signal(30, "higher priority")
    await job.notebook.wait_for_call("release")
    pod.kill(signal.SIGTERM)
    assert await ended(pod) == PodExit(104)
    assert json.loads(watch.log_of(spec, 0).splitlines()[-1]) == [7, 99]
    assert "no effect" in watch.log_of(spec, 0)
    assert [call[0] for call in job.notebook.calls].count("received") == 1


async def test_the_hai_suspend_command_is_received_only_on_the_first_node(
    fork_server, make_pod, job, watch
):
    spec = make_pod(
        """
        import flyer.job, flyer.job.hfai, time
        while not flyer.job.current().suspend_requested():
            time.sleep(0.005)
        print(flyer.job.hfai.receive_suspend_command())
        """,
        socket_path=job.path,
        nodes=2,
        node_rank=1,
    )
    pod = await fork_server.spawn(spec)
    job.signal(30, "now")
    assert await ended(pod) == PodExit(0)
    assert watch.log_of(spec, 1) == "False\n"
