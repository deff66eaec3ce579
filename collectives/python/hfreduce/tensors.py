"""From tensors to (pointer, count, type): what the engine takes, and what is refused.

A tensor that cannot be used as it is gets an error here, before anything is sent: a backend that
guesses writes into memory that nobody meant.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.distributed import ReduceOp

from hfreduce import _native

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "Buffer",
    "consecutive",
    "counts",
    "flatten",
    "for_reduction",
    "for_transport",
    "operation_code",
    "registered",
    "same_shape",
    "single",
    "whole_shares",
]

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

_OPERATIONS: dict[int, int] = {
    ReduceOp.SUM.value: _native.SUM,
    ReduceOp.AVG.value: _native.AVG,
    ReduceOp.PRODUCT.value: _native.PRODUCT,
    ReduceOp.MIN.value: _native.MIN,
    ReduceOp.MAX.value: _native.MAX,
    ReduceOp.BAND.value: _native.BAND,
    ReduceOp.BOR.value: _native.BOR,
    ReduceOp.BXOR.value: _native.BXOR,
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
    """The engine's number of a reduction."""
    code = _OPERATIONS.get(op.op.value)
    if code is None:
        raise ValueError(
            f"hfreduce has no {op.op}: use SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR"
        )
    return code


def for_reduction(tensor: torch.Tensor, operation: str, op: int) -> Buffer:
    """The tensor's memory for an operation that computes with it."""
    _check(tensor, operation)
    pointer, numel, dtype = tensor.data_ptr(), tensor.numel(), tensor.dtype
    code = _DTYPES.get(dtype)
    if code is not None:
        if op in _BITWISE and dtype.is_floating_point:
            raise TypeError(f"{operation}: bitwise operations need an integer type, not {dtype}")
        if op == _native.AVG and not dtype.is_floating_point:
            raise TypeError(f"{operation}: AVG needs a floating-point type, not {dtype}")
        return Buffer(pointer, numel, code, op)
    if dtype is torch.bool and op in _BOOLEAN:
        return Buffer(pointer, numel, _native.UINT8, _BOOLEAN[op])
    if dtype in _COMPLEX and op in (_native.SUM, _native.AVG):
        return Buffer(pointer, 2 * numel, _COMPLEX[dtype], op)
    known = ", ".join(str(known).removeprefix("torch.") for known in _DTYPES)
    raise TypeError(f"{operation}: cannot reduce {dtype} with this operation; known are {known}")


def for_transport(tensor: torch.Tensor, operation: str) -> Buffer:
    """The tensor's memory for an operation that only moves it: any type will do."""
    _check(tensor, operation)
    code = _DTYPES.get(tensor.dtype)
    if code is None:
        return Buffer(tensor.data_ptr(), tensor.nbytes, _native.UINT8)
    return Buffer(tensor.data_ptr(), tensor.numel(), code)


def single(tensors: Sequence[torch.Tensor], operation: str) -> torch.Tensor:
    """The one tensor of a list; torch's interface has lists for a use long gone."""
    if len(tensors) != 1:
        raise ValueError(f"{operation}: takes one tensor a rank, not {len(tensors)}")
    return tensors[0]


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


def consecutive(tensors: Sequence[torch.Tensor]) -> bool:
    """True if the tensors lie one behind the other in memory, as views of one buffer do."""
    place = tensors[0].data_ptr()
    for tensor in tensors:
        if tensor.data_ptr() != place or not tensor.is_contiguous():
            return False
        place += tensor.nbytes
    # One allocation: neighbours by chance may be unmapped one by one.
    return len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1


def flatten(tensors: Sequence[torch.Tensor], operation: str) -> torch.Tensor:
    """The tensors in one buffer: as they lie if they do so already, otherwise a copy."""
    for tensor in tensors:
        _check(tensor, operation, strided=True)
    if consecutive(tensors):
        return tensors[0].detach().as_strided((sum(tensor.numel() for tensor in tensors),), (1,))
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def _check(tensor: torch.Tensor, operation: str, *, strided: bool = False) -> None:
    known = tensor.is_cpu or tensor.is_cuda
    dense = known and tensor.layout is torch.strided
    if dense and (strided or tensor.is_contiguous()):
        return
    what = f"{operation}: tensor of shape {tuple(tensor.shape)}, {tensor.dtype}"
    if not known:
        raise ValueError(
            f"{what} is on {tensor.device}: hfreduce takes tensors of the CPU and of CUDA GPUs, "
            "call .cpu()"
        )
    if not dense:
        raise ValueError(
            f"{what} is {tensor.layout}: hfreduce takes dense tensors, call .to_dense()"
        )
    raise ValueError(
        f"{what} is not contiguous (strides {tuple(tensor.stride())}): reduce "
        "tensor.contiguous() and copy the result back"
    )
