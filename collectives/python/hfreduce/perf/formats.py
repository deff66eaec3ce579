"""Encoders of element types, written from their definitions: exact numbers to bytes.

The oracle rounds with these encoders and not with the kernels: they are slow but simple.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from hfreduce import _native

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["TYPES", "Format", "find"]


@dataclass(frozen=True, slots=True)
class Format:
    """One element type."""

    name: str
    code: int
    item_bytes: int
    fraction_bits: int = 0
    """Explicit bits of a float's fraction; 0 for whole numbers."""
    exponent_bits: int = 0
    signed: bool = True
    finite: bool = False
    """A float without infinity, whose largest number is its all-ones pattern but one."""

    @property
    def is_float(self) -> bool:
        """True for floating-point types."""
        return self.exponent_bits > 0

    @property
    def exact_max(self) -> int:
        """All whole numbers up to this one can be written, and so can sums of them."""
        if self.is_float:
            return 1 << (self.fraction_bits + 1)
        return (1 << (8 * self.item_bytes - self.signed)) - 1

    def encode(self, value: Fraction) -> bytes:
        """The number's bytes, rounded once to nearest even; whole numbers wrap."""
        bits = self._round(value) if self.is_float else int(value)
        return (bits % (1 << 8 * self.item_bytes)).to_bytes(self.item_bytes, "little")

    def _round(self, value: Fraction) -> int:
        sign = int(value < 0) << (8 * self.item_bytes - 1)
        magnitude = abs(value)
        if not magnitude:
            return sign
        bias = (1 << (self.exponent_bits - 1)) - 1
        exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
        if magnitude < Fraction(2) ** exponent:
            exponent -= 1
        exponent = max(exponent, 1 - bias)  # below that, numbers are subnormal
        units = round(magnitude / Fraction(2) ** (exponent - self.fraction_bits))
        # A carry out of the fraction moves into the exponent by itself.
        bits = units + ((exponent + bias - 1) << self.fraction_bits)
        infinity = ((1 << self.exponent_bits) - 1) << self.fraction_bits
        largest = infinity + (1 << self.fraction_bits) - 2 if self.finite else infinity
        return sign | min(bits, largest)


_ALL = (
    Format("float32", _native.FLOAT32, 4, 23, 8),
    Format("bfloat16", _native.BFLOAT16, 2, 7, 8),
    Format("float16", _native.FLOAT16, 2, 10, 5),
    Format("float64", _native.FLOAT64, 8, 52, 11),
    Format("float8_e4m3fn", _native.FLOAT8_E4M3FN, 1, 3, 4, finite=True),
    Format("float8_e5m2", _native.FLOAT8_E5M2, 1, 2, 5),
    Format("int8", _native.INT8, 1),
    Format("uint8", _native.UINT8, 1, signed=False),
    Format("int16", _native.INT16, 2),
    Format("uint16", _native.UINT16, 2, signed=False),
    Format("int32", _native.INT32, 4),
    Format("uint32", _native.UINT32, 4, signed=False),
    Format("int64", _native.INT64, 8),
    Format("uint64", _native.UINT64, 8, signed=False),
)

TYPES: Mapping[str, Format] = {each.name: each for each in _ALL}
"""By torch's names."""

_ALIASES = {
    "float": "float32",
    "fp32": "float32",
    "bf16": "bfloat16",
    "half": "float16",
    "fp16": "float16",
    "double": "float64",
    "fp64": "float64",
    "fp8_e4m3": "float8_e4m3fn",
    "f8e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "f8e5m2": "float8_e5m2",
    "char": "int8",
    "int": "int32",
}
"""Type names of nccl-tests."""


def find(name: str) -> Format | None:
    """The type of this name or of a usual short one."""
    return TYPES.get(_ALIASES.get(name, name))
