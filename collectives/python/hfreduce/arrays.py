"""Memory of array objects: numpy, JAX and torch arrays, `array.array`, mmap.

It is found through the buffer protocol or, if an object lacks it (or a format for its type, as
numpy for bfloat16), through DLPack; that of a GPU through ``__cuda_array_interface__`` (CuPy,
numba, torch). Nothing is copied and torch is not needed.

An array that is not contiguous, or cannot be written to where a result is to go, is refused.
"""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING, Any, NamedTuple

from hfreduce import _native

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["GpuMemory", "HostMemory", "copy", "gpu_memory", "memory"]

# (kind, bits) in DLPack's words; its numbers of kinds are below.
_TYPES: dict[tuple[str, int], int] = {
    ("int", 8): _native.INT8,
    ("int", 16): _native.INT16,
    ("int", 32): _native.INT32,
    ("int", 64): _native.INT64,
    ("uint", 8): _native.UINT8,
    ("uint", 16): _native.UINT16,
    ("uint", 32): _native.UINT32,
    ("uint", 64): _native.UINT64,
    ("float", 16): _native.FLOAT16,
    ("float", 32): _native.FLOAT32,
    ("float", 64): _native.FLOAT64,
    ("bfloat", 16): _native.BFLOAT16,
    ("float8_e4m3fn", 8): _native.FLOAT8_E4M3FN,
    ("float8_e5m2", 8): _native.FLOAT8_E5M2,
}
_DLPACK_KINDS = {
    0: "int",
    1: "uint",
    2: "float",
    4: "bfloat",
    10: "float8_e4m3fn",
    12: "float8_e5m2",
}
_BUFFER_KINDS = dict.fromkeys("bhilqn", "int") | dict.fromkeys("BHILQN", "uint")
_BUFFER_KINDS |= dict.fromkeys("efd", "float")
_TYPESTR_KINDS = {"i": "int", "u": "uint", "f": "float"}

_DLPACK_CPU = (1, 3)
"""Plain memory, and memory that CUDA has pinned."""

_DLPACK_READ_ONLY = 1

_IMMUTABLE = frozenset({"jax", "jaxlib"})
"""Libraries whose arrays never change, whatever their memory allows."""


class HostMemory(NamedTuple):
    """Memory as the engine sees it; valid as long as `owner` exists."""

    pointer: int
    numel: int
    dtype: int
    owner: object


class GpuMemory(NamedTuple):
    """Memory of a GPU, and the stream whose queued work precedes an operation on it."""

    ordinal: int
    stream: int
    pointer: int
    numel: int
    dtype: int


class _Type(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype", _Type),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


def memory(array: object) -> HostMemory:
    """The array's memory, if the engine may compute with it in place.

    Raises `TypeError` for a type that cannot be reduced, `ValueError` for memory that cannot be
    used as it is.
    """
    name = type(array).__name__
    _may_change(array)
    view = _view(array)
    if view is not None:
        return _from_buffer(view, name)
    if hasattr(array, "__dlpack__"):
        return _from_dlpack(array, name)
    raise _nowhere(name)


def copy(array: object, into: HostMemory) -> None:
    """Copies an array, which may be read-only, to memory for as many elements of its type."""
    name = type(array).__name__
    view = _view(array)
    if view is not None:
        dtype, numel = _buffer_type(view, name), view.nbytes // view.itemsize
    elif hasattr(array, "__dlpack__"):
        source = _from_dlpack(array, name, only_read=True)
        dtype, numel = source.dtype, source.numel
    else:
        raise _nowhere(name)
    if (dtype, numel) != (into.dtype, into.numel):
        raise ValueError(f"out: must have the {numel} elements of the {name}, and their type")
    if not numel:
        return
    if view is None:
        ctypes.memmove(into.pointer, source.pointer, numel * _item_bytes(dtype))
        return
    target = memoryview((ctypes.c_char * view.nbytes).from_address(into.pointer)).cast("B")
    # One element, or a format that is not native (ctypes), gives its bytes as a copy only.
    castable = view.ndim and len(view.format.lstrip("@")) == 1
    target[:] = view.cast("B") if castable else view.tobytes()


def gpu_memory(array: Any, stream: int | None) -> GpuMemory:
    """The memory of an array with `__cuda_array_interface__`, if it may be computed with in place.

    `stream` is the stream on which the data is ready; None: the array's stream.
    """
    from hfreduce import gpu

    name = type(array).__name__
    _may_change(array)
    interface: dict[str, Any] = array.__cuda_array_interface__
    pointer, read_only = interface["data"]
    if read_only:
        raise _unwritable(name)
    typestr, shape = interface["typestr"], tuple(interface["shape"])
    kind = _TYPESTR_KINDS.get(typestr[1]) if typestr[0] in "<|" else None
    item_bytes = int(typestr[2:]) if kind else 0
    dtype = _TYPES.get((kind or "", 8 * item_bytes))
    if dtype is None:
        raise TypeError(f"{name}: cannot reduce elements of type {typestr}")
    strides = interface.get("strides")
    # Bytes here, elements in DLPack; a stride between elements fits nowhere.
    if strides is not None and not _contiguous(
        shape, [stride // item_bytes if stride % item_bytes == 0 else -1 for stride in strides]
    ):
        raise ValueError(f"{name}: not contiguous (strides {strides}): pass a contiguous copy")
    numel = math.prod(shape)
    if stream is None:
        # None: ready already. The legacy default stream then costs nothing and is always there.
        stream = interface.get("stream") or 0
    if not numel:
        return GpuMemory(0, stream, 0, 0, dtype)
    owner = gpu.owner_of(pointer)
    if owner is None:
        raise ValueError(f"{name}: {pointer:#x} is not GPU memory")
    return GpuMemory(owner, stream, pointer, numel, dtype)


def _may_change(array: object) -> None:
    if type(array).__module__.partition(".")[0] in _IMMUTABLE:
        raise ValueError(
            f"{type(array).__name__}: arrays of this library are immutable: pass `out`, a numpy "
            "array for the result (the input must be in CPU memory)"
        )


def _unwritable(name: str) -> ValueError:
    return ValueError(f"{name}: read-only memory cannot take the result; give `out`, or a copy")


def _view(array: object) -> memoryview | None:
    """The array's buffer, if it exports one and the format of its type is known."""
    try:
        return memoryview(array)  # type: ignore[arg-type]  # what has no buffer raises
    except (TypeError, ValueError, BufferError):
        return None


def _nowhere(name: str) -> TypeError:
    return TypeError(f"{name}: has neither the buffer protocol nor DLPack; give a numpy array")


def _buffer_type(view: memoryview, name: str) -> int:
    kind = _BUFFER_KINDS.get(view.format.lstrip("@=<"))
    dtype = _TYPES.get((kind or "", 8 * view.itemsize))
    if dtype is None:
        raise TypeError(f"{name}: cannot reduce elements of format `{view.format}`")
    if not view.c_contiguous:
        raise ValueError(f"{name}: not contiguous (strides {view.strides}): pass a contiguous copy")
    return dtype


def _from_buffer(view: memoryview, name: str) -> HostMemory:
    dtype = _buffer_type(view, name)
    if view.readonly:
        raise _unwritable(name)
    if view.nbytes == 0:
        return HostMemory(0, 0, dtype, view)
    place = (ctypes.c_char * view.nbytes).from_buffer(view)
    return HostMemory(ctypes.addressof(place), view.nbytes // view.itemsize, dtype, place)


def _from_dlpack(array: Any, name: str, *, only_read: bool = False) -> HostMemory:
    try:
        capsule = array.__dlpack__(max_version=(1, 1))
    except TypeError:  # an exporter from before versions
        capsule = array.__dlpack__()
    versioned = _is_capsule(capsule, b"dltensor_versioned")
    address = _pointer(capsule, b"dltensor_versioned" if versioned else b"dltensor")
    if versioned:
        whole = _Versioned.from_address(address)
        if whole.major != 1:
            version = f"{whole.major}.{whole.minor}"
            raise TypeError(f"{name}: unsupported DLPack version {version}, expected 1.x")
        if whole.flags & _DLPACK_READ_ONLY and not only_read:
            raise _unwritable(name)
    tensor = whole.tensor if versioned else _Tensor.from_address(address)
    if tensor.device_type not in _DLPACK_CPU:
        raise ValueError(
            f"{name}: memory of device type {tensor.device_type} is not supported: pass an array "
            "in CPU memory, or a GPU array with __cuda_array_interface__"
        )
    dtype = _TYPES.get((_DLPACK_KINDS.get(tensor.dtype.code, ""), tensor.dtype.bits))
    if dtype is None or tensor.dtype.lanes != 1:
        raise TypeError(
            f"{name}: cannot reduce elements of DLPack type {tensor.dtype.code}, "
            f"{tensor.dtype.bits} bits, {tensor.dtype.lanes} lanes"
        )
    shape = tensor.shape[: tensor.ndim]
    strides = tensor.strides[: tensor.ndim] if tensor.strides else None
    if not _contiguous(shape, strides):
        raise ValueError(f"{name}: not contiguous (strides {strides}): pass a contiguous copy")
    numel = math.prod(shape)
    pointer = (tensor.data or 0) + tensor.byte_offset
    # The capsule was not consumed: it gives the memory back when it goes.
    return HostMemory(pointer if numel else 0, numel, dtype, (capsule, array))


def _item_bytes(dtype: int) -> int:
    return next(bits // 8 for (_, bits), code in _TYPES.items() if code == dtype)


def _contiguous(shape: Sequence[int], strides: Sequence[int] | None) -> bool:
    """True if the elements lie in row order without gaps; DLPack counts strides in elements."""
    if strides is None or 0 in shape:
        return True
    step = 1
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent != 1 and stride != step:
            return False
        step *= extent
    return True


def _is_capsule(capsule: object, name: bytes) -> bool:
    check = ctypes.pythonapi.PyCapsule_IsValid
    check.restype, check.argtypes = ctypes.c_int, (ctypes.py_object, ctypes.c_char_p)
    return bool(check(capsule, name))


def _pointer(capsule: object, name: bytes) -> int:
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    return int(get(capsule, name) or 0)
