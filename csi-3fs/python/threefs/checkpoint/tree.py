"""States as trees: nested dicts, lists and tuples of tensors, bytes and plain values.

`flatten` takes the tensors out and leaves a JSON tree with their names; `unflatten` puts them
back: the same types, keys, dtypes and shapes. torch and numpy are used only where a state has them.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from threefs.checkpoint.errors import CheckpointDamagedError, CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Leaf", "Tree", "flatten", "state_of", "unflatten"]

Tree = Any
"""JSON: scalars as they are, everything else as {"kind": …}."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """One tensor, array or bytes object of a state; `copy_into` copies a range of its bytes."""

    name: str
    kind: str
    """torch, numpy or bytes."""
    dtype: str
    shape: tuple[int, ...]
    length: int
    """Bytes."""
    copy_into: Callable[[memoryview, int], None]
    """Fill a buffer with the bytes from an offset on."""


def state_of(state: dict[str, Any] | None, parts: dict[str, Any]) -> dict[str, Any]:
    """Merge both into one dict; objects with a `state_dict` method are replaced by its result."""
    return {
        name: part.state_dict() if hasattr(part, "state_dict") else part
        for name, part in {**(state or {}), **parts}.items()
    }


def flatten(state: Any) -> tuple[Tree, list[Leaf]]:
    """The tree and its leaves in name order. Nothing is copied yet."""
    leaves: dict[str, Leaf] = {}
    tree = _encode(state, "", leaves)
    return tree, [leaves[name] for name in sorted(leaves)]


def _encode(value: Any, path: str, leaves: dict[str, Leaf]) -> Tree:
    if value is None or isinstance(value, bool | int | float | str):
        if type(value) in (type(None), bool, int, float, str):
            return {"kind": "float", "value": repr(value)} if _is_odd_float(value) else value
    elif isinstance(value, dict):
        items = [
            [_encode_key(key, path), _encode(item, _below(path, key), leaves)]
            for key, item in value.items()
        ]
        return {"kind": "dict", "items": items}
    elif isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        items = [_encode(item, _below(path, number), leaves) for number, item in enumerate(value)]
        return {"kind": kind, "items": items}
    else:
        leaf = _leaf(value, path)
        if leaf is not None:
            if leaf.name in leaves:
                raise CheckpointError(f"two tensors are called `{leaf.name}`: rename one")
            leaves[leaf.name] = leaf
            return {"kind": "leaf", "name": leaf.name}
    raise CheckpointError(
        f"`{path}` is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint "
        "cannot hold: give tensors, bytes, numbers, strings, and dicts, lists or tuples of these"
    )


def _is_odd_float(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _encode_key(key: Any, path: str) -> str | int:
    if type(key) in (str, int):
        return key  # type: ignore[no-any-return]
    raise CheckpointError(f"`{path}` has the key {key!r:.60}: keys are strings or integers")


def _below(path: str, key: Any) -> str:
    # An integer key and the same digits as a string must not give one name.
    word = f"{key}" if isinstance(key, int) else quote(str(key), safe=".-_ ")
    if isinstance(key, str) and word.lstrip("-").isdigit():
        word = f"'{word}'"
    return f"{path}/{word}" if path else word


def _leaf(value: Any, path: str) -> Leaf | None:
    if isinstance(value, bytes | bytearray | memoryview):
        data = memoryview(value).cast("B")
        return Leaf(path, "bytes", "uint8", (len(data),), len(data), _copier(data))
    torch: Any = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _torch_leaf(value, path, torch)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray | numpy.generic):
        array = numpy.ascontiguousarray(value)
        if array.dtype.hasobject:
            return None
        data = memoryview(array.reshape(-1).view(numpy.uint8))
        shape = tuple(value.shape)
        return Leaf(path, "numpy", array.dtype.str, shape, array.nbytes, _copier(data))
    return None


def _copier(data: memoryview) -> Callable[[memoryview, int], None]:
    def copy_into(target: memoryview, offset: int) -> None:
        target[:] = data[offset : offset + len(target)]

    return copy_into


def _torch_leaf(tensor: Any, path: str, torch: Any) -> Leaf:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise CheckpointError(f"`{path}` is a {tensor.layout} tensor: give a dense one")
    plain = tensor.detach().resolve_conj().resolve_neg()
    length = plain.numel() * plain.element_size()

    def copy_into(target: memoryview, offset: int) -> None:
        # A tensor of one element counts as contiguous with any stride; its bytes do not.
        elements = plain.contiguous().as_strided((plain.numel(),), (1,))
        flat = elements.view(torch.uint8)
        destination = torch.frombuffer(target, dtype=torch.uint8)
        destination.copy_(flat[offset : offset + len(target)])

    dtype = str(plain.dtype).removeprefix("torch.")
    return Leaf(path, "torch", dtype, tuple(plain.shape), length, copy_into)


def unflatten(tree: Tree, load: Callable[[str], Any]) -> Any:
    """The state again; `load` gives the object of a leaf's name."""
    if not isinstance(tree, dict):
        if isinstance(tree, list):
            raise CheckpointDamagedError(f"no state: {tree!r:.80}")
        return tree
    match tree:
        case {"kind": "leaf", "name": str(name)}:
            return load(name)
        case {"kind": "float", "value": str(text)}:
            return float(text)
        case {"kind": "dict", "items": list(items)}:
            return {key: unflatten(item, load) for key, item in items}
        case {"kind": "list", "items": list(items)}:
            return [unflatten(item, load) for item in items]
        case {"kind": "tuple", "items": list(items)}:
            return tuple(unflatten(item, load) for item in items)
        case _:
            raise CheckpointDamagedError(f"no state: {tree!r:.80}")


def rebuild(kind: str, dtype: str, shape: tuple[int, ...], data: bytearray) -> Any:
    """The object of a leaf from its bytes, which it may keep."""
    if kind == "bytes":
        return bytes(data)
    try:
        if kind == "torch":
            import torch

            element = getattr(torch, dtype)
            if not data:
                return torch.empty(shape, dtype=element)
            return torch.frombuffer(data, dtype=element).reshape(shape)
        if kind == "numpy":
            import numpy as np

            return np.frombuffer(data, dtype=np.dtype(dtype)).reshape(shape)
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointDamagedError(f"{kind} cannot make {dtype} {shape}: {error}") from error
    except ImportError as error:
        raise CheckpointError(f"the checkpoint holds {kind} tensors: install {kind}") from error
    raise CheckpointDamagedError(f"unknown kind of tensor {kind!r}")
