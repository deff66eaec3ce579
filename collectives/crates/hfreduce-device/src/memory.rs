//! Memory of a device that an operation reads and writes.

use hfreduce_engine::Kind;

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
#[derive(Clone, Copy)]
pub(crate) struct Memory {
    /// Range that is copied to the host first.
    pub(crate) input: Range,
    /// Range that is copied from the host afterwards.
    pub(crate) output: Range,
    /// Length of the engine's buffer if input and output share it, otherwise 0.
    pub(crate) shared_bytes: usize,
}

impl Memory {
    /// An operation in place has one range, `input`.
    pub(crate) fn new(kind: Kind, is_root: bool, input: Range, output: Range) -> Self {
        if !kind.is_in_place() {
            return Self { input, output, shared_bytes: 0 };
        }
        let range_if = |used: bool| if used { input } else { Range::default() };
        Self {
            input: range_if(kind.reads_input(is_root)),
            output: range_if(kind.writes_output(is_root)),
            shared_bytes: input.bytes,
        }
    }
}
