"""`torch.distributed.checkpoint` on 3FS and on a directory, with ranks as processes."""

import itertools
import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import threefs
from threefs.checkpoint import LocalFiles

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

WORLD_SIZES = [1, 2, 3, 4]
ID = "/jobs/gpt/step-1"


@pytest.fixture(scope="module")
def fork_server():
    script = Path(__file__).with_name("dcp_ranks.py")
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", str(script)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
    ) as process:  # fmt: skip
        yield process
        process.stdin.close()


def read_report(results, rank):
    """What a rank has loaded, and its result or error."""
    file, loaded = results / f"{rank}.json", results / f"{rank}.loaded"
    report = json.loads(file.read_text()) if file.exists() else {}
    return {**report, "loaded": loaded.read_text() if loaded.exists() else None}


@pytest.fixture
def run(fork_server, storage):
    """Run a scenario; return the exit status and the result or error of each rank."""

    def run(scenario, world_size, **orders):
        with tempfile.TemporaryDirectory() as results:
            orders = {
                "id": ID, "seed": 1, "storage": str(storage), "results": results,
                "scenario": scenario, "world_size": world_size, **orders,
            }  # fmt: skip
            fork_server.stdin.write(json.dumps(orders) + "\n")
            statuses = json.loads(fork_server.stdout.readline())
            reports = [read_report(Path(results), rank) for rank in range(world_size)]
        return statuses, reports

    return run


@pytest.fixture(params=["directory", "cluster"])
def storage(request, tmp_path):
    """The root of a directory, or the file of a cluster."""
    if request.param == "directory":
        yield tmp_path
        return
    cluster = request.getfixturevalue("cluster")
    yield cluster.file
    with cluster.client() as client:
        client.rmtree("/jobs", missing_ok=True)


@pytest.fixture
def files(storage):
    return LocalFiles(storage) if storage.is_dir() else threefs.connect(storage)


def result_of(outcome):
    statuses, reports = outcome
    assert set(statuses) == {0}, reports
    results = [report["result"] for report in reports]
    assert all(result == results[0] for result in results)
    return results[0]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_state_of_any_number_of_ranks_loads_on_any_other(run):
    ids = {world_size: f"{ID}{world_size}" for world_size in WORLD_SIZES}
    digests = [
        result_of(run("save", world_size, id=path, seed=world_size))
        for world_size, path in ids.items()
    ]
    for world_size in WORLD_SIZES:
        assert result_of(run("load", world_size, ids=list(ids.values()))) == digests, world_size


@pytest.mark.parametrize("executor", ["thread", pytest.param("process", marks=pytest.mark.slow)])
@pytest.mark.timeout(300)
def test_asynchronous_saves_hold_the_state_of_their_call(run, executor):
    digests = result_of(run("async_saves", 2, executor=executor))
    assert len(set(digests)) == 3
    assert result_of(run("load", 3, ids=[f"{ID}-{number}" for number in range(3)])) == digests


def test_ranks_with_different_ids_are_refused(run, files):
    statuses, reports = run("save", 2, different_ids=True)
    assert statuses == [1, 1]
    for report in reports:
        assert "rank 1 cannot write /jobs/gpt/step-11.saving-" in report["error"]
    assert not [name for name in files.listdir("/jobs/gpt") if ".saving-" not in name]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("rank", [0, 1])
def test_after_a_kill_at_any_change_of_a_save_the_previous_checkpoint_loads(run, files, rank):
    """The killed save replaces the checkpoint with its id: one of both is always there, whole."""
    previous = result_of(run("save", 2, seed=1))
    loaded = []
    for change in itertools.count():
        statuses, reports = run("resume", 2, seed=2, kill={"rank": rank, "change": change})
        loaded += [report["loaded"] for report in reports]
        if statuses[rank] != -signal.SIGKILL:
            break
        assert statuses[1 - rank] == 1, f"{change}: the other rank: {reports[1 - rank]}"
    assert statuses == [0, 0], reports
    saved = reports[0]["result"]
    assert result_of(run("load", 2, ids=[ID])) == [saved]
    assert set(loaded) == ({previous, saved} if rank == 0 else {previous})
    assert change >= (8 if rank == 0 else 1)
    (name,) = files.listdir("/jobs/gpt")  # nothing of the killed saves stays
    assert name.startswith("step-1")
