//! Memory of a device that an operation reads and writes.

use crate::cuda::Pointer;

/// A range of a device's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Range {
    /// Its address.
    pub pointer: Pointer,
    /// Its length.
    pub bytes: usize,
}

/// Memory that an operation reads and writes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// Range that is copied to the host first.
    pub input: Range,
    /// Range that is copied from the host afterwards.
    pub output: Range,
    /// Length of the engine's buffer if input and output share it, otherwise 0.
    pub shared_bytes: usize,
}

impl Memory {
    /// One range for input and output; `brings`: this rank contributes to the operation; `takes`: it receives
    /// the result.
    pub fn in_place(range: Range, brings: bool, takes: bool) -> Self {
        let range_if = |used: bool| if used { range } else { Range::default() };
        Self { input: range_if(brings), output: range_if(takes), shared_bytes: range.bytes }
    }

    /// Separate ranges for input and output.
    pub fn apart(input: Range, output: Range) -> Self {
        Self { input, output, shared_bytes: 0 }
    }
}
