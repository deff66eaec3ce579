"""GPU memory, over a stub of the driver: arrays, the torch backend, and failures.

The stub's "device memory" is memory of the process, so a tensor over it is a CPU tensor that
reports a GPU as its device.
"""

import ctypes
import os
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import hfreduce.torch
import numpy as np
import pytest
import torch
import torch.distributed as dist
from hfreduce import CollectiveError, _native, gpu, work
from hfreduce.lifetime import is_held
from hfreduce.pairs import Pairs
from hfreduce.testing import Layout, run, values
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllToAllOptions,
    ReduceScatterOptions,
)

pytestmark = pytest.mark.torch

SOURCE = Path(__file__).parents[2] / "crates/hfreduce-device/tests/stub/cuda.c"
NUMEL = 300_001


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    """The environment in which the stub is the CUDA driver."""
    library = tmp_path_factory.mktemp("cuda") / "libcuda.so.1"
    flags = ["-std=gnu11", "-O1", "-shared", "-fPIC", "-pthread"]
    subprocess.run(["cc", *flags, SOURCE, "-o", library], check=True)
    return {"HFREDUCE_CUDA_LIBRARY": str(library)}


def stub():
    """The driver of this rank's process."""
    library = ctypes.CDLL(os.environ["HFREDUCE_CUDA_LIBRARY"])
    library.stub_device_alloc.restype = ctypes.c_uint64
    library.stub_device_alloc.argtypes = [ctypes.c_size_t]
    library.stub_count.restype = ctypes.c_long
    library.stub_fail.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_int, ctypes.c_int]
    return library


class Array:
    """An array like those of CuPy and numba, with `__cuda_array_interface__`."""

    def __init__(self, library, values, **overrides):
        size = values.nbytes
        pointer = library.stub_device_alloc(size)
        buffer = (ctypes.c_char * max(size, 1)).from_address(pointer)
        self.host = np.frombuffer(buffer, values.dtype, values.size).reshape(values.shape)
        self.host[...] = values
        self.interface = {
            "shape": values.shape,
            "typestr": values.dtype.str,
            "data": (pointer, False),
            "version": 3,
            **overrides,
        }

    @property
    def __cuda_array_interface__(self):
        return self.interface


class OnStub(torch.Tensor):
    """A tensor that is on the stub's GPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    is_cpu, is_cuda = False, True

    @property
    def device(self):
        return torch.device("cuda", 0)

    def get_device(self):
        return 0


def on_stub(library, values):
    tensor = torch.from_numpy(Array(library, values.numpy()).host)
    return torch.Tensor._make_subclass(OnStub, tensor)


def plain(tensor):
    return tensor.as_subclass(torch.Tensor).clone()


def clean(library):
    """Checks that no copy was late and no kernel ran."""
    counts = [library.stub_count(counter) for counter in (b"violations", b"launches")]
    assert counts == [0, 0], counts
    # The worker releases an operation a moment after its caller was notified.
    wait_until(lambda: not is_held())
    return True


def wait_until(holds):
    until = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < until, "memory is still held after 60 s"
        time.sleep(0.001)


def barrier(rank, size, where):
    """Waits for all ranks through the store, so that a later failure affects no other rank."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"{where}/{rank}", "present")
    store.wait([f"{where}/{other}" for other in range(size)])


def ranks(function, layout, driver, **options):
    """The values of all ranks; the deadline allows for loading torch from a slow disk."""
    return values(run(function, layout, environment=driver, deadline_seconds=100.0, **options))


def reduce_arrays(rank, size):
    library, group = stub(), hfreduce.torch.communicator()
    for dtype in (np.float32, np.float64, np.float16, np.int32, np.uint8):
        array = Array(library, np.full((5, 7), rank + 1, dtype), stream=1)
        hfreduce.allreduce(array, group)
        assert (array.host == sum(range(1, size + 1))).all(), dtype
    large = Array(library, np.arange(NUMEL, dtype=np.float32))
    hfreduce.allreduce(large, group, op="max", stream=2)
    assert (large.host == np.arange(NUMEL)).all()
    hfreduce.allreduce(Array(library, np.zeros((0, 3), np.float32)), group)
    stats = gpu.opened(0).stats()
    assert stats["from_gpu_bytes"] == stats["to_gpu_bytes"] > NUMEL * 4
    return clean(library)


def test_arrays_of_gpus_are_reduced_in_place(driver):
    assert ranks(reduce_arrays, Layout.two_zones(1, 2), driver) == [True] * 4


def reduce_small_arrays(rank, size):
    """Ranks with and without GDRCopy get the same sums."""
    library, group = stub(), hfreduce.torch.communicator()
    if rank == 0:
        gpu._settings.cache_clear()
        os.environ["HFREDUCE_GDRCOPY"] = "off"
    for _ in range(3):
        array = Array(library, np.full(1000, rank + 1, np.float32))
        hfreduce.allreduce(array, group)
        assert (array.host == sum(range(1, size + 1))).all()
    device = gpu.opened(0)
    reason, stats = device.without_gdrcopy, device.stats()
    assert (reason is None) == (rank != 0), reason
    assert stats["by_processor_bytes"] == (3 * 2 * 4000 if rank else 0)
    return clean(library)


def test_small_arrays_are_copied_by_the_processor_with_gdrcopy(driver):
    driver = driver | {"HFREDUCE_GDRCOPY": driver["HFREDUCE_CUDA_LIBRARY"]}
    assert ranks(reduce_small_arrays, Layout.one_node(2), driver) == [True] * 2


def has_no_cuda(daemon):
    """Whether the daemon has not loaded the driver."""
    return "libcuda" not in Path(f"/proc/{daemon.pid}/maps").read_text(encoding="utf-8")


def test_arrays_of_gpus_are_reduced_through_daemons(driver, daemons):
    first, second = daemons(), daemons()
    served = {
        0: first.environment,
        1: first.environment,
        2: second.environment,
    }
    outcome = ranks(reduce_arrays, Layout.two_zones(1, 2), driver, per_rank=served)
    assert outcome == [True] * 4
    driver = driver | {"HFREDUCE_GDRCOPY": driver["HFREDUCE_CUDA_LIBRARY"]} | first.environment
    assert ranks(reduce_small_arrays, Layout.one_node(2), driver) == [True] * 2
    assert has_no_cuda(first)
    assert has_no_cuda(second)


def refuse_arrays(rank, size):
    library, group = stub(), hfreduce.torch.communicator()
    ones = np.ones((4, 4), np.float32)
    pointer = Array(library, ones).interface["data"][0]
    for error, overrides in (
        (ValueError, {"data": (pointer, True)}),
        (ValueError, {"strides": (4, 16)}),
        (ValueError, {"data": (ones.ctypes.data, False)}),
        (TypeError, {"typestr": "<c8"}),
        (TypeError, {"typestr": ">f4"}),
    ):
        with pytest.raises(error, match="Array"):
            hfreduce.allreduce(Array(library, ones, **overrides), group)
    return clean(library)


def test_arrays_that_cannot_be_used_are_refused(driver):
    assert ranks(refuse_arrays, Layout.one_node(1), driver) == [True]


def rank_without_a_gpu(rank, size):
    library, group = stub(), hfreduce.torch.communicator()
    barrier(rank, size, "connected")
    if rank == 0:
        library.stub_fail(b"cuStreamCreate", 1, 2, 0)
    expected = (_native.GpuError, CollectiveError)[rank]
    with pytest.raises(expected, match="OUT_OF_MEMORY") as raised:
        hfreduce.allreduce(Array(library, np.ones(9, np.float32)), group)
    if rank == 0:
        assert (raised.value.call, raised.value.code) == ("cuStreamCreate", 2)
    else:
        assert (raised.value.kind, raised.value.peer) == ("aborted", 0)
    return True


def test_a_gpu_that_cannot_be_opened_aborts_the_other_ranks(driver):
    assert ranks(rank_without_a_gpu, Layout.one_node(2), driver) == [True] * 2


def test_missing_gdrcopy_is_reported_with_the_reason():
    assert "off" in _native.without_gdrcopy("off")
    assert "libgdrapi-absent" in _native.without_gdrcopy("libgdrapi-absent.so")


def test_the_error_for_a_missing_driver_names_it():
    with pytest.raises(_native.GpuError, match="HFREDUCE_CUDA_LIBRARY") as raised:
        _native.Gpu(0, library="libcuda-absent.so.1")
    assert (raised.value.call, raised.value.device, raised.value.code) == (None, -1, None)


def content(rank, numel=NUMEL):
    return ((torch.arange(numel) * 7 + rank * 3) % 5).float()


def backend_operations(rank, size):
    """Every collective of the backend, on tensors that report a GPU as their device."""
    synchronized, devices_of_futures = [], []

    def stream(device):
        return SimpleNamespace(cuda_stream=0, synchronize=lambda: synchronized.append(device))

    def future(devices=None, of=work.Future):
        # torch would create events of the real driver for these devices.
        devices_of_futures.append(devices)
        return of()

    torch.cuda.current_stream, work.Future = stream, future
    library, members = stub(), range(size)
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert dist.group.WORLD._get_backend(torch.device("cuda")) is backend

    def place(tensor):
        return on_stub(library, tensor)

    total = sum(content(r) for r in members)
    tensor = place(content(rank))
    backend.allreduce([tensor], dist.AllreduceOptions()).wait()
    assert torch.equal(plain(tensor), total)
    # DDP waits for the future.
    tensor = place(content(rank))
    reduced = backend.allreduce([tensor], dist.AllreduceOptions()).get_future()
    assert torch.equal(plain(reduced.wait()[0]), total)
    # With its devices torch orders the streams of callbacks and waiters.
    assert devices_of_futures == [[torch.device("cuda", 0)]]
    backend.barrier(dist.BarrierOptions()).wait()
    assert synchronized == [0]
    several = [place(content(rank, numel)) for numel in (3, 5, 70_001)]
    backend.allreduce_coalesced(several, dist.AllreduceCoalescedOptions()).wait()
    assert torch.equal(plain(several[2]), sum(content(r, 70_001) for r in members))
    # A CPU tensor in between: operations on all devices have one order.
    host = content(rank)
    dist.all_reduce(host, async_op=True).get_future().wait()
    assert torch.equal(host, total)
    assert devices_of_futures[1:] == [None]
    tensor, options = place(content(rank)), dist.BroadcastOptions()
    options.rootRank = size - 1
    backend.broadcast([tensor], options).wait()
    assert torch.equal(plain(tensor), content(size - 1))
    tensor, options = place(content(rank)), dist.ReduceOptions()
    options.rootRank = 0
    backend.reduce([tensor], options).wait()
    assert torch.equal(plain(tensor), total if rank == 0 else content(rank))
    output = place(torch.zeros(size * NUMEL))
    backend.all_gather_single(output, place(content(rank)), AllgatherOptions()).wait()
    assert torch.equal(plain(output), torch.cat([content(r) for r in members]))
    output = place(torch.zeros(11))
    backend.reduce_scatter_single(
        output, place(content(rank, 11 * size)), ReduceScatterOptions()
    ).wait()
    whole = sum(content(r, 11 * size) for r in members)
    assert torch.equal(plain(output), whole[rank * 11 : rank * 11 + 11])
    output = place(torch.zeros(3 * size))
    backend.all_to_all_single(
        output, place(content(rank, 3 * size)), [], [], AllToAllOptions()
    ).wait()
    rows = [content(r, 3 * size)[rank * 3 : rank * 3 + 3] for r in members]
    assert torch.equal(plain(output), torch.cat(rows))
    message, peer = place(content(rank, 100)), (rank + 1) % size
    send_work = backend.send([message], peer, 0)
    backend.recv([received := place(torch.zeros(100))], (rank - 1) % size, 0).wait()
    send_work.wait()
    assert torch.equal(plain(received), content((rank - 1) % size, 100))
    with pytest.raises(ValueError, match="cpu, cuda:0"):
        backend.all_gather_single(torch.zeros(size), place(torch.ones(1)), AllgatherOptions())
    return clean(library)


def test_the_backend_accepts_gpu_tensors(driver):
    backend = "cpu:hfreduce,cuda:hfreduce"
    outcome = ranks(backend_operations, Layout.two_zones(1, 2), driver, backend=backend)
    assert outcome == [True] * 4


def a_failing_gpu(rank, size):
    library, group = stub(), hfreduce.torch.communicator()
    array = Array(library, np.ones(NUMEL, np.float32))
    hfreduce.allreduce(array, group)
    barrier(rank, size, "first")
    if rank == 1:
        library.stub_fail(b"cuMemcpyDtoHAsync_v2", 1, 700, 0)
    with pytest.raises(CollectiveError) as raised:
        hfreduce.allreduce(array, group)
    error = raised.value
    assert (error.kind, error.peer) == ("device", 1), error
    assert "cuMemcpyDtoHAsync_v2 on device 0" in error.detail, error
    assert "ILLEGAL_ADDRESS (700)" in error.detail, error
    return clean(library)


def test_a_gpu_that_fails_is_named_on_every_rank(driver):
    assert ranks(a_failing_gpu, Layout.one_node(3), driver) == [True] * 3


def test_the_backend_accepts_gpu_tensors_through_a_daemon(driver, daemons):
    environment = driver | daemons().environment
    backend = "cpu:hfreduce,cuda:hfreduce"
    outcome = ranks(backend_operations, Layout.one_node(2), environment, backend=backend)
    assert outcome == [True] * 2


def test_a_gpu_that_fails_is_named_through_a_daemon(driver, daemons):
    daemon = daemons()
    environment = driver | daemon.environment
    for _ in range(2):  # the daemon serves the next group
        assert ranks(a_failing_gpu, Layout.one_node(3), environment) == [True] * 3
    assert has_no_cuda(daemon)


def a_hung_gpu(rank, size):
    library, group = stub(), hfreduce.torch.communicator()
    array = Array(library, np.ones(NUMEL, np.float32))
    if rank == 0:
        library.stub_allow(0, 1)
    with pytest.raises(CollectiveError) as raised:
        hfreduce.allreduce(array, group, timeout_seconds=5.0)
    assert (raised.value.kind, raised.value.peer) == ("timed_out", 0), raised.value
    if rank == 0:
        # The array's memory is not freed while the GPU may write to it.
        del array
        assert is_held()
        library.stub_allow(0, -1)
        wait_until(lambda: not is_held())
    return clean(library)


def test_a_hung_gpu_is_reported_in_time_and_its_memory_is_kept(driver, daemons):
    assert ranks(a_hung_gpu, Layout.one_node(2), driver) == [True] * 2
    served = driver | daemons().environment
    assert ranks(a_hung_gpu, Layout.one_node(2), served) == [True] * 2


def reduce_in_pairs(rank, size):
    """On the CPU, where HFReduce also reduces inside the pairs; with NVLink, NCCL does that."""
    pairs = Pairs.join([(0, 2), (1, 3)], pair_backend="hfreduce")
    assert (pairs.pair.size(), pairs.halves.size()) == (2, 2)
    for numel in (1, 2, 7, 70_001):
        tensor = content(rank, numel)
        pairs.all_reduce(tensor)
        assert torch.equal(tensor, sum(content(r, numel) for r in range(size))), numel
        pairs.all_reduce(maximum := content(rank, numel), dist.ReduceOp.MAX)
        assert torch.equal(maximum, torch.stack([content(r, numel) for r in range(size)]).amax(0))
    with pytest.raises(ValueError, match="contiguous"):
        pairs.all_reduce(torch.zeros(4, 4).t())
    with pytest.raises(ValueError, match="AVG"):
        pairs.all_reduce(torch.zeros(4), dist.ReduceOp.AVG)
    with pytest.raises(ValueError, match="each of the 4 ranks must be in exactly one pair"):
        Pairs.join([(0, 1)])
    return True


def test_pairs_reduce_inside_before_they_reduce_across():
    assert ranks(reduce_in_pairs, Layout.two_zones(1, 2), {}) == [True] * 4
