//! Description of one reduction: its inputs, its output and how it is written.

use crate::{Dtype, Op};

/// How the output is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Store {
    /// Through the caches: for outputs that are read soon.
    #[default]
    Cached,
    /// Past the caches, which saves reading the output's old lines: for outputs larger than the last cache
    /// level.
    Streaming,
}

/// Element type of a pass's output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Width {
    /// The pass's type; shorter floating-point types are rounded to it, once.
    #[default]
    Narrow,
    /// The type of partial results, [`Dtype::wide`]: nothing is rounded.
    Wide,
}

/// One reduction: `output[i] = op(inputs[0][i], …, wide[0][i], …) / divisor`.
///
/// A tree of reductions in which every pass but the last writes [`Width::Wide`] and the next one reads it as
/// `wide` rounds 16- and 8-bit floating-point types only once, whatever the tree.
#[derive(Debug, Clone, Copy)]
pub struct Pass<'a> {
    /// The type of the elements.
    pub dtype: Dtype,
    /// The operation.
    pub op: Op,
    /// Inputs of this type, in the order in which they are combined.
    pub inputs: &'a [*const u8],
    /// Inputs of the type [`Dtype::wide`] (partial results), combined after those.
    pub wide: &'a [*const u8],
    /// Destination of the result.
    pub output: *mut u8,
    /// Element type of the result.
    pub to: Width,
    /// Elements of every input and of the output.
    pub numel: usize,
    /// The result is divided by this before it is rounded: the number of ranks for an average, otherwise 1.
    pub divisor: u64,
}
