"""Conversion of tensors to the engine's (pointer, count, type).

A tensor that cannot be used in place gets an error here, before anything is sent: a wrong guess
would write to unrelated memory.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import torch
from torch.distributed import ReduceOp

from hfreduce import _native

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import timedelta

__all__ = [
    "PREMUL_SUM",
    "Buffer",
    "Place",
    "Terms",
    "consecutive",
    "counts",
    "for_reduction",
    "for_transport",
    "gathered",
    "in_place_reduction",
    "into",
    "joined",
    "one_each",
    "operation_code",
    "place",
    "premultiplied",
    "read",
    "registered",
    "root",
    "same_shape",
    "shares",
    "single",
    "unit",
    "whole_shares",
    "written",
]

Place: TypeAlias = "int | list[tuple[int, int]]"
"""Addresses of the blocks of several ranks: contiguous, or (address, elements) each."""

_DTYPES: dict[torch.dtype, int] = {
    torch.float32: _native.FLOAT32,
    torch.bfloat16: _native.BFLOAT16,
    torch.float16: _native.FLOAT16,
    torch.float64: _native.FLOAT64,
    torch.int32: _native.INT32,
    torch.int64: _native.INT64,
    torch.uint8: _native.UINT8,
    torch.int8: _native.INT8,
    torch.float8_e4m3fn: _native.FLOAT8_E4M3FN,
    torch.float8_e5m2: _native.FLOAT8_E5M2,
    torch.int16: _native.INT16,
    torch.uint16: _native.UINT16,
    torch.uint32: _native.UINT32,
    torch.uint64: _native.UINT64,
}

_COMPLEX: dict[torch.dtype, int] = {
    torch.complex64: _native.FLOAT32,
    torch.complex128: _native.FLOAT64,
}

PREMUL_SUM: Final = -1
"""Stands for torch's reduction with a factor, which the engine does not have."""

_OPERATIONS: dict[int, int] = {
    ReduceOp.SUM.value: _native.SUM,
    ReduceOp.AVG.value: _native.AVG,
    ReduceOp.PRODUCT.value: _native.PRODUCT,
    ReduceOp.MIN.value: _native.MIN,
    ReduceOp.MAX.value: _native.MAX,
    ReduceOp.BAND.value: _native.BAND,
    ReduceOp.BOR.value: _native.BOR,
    ReduceOp.BXOR.value: _native.BXOR,
    ReduceOp.PREMUL_SUM.value: PREMUL_SUM,
}
"""By torch's number: its enumeration is slow to hash and to compare."""

# On 0 and 1 in a byte these are the same, and they keep a byte other than 0 or 1 from appearing.
_BOOLEAN: dict[int, int] = {
    _native.SUM: _native.MAX,
    _native.MAX: _native.MAX,
    _native.BOR: _native.MAX,
    _native.PRODUCT: _native.MIN,
    _native.MIN: _native.MIN,
    _native.BAND: _native.MIN,
    _native.BXOR: _native.BXOR,
}

_BITWISE = frozenset({_native.BAND, _native.BOR, _native.BXOR})


class Buffer(NamedTuple):
    """Memory as the engine sees it; a tuple, as one is made for every call."""

    pointer: int
    numel: int
    dtype: int
    op: int = _native.SUM


def registered(communicator: _native.Communicator, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """A flat tensor of zeros that the ranks of this machine reduce in place."""
    if numel == 0:
        return torch.empty(0, dtype=dtype)
    memory = communicator.allocate(numel * dtype.itemsize)
    return torch.frombuffer(memory, dtype=dtype, count=numel)


def operation_code(op: ReduceOp) -> int:
    """The engine's number of a reduction; `PREMUL_SUM` is not the engine's, see `premultiplied`."""
    code = _OPERATIONS.get(op.op.value)
    if code is None:
        raise ValueError(
            f"hfreduce has no {op.op}: use SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR, PREMUL_SUM"
        )
    return code


def premultiplied(tensor: torch.Tensor, op: ReduceOp, operation: str) -> torch.Tensor:
    """Copy for PREMUL_SUM, multiplied by this rank's factor; it is then reduced with SUM."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        raise TypeError(f"{operation}: PREMUL_SUM needs a floating-point type, not {tensor.dtype}")
    # torch exposes the factor only to pickle.
    state: Any = op.__getstate__()
    factor = state[1]
    if isinstance(factor, torch.Tensor):
        factor = factor.to(tensor.device)
    with torch.no_grad():
        scaled: torch.Tensor = tensor.detach() * factor
        return scaled.to(tensor.dtype).contiguous()


def for_reduction(tensor: torch.Tensor, operation: str, op: int) -> Buffer:
    """The memory of a contiguous tensor for an operation that computes with it."""
    pointer, numel, dtype = tensor.data_ptr(), tensor.numel(), tensor.dtype
    code = _DTYPES.get(dtype)
    if op == PREMUL_SUM:
        op = _native.SUM
    if op == _native.AVG and not (dtype.is_floating_point or dtype.is_complex):
        raise TypeError(
            f"{operation}: AVG needs a floating-point type, not {dtype}: sum, and divide by the "
            "number of ranks"
        )
    if code is not None:
        if op in _BITWISE and dtype.is_floating_point:
            raise TypeError(f"{operation}: bitwise operations need an integer type, not {dtype}")
        return Buffer(pointer, numel, code, op)
    if dtype is torch.bool and op in _BOOLEAN:
        return Buffer(pointer, numel, _native.UINT8, _BOOLEAN[op])
    if dtype in _COMPLEX and op in (_native.SUM, _native.AVG):
        return Buffer(pointer, 2 * numel, _COMPLEX[dtype], op)
    valid = ", ".join(str(valid).removeprefix("torch.") for valid in _DTYPES)
    raise TypeError(f"{operation}: cannot reduce {dtype} with this operation; known are {valid}")


def in_place_reduction(
    tensor: torch.Tensor, op: ReduceOp, operation: str
) -> tuple[Buffer, torch.Tensor, Callable[[], object] | None]:
    """For a tensor that is reduced in place: the buffer, and `written`'s tensor and function."""
    code = operation_code(op)
    memory, finish = written(tensor, operation)
    if code == PREMUL_SUM:
        memory = premultiplied(tensor, op, operation)
        finish = into(tensor, memory)
    return for_reduction(memory, operation, code), memory, finish


def for_transport(tensor: torch.Tensor) -> Buffer:
    """The memory of a contiguous tensor for an operation that only moves it: any type will do."""
    code = _DTYPES.get(tensor.dtype)
    if code is None:
        return Buffer(tensor.data_ptr(), tensor.nbytes, _native.UINT8)
    return Buffer(tensor.data_ptr(), tensor.numel(), code)


def written(
    tensor: torch.Tensor, operation: str
) -> tuple[torch.Tensor, Callable[[], object] | None]:
    """A contiguous tensor to read and write, and how its content gets back (None: it is `tensor`).

    A tensor that is not contiguous is copied: its elements travel in their logical order, so ranks
    whose strides differ agree.
    """
    _check(tensor, operation)
    if tensor.is_contiguous():
        return tensor, None
    if _overlaps_itself(tensor):
        raise ValueError(
            f"{operation}: several elements of the tensor of shape {tuple(tensor.shape)} share "
            f"memory (strides {tuple(tensor.stride())}), as an expanded one's do: reduce "
            "tensor.contiguous()"
        )
    copy = tensor.detach().contiguous()
    return copy, into(tensor, copy)


def into(tensor: torch.Tensor, copy: torch.Tensor) -> Callable[[], object]:
    """Copies the content of one tensor into another when called."""

    def finish() -> None:
        with torch.no_grad():
            tensor.copy_(copy)
        if tensor.is_cuda:
            # The waiting thread's stream need not be the reader's.
            torch.cuda.current_stream(tensor.device).synchronize()

    return finish


def read(tensor: torch.Tensor, operation: str) -> torch.Tensor:
    """A contiguous tensor with the same content."""
    _check(tensor, operation)
    return tensor if tensor.is_contiguous() else tensor.detach().contiguous()


def unit(dtype: torch.dtype) -> tuple[int, int]:
    """The engine's type that moves one of torch's, and how many of it make one element."""
    code = _DTYPES.get(dtype)
    return (_native.UINT8, dtype.itemsize) if code is None else (code, 1)


class Terms(NamedTuple):
    """Options of a reduction that is part of another operation."""

    reduceOp: ReduceOp  # noqa: N815  (torch's names)
    rootRank: int  # noqa: N815
    timeout: timedelta
    asyncOp: bool  # noqa: N815


def one_each(tensors: Sequence[torch.Tensor], ranks: int, operation: str) -> None:
    """Checks that there is one tensor for each rank."""
    if len(tensors) != ranks:
        raise ValueError(f"{operation}: got {len(tensors)} tensors, expected {ranks}, one per rank")


def root(rank: int, ranks: int, operation: str) -> int:
    """The root's rank in the group; refuses one that the group does not have."""
    if not 0 <= rank < ranks:
        raise ValueError(f"{operation}: invalid root rank {rank}: expected 0 to {ranks - 1}")
    return rank


def single(tensors: Sequence[torch.Tensor], operation: str) -> torch.Tensor:
    """The one tensor of a list; torch's interface has lists for historical reasons."""
    if len(tensors) != 1:
        raise ValueError(f"{operation}: expected one tensor per rank, got {len(tensors)}")
    return tensors[0]


def single_list(lists: Sequence[list[torch.Tensor]], operation: str) -> list[torch.Tensor]:
    """The one list of a list of lists, with a tensor of each rank."""
    if len(lists) != 1:
        raise ValueError(
            f"{operation}: takes one list with a tensor of each rank, not {len(lists)} lists"
        )
    return lists[0]


def same_shape(
    tensors: Sequence[torch.Tensor], like: torch.Tensor, count: int, operation: str
) -> None:
    """Checks that there are `count` tensors of the size and type of `like`."""
    if len(tensors) != count:
        raise ValueError(f"{operation}: {len(tensors)} tensors for {count} ranks")
    for index, tensor in enumerate(tensors):
        if tensor.numel() != like.numel() or tensor.dtype != like.dtype:
            raise ValueError(
                f"{operation}: tensor {index} has {tensor.numel()} x {tensor.dtype}, expected "
                f"{like.numel()} x {like.dtype}: all must be of one size and type"
            )


def whole_shares(operation: str, whole: torch.Tensor, share: torch.Tensor, ranks: int) -> None:
    """Checks that `whole` has one `share` for each rank."""
    if whole.dtype != share.dtype or whole.numel() != share.numel() * ranks:
        raise ValueError(
            f"{operation}: {whole.numel()} x {whole.dtype} is not {ranks} times "
            f"{share.numel()} x {share.dtype}"
        )


def counts(tensor: torch.Tensor, splits: Sequence[int], ranks: int) -> list[int]:
    """Elements for each rank: of the given rows, or of equal shares of all."""
    rows = tensor.size(0) if tensor.dim() else tensor.numel()
    row = tensor.numel() // rows if rows else 0
    if not splits:
        if rows % ranks:
            raise ValueError(
                f"all_to_all_single: {rows} rows do not split evenly over {ranks} ranks"
            )
        return [rows // ranks * row] * ranks
    if len(splits) != ranks or sum(splits) != rows or min(splits) < 0:
        raise ValueError(
            f"all_to_all_single: splits {list(splits)} do not add up to {rows} rows "
            f"for {ranks} ranks"
        )
    return [split * row for split in splits]


def place(
    blocks: Sequence[torch.Tensor],
    operation: str,
    *,
    sources: Sequence[torch.Tensor] = (),
    own: int | None = None,
) -> Place | None:
    """Where blocks of several ranks lie, or None where the engine cannot use them as they lie.

    They must be contiguous and, where `sources` are read while they are written, apart from these
    and from each other; block `own` may be a source itself.
    """
    for tensor in blocks:
        _check(tensor, operation)
    if sources and not _apart(blocks, sources, own):
        return None
    if consecutive(blocks):
        return blocks[0].data_ptr()
    if not all(tensor.is_cpu and tensor.is_contiguous() for tensor in blocks):
        return None
    buffers = [for_transport(tensor) for tensor in blocks]
    return [(buffer.pointer, buffer.numel) for buffer in buffers]


def _apart(
    blocks: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], own: int | None
) -> bool:
    ranges = [(block.data_ptr(), block.nbytes) for block in blocks]
    own_range = None if own is None else ranges[own]
    ranges += [
        range_ for each in sources if (range_ := (each.data_ptr(), each.nbytes)) != own_range
    ]
    ranges = sorted(range_ for range_ in ranges if range_[1])
    return all(start + size <= after for (start, size), (after, _) in itertools.pairwise(ranges))


def consecutive(tensors: Sequence[torch.Tensor]) -> bool:
    """True if the tensors lie one behind the other in memory, as views of one buffer do."""
    place = tensors[0].data_ptr()
    for tensor in tensors:
        if tensor.data_ptr() != place or not tensor.is_contiguous():
            return False
        place += tensor.nbytes
    # One allocation: neighbors by chance may be unmapped one by one.
    return len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1


def gathered(tensors: Sequence[torch.Tensor], operation: str) -> tuple[Place, object]:
    """Where tensors that are read lie, and what holds them: as they are, or copied into one."""
    where = place(tensors, operation)
    if where is not None:
        return where, tensors
    whole = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    return whole.data_ptr(), whole


def joined(pieces: Sequence[torch.Tensor], operation: str) -> torch.Tensor:
    """The content of several tensors in one: a view where they lie one behind the other."""
    if consecutive(pieces):
        first = pieces[0].detach()
        size = sum(piece.numel() for piece in pieces)
        return torch.as_strided(first, (size,), (1,), first.storage_offset())
    return torch.cat([read(piece, operation).detach().reshape(-1) for piece in pieces])


def shares(wholes: Sequence[torch.Tensor], ranks: int) -> Place:
    """Places of the shares of each rank in several contiguous tensors, rank by rank."""
    buffers = [for_transport(whole) for whole in wholes]
    return [
        (buffer.pointer + rank * (whole.nbytes // ranks), buffer.numel // ranks)
        for rank in range(ranks)
        for buffer, whole in zip(buffers, wholes, strict=True)
    ]


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    """True if two elements may share memory; never False if they do."""
    reach = 0
    dims = [(s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1]
    for stride, size in sorted(dims):
        if stride <= reach:
            return tensor.numel() > 0
        reach += stride * (size - 1)
    return False


def _check(tensor: torch.Tensor, operation: str) -> None:
    supported = tensor.is_cpu or tensor.is_cuda
    if supported and tensor.layout is torch.strided:
        return
    subject = f"{operation}: tensor of shape {tuple(tensor.shape)}, {tensor.dtype}"
    if not supported:
        raise ValueError(
            f"{subject} is on {tensor.device}: hfreduce takes tensors of the CPU and of CUDA GPUs, "
            "call .cpu()"
        )
    raise ValueError(
        f"{subject} is {tensor.layout}: hfreduce takes dense tensors, call .to_dense()"
    )
