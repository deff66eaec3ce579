//! Reduction operators and the digest of a fused call.

use crate::DType;

hfreduce_kernels::coded_enum! {
    /// Reduction operators. An average is a sum that the root divides by the number of ranks.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum ReduceOp {
        /// Addition.
        Sum = (0, "sum"),
        /// Multiplication.
        Product = (1, "product"),
        /// Minimum.
        Min = (2, "min"),
        /// Maximum.
        Max = (3, "max"),
        /// Bitwise and.
        BitAnd = (4, "band"),
        /// Bitwise or.
        BitOr = (5, "bor"),
        /// Bitwise exclusive or.
        BitXor = (6, "bxor"),
        /// Addition, then division by the number of ranks before the sum is rounded.
        Average = (7, "avg"),
    }
}

impl ReduceOp {
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
