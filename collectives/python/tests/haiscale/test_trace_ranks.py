"""Traces of running ranks: what they contain, what they cost, and what they do not change."""

import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from haiscale.ddp import DistributedDataParallel
from haiscale.pipeline.module import Pipeline
from haiscale.pipeline.schedules import build
from haiscale.trace import chrome, recorder
from haiscale.trace.compute import parts
from haiscale.trace.exposure import Exposure
from haiscale.trace.record import record
from haiscale.trace.spans import Kind, exposed_share, of_kind
from hfreduce.testing import Layout, run, values
from hfreduce.waits import WAITS
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
import training

pytestmark = pytest.mark.torch

TWO_NODES = Layout.two_zones(1, 1)
TCP = {"HFREDUCE_TRANSPORT": "tcp", "HFREDUCE_DETERMINISM": "stable"}
PATIENCE_SECONDS = 60.0


def on_ranks(function, *arguments):
    return values(run(function, TWO_NODES, *arguments, environment=TCP))


def until(condition):
    """Waits for a fact that other ranks or threads bring about."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.001)


def train(rank, size, folder, fails=False):
    """Five steps; returns a digest of the model, and whether nothing of a recording is left."""
    torch.manual_seed(0)
    model = training.Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ddp = DistributedDataParallel(model, optimizer=optimizer, bucket_cap_mb=0.05)
    hooks = len(model.head._forward_hooks)
    try:
        for step in record(range(10, 15), folder, model, traced=range(1, 3)):
            optimizer.zero_grad()
            training.loss_of(ddp, training.tokens_of(step, rank)).backward()
            optimizer.step()
            if fails and step == 11:
                raise KeyError("of the script")
    except KeyError:
        pass
    ddp.synchronize()
    is_clean = recorder.recording() is None and WAITS.observer is None
    return training.digest(model.state_dict()), is_clean and len(model.head._forward_hooks) == hooks


def test_a_trace_has_computation_collectives_waits_and_bytes_and_changes_no_bit(tmp_path):
    plain = on_ranks(train, None)
    assert on_ranks(train, str(tmp_path)) == plain
    assert all(is_clean for _, is_clean in plain)
    for trace in chrome.read(tmp_path):
        kinds = {kind: of_kind(trace.spans, kind) for kind in Kind}
        assert [span.name for span in kinds[Kind.STEP]] == ["step 11", "step 12"]
        forward = {span.name for span in kinds[Kind.FORWARD]}
        assert {"embed", "twice", "norm", "attention", "wide.0", "wide.2", "head"} <= forward
        assert {"wide.2", "norm", "twice"} <= {span.name for span in kinds[Kind.BACKWARD]}
        assert kinds[Kind.OPTIMIZER]
        gradients = [s for s in kinds[Kind.COLLECTIVE] if s.name.startswith("allreduce")]
        parameters = sum(p.nbytes for p in training.Net().parameters())
        # Of two steps; those of the step before may still be under way.
        assert sum(span.bytes for span in gradients) >= 2 * parameters
        assert 0 <= exposed_share(trace.spans) <= 1
        assert sum(span.bytes for span in kinds[Kind.SENT]) >= parameters
        assert (trace.dropped, trace.lost) == (0, 0)
        assert all(span.start <= span.end for span in trace.spans)
    assert {trace.node for trace in chrome.read(tmp_path)} == {"a0", "b0"}


def test_an_error_in_a_step_ends_the_recording(tmp_path):
    assert [is_clean for _, is_clean in on_ranks(train, str(tmp_path), True)] == [True, True]
    for trace in chrome.read(tmp_path):
        assert [span.name for span in of_kind(trace.spans, Kind.STEP)] == ["step 11"]


def report_wait(path):
    """Creates a file once this process waits for longer than it did before."""
    before = WAITS.seconds

    def observe():
        until(lambda: WAITS.seconds > before)
        path.touch()

    observer = threading.Thread(target=observe)
    observer.start()
    return observer


def delayed(rank, size, folder):
    """Rank 1 starts its allreduce once rank 0 waits: rank 0's wait cannot have ended before."""
    waits = Path(folder, "waits")
    tensor = torch.ones(1000)
    for step in record(range(1), folder, traced=range(1)):
        assert step == 0
        exposure = Exposure()
        if rank == 0:
            observer = report_wait(waits)
            dist.all_reduce(tensor)
            observer.join()
        else:
            until(waits.exists)
            dist.all_reduce(tensor)
        share = exposure.share()
    return share


def test_a_delayed_collective_is_exposed_and_named(tmp_path):
    share = on_ranks(delayed, str(tmp_path))[0]
    assert 0 < share <= 1
    trace = chrome.read(tmp_path)[0]
    (wait,) = of_kind(trace.spans, Kind.WAIT)
    (collective,) = of_kind(trace.spans, Kind.COLLECTIVE)
    assert wait.name == collective.name == "allreduce 3.906 KiB"
    assert exposed_share(trace.spans) > 0


def hidden(rank, size, folder):
    """Every collective has ended when it is waited for."""
    for _ in record(range(1), folder, traced=range(1)):
        exposure = Exposure()
        for _ in range(3):
            work = dist.all_reduce(torch.ones(1000), async_op=True)
            until(work.is_completed)
            work.wait()
        share = exposure.share()
    return share


def test_a_collective_that_has_ended_is_not_exposed(tmp_path):
    assert on_ranks(hidden, str(tmp_path)) == [0.0, 0.0]
    for trace in chrome.read(tmp_path):
        assert not of_kind(trace.spans, Kind.WAIT)
        assert exposed_share(trace.spans) == 0
        assert len(of_kind(trace.spans, Kind.COLLECTIVE)) == 3


def many(rank, size, folder, limit):
    recorder.SPANS_MAX = limit
    for _ in record(range(2), folder, traced=range(2)):
        for _ in range(200):
            dist.all_reduce(torch.ones(10))


def test_operations_beyond_the_flight_recorder_are_read_in_time_or_counted(tmp_path):
    on_ranks(many, str(tmp_path), 100_000)
    for trace in chrome.read(tmp_path):
        assert len(of_kind(trace.spans, Kind.COLLECTIVE)) + trace.lost == 400


def test_a_recording_stops_at_its_limit_and_says_so(tmp_path, capsys):
    on_ranks(many, str(tmp_path), 50)
    for trace in chrome.read(tmp_path):
        assert len(trace.spans) == 50
        assert trace.dropped > 0


def staged(rank, size, folder):
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    pipeline = Pipeline(layers, build("1F1B", ranks=2, microbatches=4), nn.functional.mse_loss)
    data = torch.ones(8, 16)
    for _ in record(range(2), folder, traced=range(1, 2)):
        pipeline.step(data, data)


def test_a_pipeline_shows_its_actions_and_messages(tmp_path):
    on_ranks(staged, str(tmp_path))
    for trace in chrome.read(tmp_path):
        passes = of_kind(trace.spans, Kind.FORWARD, Kind.BACKWARD)
        kinds = "FBL" if trace.rank == 1 else "FB"  # the last stage has the loss
        expected = {f"{trace.rank}{kind}{mb}" for kind in kinds for mb in range(4)}
        assert {span.name for span in passes} == expected
        operations = {s.name.split()[0] for s in of_kind(trace.spans, Kind.COLLECTIVE)}
        assert {"send", "recv", "allreduce"} <= operations


def misused(rank, size, folder):
    refused = []
    for traced in (range(0), range(0, 4, 2), range(-1, 2)):
        try:
            next(record(range(3), folder, traced=traced))
        except ValueError as error:
            refused.append(str(error))
    first = record(range(3), folder, traced=range(3))
    next(first)
    try:
        next(record(range(3), folder, traced=range(3)))
    except RuntimeError as error:
        refused.append(str(error))
    first.close()
    return refused


def test_misuse_is_refused(tmp_path):
    for refused in on_ranks(misused, str(tmp_path)):
        assert [words.partition(":")[0] for words in refused] == [
            "traced=range(0, 0)", "traced=range(0, 4, 2)", "traced=range(-1, 2)",
            "a recording is under way",
        ]  # fmt: skip


def test_without_a_folder_nothing_is_recorded_and_no_group_is_needed():
    assert list(record(iter("abc"), None)) == ["a", "b", "c"]
    with recorder.span(Kind.FORWARD, "x"):
        assert recorder.recording() is None


def test_parts_of_a_model_are_its_children_those_of_containers_and_wrappers():
    model = nn.Module()
    model.embed = nn.Embedding(4, 4)
    model.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2))
    names = ["embed", "blocks.0.0", "blocks.0.1", "blocks.1.0", "blocks.1.1"]
    assert [name for name, _ in parts(model)] == names
    wrapper = nn.Module()
    wrapper.module = model
    assert [name for name, _ in parts(wrapper)] == names
    assert [name for name, _ in parts(nn.Linear(2, 2))] == ["Linear"]
