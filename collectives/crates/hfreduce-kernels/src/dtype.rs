//! Element types and operations, with their codes on the wire and in Python.

/// The type of the elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Dtype {
    /// IEEE binary32.
    F32 = 0,
    /// The upper half of a binary32.
    Bf16 = 1,
    /// IEEE binary16.
    F16 = 2,
    /// IEEE binary64.
    F64 = 3,
    /// Signed, 32 bits.
    I32 = 4,
    /// Signed, 64 bits.
    I64 = 5,
    /// Unsigned, 8 bits.
    U8 = 6,
    /// Signed, 8 bits.
    I8 = 7,
    /// 8 bits: 4 of exponent, 3 of fraction, no infinity ("fn": finite), largest 448.
    F8E4M3 = 8,
    /// 8 bits: 5 of exponent, 2 of fraction, with infinity: the upper half of a binary16.
    F8E5M2 = 9,
    /// Signed, 16 bits.
    I16 = 10,
    /// Unsigned, 16 bits.
    U16 = 11,
    /// Unsigned, 32 bits.
    U32 = 12,
    /// Unsigned, 64 bits.
    U64 = 13,
}

impl Dtype {
    /// Every type.
    pub const ALL: [Self; 14] = [
        Self::F32,
        Self::Bf16,
        Self::F16,
        Self::F64,
        Self::I32,
        Self::I64,
        Self::U8,
        Self::I8,
        Self::F8E4M3,
        Self::F8E5M2,
        Self::I16,
        Self::U16,
        Self::U32,
        Self::U64,
    ];

    /// The type with this code.
    pub fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|dtype| dtype.code() == code)
    }

    /// The code on the wire.
    pub const fn code(self) -> u8 {
        self as u8
    }

    /// Bytes of one element; also its alignment.
    pub const fn size_bytes(self) -> usize {
        match self {
            Self::U8 | Self::I8 | Self::F8E4M3 | Self::F8E5M2 => 1,
            Self::Bf16 | Self::F16 | Self::I16 | Self::U16 => 2,
            Self::F32 | Self::I32 | Self::U32 => 4,
            Self::F64 | Self::I64 | Self::U64 => 8,
        }
    }

    /// The name in messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::Bf16 => "bfloat16",
            Self::F16 => "float16",
            Self::F64 => "float64",
            Self::I32 => "int32",
            Self::I64 => "int64",
            Self::U8 => "uint8",
            Self::I8 => "int8",
            Self::F8E4M3 => "float8_e4m3fn",
            Self::F8E5M2 => "float8_e5m2",
            Self::I16 => "int16",
            Self::U16 => "uint16",
            Self::U32 => "uint32",
            Self::U64 => "uint64",
        }
    }

    /// True for the two 8-bit floating-point types.
    pub const fn is_fp8(self) -> bool {
        matches!(self, Self::F8E4M3 | Self::F8E5M2)
    }

    /// True for the types with a NaN.
    pub const fn is_float(self) -> bool {
        matches!(self, Self::F32 | Self::F64) || self.is_short_float()
    }

    /// True for the floating-point types that are combined in fp32 and rounded once.
    pub const fn is_short_float(self) -> bool {
        matches!(self, Self::Bf16 | Self::F16 | Self::F8E4M3 | Self::F8E5M2)
    }

    /// The type that holds a partial result without further rounding: fp32 for the shorter floating-point
    /// types, otherwise the type itself.
    pub const fn wide(self) -> Self {
        if self.is_short_float() { Self::F32 } else { self }
    }
}

impl std::fmt::Display for Dtype {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// The operation that combines two elements.
///
/// An average is a sum with a divisor: see [`crate::Pass`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Op {
    /// Addition.
    Sum = 0,
    /// Multiplication.
    Product = 1,
    /// Minimum.
    Min = 2,
    /// Maximum.
    Max = 3,
    /// Bitwise and; integers only.
    BitAnd = 4,
    /// Bitwise or; integers only.
    BitOr = 5,
    /// Bitwise exclusive or; integers only.
    BitXor = 6,
}

impl Op {
    /// Every operation.
    pub const ALL: [Self; 7] =
        [Self::Sum, Self::Product, Self::Min, Self::Max, Self::BitAnd, Self::BitOr, Self::BitXor];

    /// The operation with this code.
    pub fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|op| op.code() == code)
    }

    /// The code on the wire.
    pub const fn code(self) -> u8 {
        self as u8
    }

    /// The name in messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sum => "sum",
            Self::Product => "product",
            Self::Min => "min",
            Self::Max => "max",
            Self::BitAnd => "band",
            Self::BitOr => "bor",
            Self::BitXor => "bxor",
        }
    }

    /// True if the operation is defined for elements of `dtype`.
    pub const fn supports(self, dtype: Dtype) -> bool {
        !(dtype.is_float() && matches!(self, Self::BitAnd | Self::BitOr | Self::BitXor))
    }
}

impl std::fmt::Display for Op {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}
