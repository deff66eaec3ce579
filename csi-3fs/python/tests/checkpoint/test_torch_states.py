"""Models and optimizers: the same bits, dtypes and shapes, on any split of the bytes."""

import pytest
from threefs.checkpoint import CheckpointManager, LocalFiles, digest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    torch.complex64, torch.complex128,
]  # fmt: skip


def save(files, state, world_size=3):
    ranks = [CheckpointManager(files, "/c", r, world_size, attempt="a") for r in range(world_size)]
    for handle in [rank.save(1, state) for rank in ranks]:
        handle.wait(20)
    return [rank.load() for rank in ranks][-1].state


def bits(tensor):
    return tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def test_every_dtype_and_shape_is_restored_bit_for_bit(tmp_path):
    torch.manual_seed(0)
    tensors = {}
    for dtype in DTYPES:
        for shape in [(), (0,), (3, 0), (1,), (7, 5), (33, 3, 2)]:
            raw = torch.randint(0, 2, (*shape, 16), dtype=torch.uint8)
            tensors[f"{dtype} {shape}"] = raw.view(dtype)[..., 0]
    tensors["strided"] = torch.randn(64, 64)[::3, 1::2]
    tensors["transposed"] = torch.randn(20, 30).T
    tensors["conjugated"] = torch.randn(4, dtype=torch.complex64).conj()
    tensors["needs grad"] = torch.randn(3, requires_grad=True)
    tensors["nan"] = torch.tensor([float("nan"), float("-inf"), -0.0])
    back = save(LocalFiles(tmp_path), {"t": tensors})["t"]
    assert list(back) == list(tensors)
    for name, tensor in tensors.items():
        assert (back[name].dtype, back[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(bits(back[name]), bits(tensor.detach().resolve_conj())), name


def test_a_training_continues_bit_for_bit_from_its_checkpoint(tmp_path):
    def make():
        torch.manual_seed(1)
        model = torch.nn.Sequential(
            torch.nn.Linear(50, 80), torch.nn.BatchNorm1d(80), torch.nn.Linear(80, 3)
        ).to(torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.8, 0.9))
        return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)

    def train(model, optimizer, schedule, steps):
        for step in steps:
            torch.manual_seed(100 + step)
            optimizer.zero_grad()
            model(torch.randn(16, 50)).square().mean().backward()
            optimizer.step()
            schedule.step()

    whole = make()
    train(*whole, range(8))
    first = make()
    train(*first, range(4))
    files = LocalFiles(tmp_path)
    manager = CheckpointManager(files, "/c", attempt="a")
    model, optimizer, schedule = first
    manager.save(4, model=model, optimizer=optimizer, schedule=schedule).wait(20)
    train(*first, range(4, 6))  # continues after the save, and is lost

    model, optimizer, schedule = second = make()
    loaded = manager.load_latest(model=model, optimizer=optimizer, schedule=schedule)
    assert loaded.step == 4
    train(*second, range(4, 8))
    assert digest(model=model, optimizer=optimizer) == digest(model=whole[0], optimizer=whole[1])


def test_numpy_arrays_are_restored(tmp_path):
    numpy = pytest.importorskip("numpy")
    state = {
        "a": numpy.arange(12, dtype=">i4").reshape(3, 4).T,
        "scalar": numpy.float32(1.5),
        "empty": numpy.zeros((0, 3)),
    }
    back = save(LocalFiles(tmp_path), state)
    for name, array in state.items():
        assert back[name].dtype == array.dtype
        assert numpy.array_equal(back[name], array)


def test_one_bit_changes_the_digest():
    model = torch.nn.Linear(10, 10)
    before = digest(model=model)
    with torch.no_grad():
        bits(model.weight)[3] ^= 1
    assert digest(model=model) != before
