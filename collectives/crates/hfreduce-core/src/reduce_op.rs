//! Reduction operators and the digest of a fused call.

use crate::DType;

/// Reduction operators. An average is a sum that the root divides by the number of ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum ReduceOp {
    /// Addition.
    Sum = 0,
    /// Multiplication.
    Product = 1,
    /// Minimum.
    Min = 2,
    /// Maximum.
    Max = 3,
    /// Bitwise and.
    BitAnd = 4,
    /// Bitwise or.
    BitOr = 5,
    /// Bitwise exclusive or.
    BitXor = 6,
    /// Addition, then division by the number of ranks before the sum is rounded.
    Average = 7,
}

impl ReduceOp {
    /// All operators, by code.
    pub const ALL: [Self; 8] = [
        Self::Sum,
        Self::Product,
        Self::Min,
        Self::Max,
        Self::BitAnd,
        Self::BitOr,
        Self::BitXor,
        Self::Average,
    ];

    /// The operator with this code.
    #[inline]
    pub fn from_code(code: u8) -> Option<Self> {
        Self::ALL.get(usize::from(code)).copied()
    }

    /// The name in messages.
    #[inline]
    pub fn name(self) -> &'static str {
        match self {
            Self::Average => "avg",
            other => other.kernel().name(),
        }
    }

    /// The kernel that implements the operator.
    pub fn kernel(self) -> hfreduce_kernels::Op {
        match self {
            Self::Sum | Self::Average => hfreduce_kernels::Op::Sum,
            Self::Product => hfreduce_kernels::Op::Product,
            Self::Min => hfreduce_kernels::Op::Min,
            Self::Max => hfreduce_kernels::Op::Max,
            Self::BitAnd => hfreduce_kernels::Op::BitAnd,
            Self::BitOr => hfreduce_kernels::Op::BitOr,
            Self::BitXor => hfreduce_kernels::Op::BitXor,
        }
    }

    /// True if the operator is defined for elements of `dtype`.
    #[inline]
    pub fn supports(self, dtype: DType) -> bool {
        self.kernel().supports(dtype) && (self != Self::Average || dtype.is_float())
    }
}

/// Digest of the array sizes of a fused call, so that ranks that fuse other arrays are detected; 0
/// is the shape of a single array.
#[inline]
pub fn fused_shape(counts: impl IntoIterator<Item = usize>) -> u64 {
    let fold = |hash: u64, count: usize| {
        (hash ^ count as u64).wrapping_mul(0x0100_0000_01b3).rotate_left(7)
    };
    counts.into_iter().fold(0xcbf2_9ce4_8422_2325, fold).max(1)
}
