"""Futures and works of torch: independent of each other's order, of callbacks and of waiters."""

import gc
import os
import signal
import threading
import time
import weakref
from datetime import timedelta

import hfreduce.torch
import numpy as np
import pytest
import torch
import torch.distributed as dist
from hfreduce import CollectiveError
from hfreduce.testing import Layout, run, values

pytestmark = pytest.mark.torch

ONE_NODE, TWO_NODES = Layout.one_node(2), Layout.two_zones(1, 1)
LAYOUTS = pytest.mark.parametrize("layout", [ONE_NODE, TWO_NODES], ids=["one-node", "two-nodes"])
SECONDS = 60


def store():
    return dist.distributed_c10d._get_default_store()


def polled(work):
    until = time.monotonic() + SECONDS
    while not work.is_completed():
        assert time.monotonic() < until, "never completed"
        time.sleep(0.001)


def overtakes(rank, size):
    """Rank 0 requests the future of a receive first, then that of a finished allreduce."""
    message, tensor = torch.zeros(4), torch.ones(4)
    if rank == 0:
        receive = dist.irecv(message, 1)
        received = receive.get_future()
        dist.all_reduce(tensor, async_op=True).get_future().wait()
        assert not received.done()
        store().set("sent", "now")
        assert received.wait()[0].eq(7).all()
    else:
        dist.all_reduce(tensor)
        store().wait(["sent"], timedelta(seconds=SECONDS))
        dist.send(torch.full((4,), 7.0), 0)
    return tensor.eq(size).all().item()


@LAYOUTS
def test_the_future_of_a_finished_operation_does_not_wait_for_earlier_ones(layout):
    assert values(run(overtakes, layout)) == [True] * 2


def blocks_in_callbacks(rank, size, depth):
    """A callback waits for another operation, whose callback waits for the next one, …"""
    totals = []

    def again(future, remaining):
        totals.append(future.value()[0].item())
        if remaining:
            tensor = torch.tensor([float(remaining)])
            following = dist.all_reduce(tensor, async_op=True).get_future()
            following.then(lambda future: again(future, remaining - 1)).wait()
        return future.value()

    first = dist.all_reduce(torch.tensor([100.0]), async_op=True).get_future()
    first.then(lambda future: again(future, depth)).wait()
    return totals


@LAYOUTS
def test_callbacks_may_wait_for_other_operations(layout):
    expected = [200.0] + [2.0 * remaining for remaining in range(20, 0, -1)]
    assert values(run(blocks_in_callbacks, layout, 20)) == [expected] * 2


def blocked_callback(rank, size):
    """A blocking callback delays no other future, and ends with the test's event."""
    release = threading.Event()
    first = dist.irecv(torch.zeros(1), 1 - rank).get_future()
    blocked = first.then(lambda future: release.wait(SECONDS))
    # torch would run the callback of a completed future on this thread.
    store().set(f"waits/{rank}", "1")
    store().wait([f"waits/{1 - rank}"], timedelta(seconds=SECONDS))
    dist.send(torch.ones(1), 1 - rank)
    for _ in range(50):
        total = dist.all_reduce(torch.ones(1), async_op=True).get_future().wait()
        assert total[0].item() == size
    assert not blocked.done()
    release.set()
    assert blocked.wait()
    return len([t for t in threading.enumerate() if t.name == "hfreduce-futures"]) <= 4


def test_a_callback_that_blocks_delays_no_other_future():
    assert values(run(blocked_callback, ONE_NODE)) == [True] * 2


def raising_callback(rank, size):
    future = dist.all_reduce(torch.ones(1), async_op=True).get_future()

    def fail(_):
        raise KeyError("from a callback")

    with pytest.raises(RuntimeError, match="from a callback"):
        future.then(fail).wait()
    return dist.all_reduce(torch.ones(1), async_op=True).get_future().wait()[0].item()


def test_a_callback_that_raises_ends_only_its_own_future():
    assert values(run(raising_callback, ONE_NODE)) == [2.0] * 2


def errors_reach_futures(rank, size):
    group = dist.new_group()  # with time for the other rank to come
    dist.set_timeout(timedelta(seconds=1), group)
    if rank == 0:
        futures = [
            dist.irecv(torch.zeros(1), 1, group=group, tag=tag).get_future() for tag in (1, 2)
        ]
        work = dist.irecv(torch.zeros(1), 1, group=group, tag=3)
        for future in futures:
            with pytest.raises(RuntimeError, match=r"the timeout of 1\.0 s"):
                future.wait()
        polled(work)
        assert not work.is_success()
        assert isinstance(work.exception(), CollectiveError)
    store().set(f"done/{rank}", "1")
    store().wait(["done/0"], timedelta(seconds=SECONDS))
    return True


def test_an_error_reaches_every_future_and_work():
    assert values(run(errors_reach_futures, ONE_NODE)) == [True] * 2


def completes_with_outputs(rank, size):
    """Polls and reads immediately, without a wait: each output is in place."""
    expected = [float(other) for other in range(size)]
    own = torch.full((70_000,), float(rank))
    apart = [torch.full((70_000,), -1.0) for _ in range(size)]
    strided = [torch.full((70_000, 2), -1.0)[:, 0] for _ in range(size)]
    for outputs in (apart, strided):
        work = dist.all_gather(outputs, own, async_op=True)
        polled(work)
        assert work.is_success()
        assert [output[-1].item() for output in outputs] == expected
        assert all(output.eq(value).all() for output, value in zip(outputs, expected, strict=True))
        outputs[0].fill_(-1)
        unawaited = dist.all_gather(outputs, own, async_op=True)
        del unawaited
        dist.barrier()
        until = time.monotonic() + SECONDS
        while not outputs[0].eq(0).all():
            assert time.monotonic() < until, "a work without a waiter never delivers"
    outputs = [torch.full((3, 2), -1.0).t() for _ in range(size)]
    work = dist.all_to_all(outputs, [torch.full((2, 3), rank + 10.0)] * size, async_op=True)
    polled(work)
    assert [output[0, 0].item() for output in outputs] == [10.0 + other for other in range(size)]
    if rank == 0:
        outputs = [torch.full((4, 2), -1.0)[:, 1] for _ in range(size)]
        work = dist.gather(torch.full((4,), 5.0), outputs, async_op=True)
        polled(work)
        assert all(output.eq(5).all() for output in outputs)
    else:
        dist.gather(torch.full((4,), 5.0), dst=0)
    return True


@LAYOUTS
def test_a_completed_work_has_its_outputs_in_place(layout):
    assert values(run(completes_with_outputs, layout)) == [True] * 2


class Interrupted(BaseException):
    pass


def drops_it(tensor):
    dist.all_reduce(tensor, async_op=True)
    time.sleep(SECONDS)


CALLS = {
    "wait": dist.all_reduce,
    "future": drops_it,
    "gather": lambda tensor: dist.all_gather([tensor, tensor + 0], torch.zeros_like(tensor)),
}


def signal_once_started():
    """Sends SIGALRM to the main thread once its operation has started, which does not end."""
    while hfreduce.torch.communicator().flight()["entries"][-1]["state"] != "started":
        time.sleep(0.001)
    signal.pthread_kill(threading.main_thread().ident, signal.SIGALRM)


def why_kept(memory):
    """What refers to memory, and the newest operations."""
    entries = hfreduce.torch.communicator().flight()["entries"]
    referrers = [str(type(each)) for each in gc.get_referrers(memory)]
    return referrers, [(each["operation"], each["state"]) for each in entries[-2:]]


def interrupted(rank, size, how):
    """A signal handler raises during a wait: the tensor is kept until the sum is written."""
    numel = 1 << 18
    dist.all_reduce(torch.ones(1))
    if rank == 0:

        def handler(number, frame):
            raise Interrupted

        memory = np.full(numel, 1.0, np.float32)
        dropped = weakref.ref(memory)
        tensor = torch.from_numpy(memory)
        del memory
        signal.signal(signal.SIGALRM, handler)
        threading.Thread(target=signal_once_started, daemon=True).start()
        with pytest.raises(Interrupted):
            CALLS[how](tensor)
        del tensor
        gc.collect()
        assert dropped() is not None, "freed while the engine writes to it"
        store().set("go", "1")
        until = time.monotonic() + SECONDS
        while dropped() is not None:
            assert time.monotonic() < until, ("never freed", why_kept(dropped()))
            hfreduce.torch.communicator().error()  # runs the pending drops of other threads
            gc.collect()  # the work and its future, if the handler interrupted the script's call
            time.sleep(0.001)
    else:
        store().wait(["go"], timedelta(seconds=SECONDS))
        tensor = torch.ones(numel)
        if how == "gather":
            dist.all_gather([torch.zeros(numel), torch.zeros(numel)], tensor)
        else:
            dist.all_reduce(tensor)
    # The group works as before.
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()


@LAYOUTS
@pytest.mark.parametrize("how", ["wait", "future", "gather"])
def test_an_exception_of_a_signal_handler_frees_no_memory_in_use(layout, how):
    assert values(run(interrupted, layout, how)) == [2.0] * 2


def in_a_child(act):
    """The output of a forked child."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            text = act()
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writer, str(text).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answers:
        text = answers.read()
    os.waitpid(child, 0)
    return text


def forked(rank, size):
    ended = dist.all_reduce(torch.ones(1), async_op=True)
    ended.wait()
    if rank == 0:
        work = dist.all_reduce(torch.ones(4), async_op=True)
        for act in (
            work.wait,
            lambda: work.get_future().wait(),
            lambda: dist.all_reduce(torch.ones(1)),
        ):
            assert "connect after forking" in in_a_child(act)
        abort = in_a_child(lambda: hfreduce.torch.communicator().abort("from a child"))
        assert abort.startswith("RuntimeError: a forked child cannot abort"), abort
        assert "cannot abort" in in_a_child(
            dist.group.WORLD._get_backend(torch.device("cpu")).abort
        )
        assert in_a_child(ended.wait) == "True"
        store().set("go", "1")
        work.wait()
    else:
        store().wait(["go"], timedelta(seconds=SECONDS))
        dist.all_reduce(torch.ones(4))
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    return tensor.item()


@LAYOUTS
def test_a_forked_child_can_neither_wait_nor_abort(layout):
    assert values(run(forked, layout)) == [2.0] * 2


def many_messages(rank, size, count):
    """All receives are posted before the sends; then receives in another order than the sends."""
    peer = 1 - rank
    received, inputs = torch.zeros(count, 1), torch.arange(float(count)).view(count, 1)
    operations = [dist.P2POp(dist.irecv, row, peer) for row in received]
    operations += [dist.P2POp(dist.isend, row, peer) for row in inputs]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert torch.equal(received, inputs)
    # By tag, the last first: no message delays one that is received earlier.
    tags = range(2000)
    works = [dist.isend(inputs[tag], peer, tag=tag) for tag in tags]
    works += [dist.irecv(received[tag], peer, tag=tag) for tag in reversed(tags)]
    for work in works:
        work.wait()
    return True


@LAYOUTS
def test_ten_thousand_outstanding_messages_complete(layout):
    assert values(run(many_messages, layout, 10_000, deadline_seconds=100.0)) == [True] * 2


@pytest.mark.soak
@pytest.mark.timeout(400, func_only=True)
def test_a_hundred_thousand_outstanding_messages_complete():
    outcome = run(many_messages, ONE_NODE, 100_000, timeout_seconds=200, deadline_seconds=300.0)
    assert values(outcome) == [True] * 2


def many_collectives(rank, size):
    tensors = torch.ones(3000, 2)
    works = [dist.all_reduce(row, async_op=True) for row in tensors]
    futures = [work.get_future() for work in works[::2]]
    for future in reversed(futures):
        future.wait()
    for work in works:
        work.wait()
    return tensors.eq(size).all().item()


def test_thousands_of_outstanding_collectives_complete():
    assert values(run(many_collectives, ONE_NODE)) == [True] * 2


def ends_by_abort(rank, size):
    """Messages that never arrive: an abort ends every wait of a work and of a future."""
    works = [dist.irecv(torch.zeros(1), 1 - rank) for _ in range(2000)]
    future = works[1000].get_future()
    store().set(f"posted/{rank}", "1")
    store().wait([f"posted/{other}" for other in range(size)])
    if rank == 0:
        dist.group.WORLD._get_backend(torch.device("cpu")).abort()
    with pytest.raises(CollectiveError, match="rank 0 aborted"):
        works[0].wait()
    with pytest.raises(RuntimeError, match="rank 0 aborted"):
        future.wait()
    for work in works:
        polled(work)
        assert not work.is_success()
    return True


def test_an_abort_ends_all_waits():
    assert values(run(ends_by_abort, ONE_NODE)) == [True] * 2
