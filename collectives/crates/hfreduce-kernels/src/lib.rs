//! Element-wise reductions of N inputs in one pass, with the same bits on every processor.
//!
//! Every input is read once and the output is written once: reducing eight buffers moves nine buffers' worth of
//! memory; seven pairwise additions move twenty-one.
//!
//! Guarantees on every instruction set, tested against the scalar code:
//! - Inputs are combined in the order 0, 1, … N-1, each element independently. The order never depends on
//!   length, alignment, processor or time of arrival.
//! - `F32` and `F64` round after every step, as a loop of additions does. `Bf16`, `F16`, `F8E4M3` and `F8E5M2`
//!   are widened to fp32, combined (and divided) in fp32 and rounded once, to nearest even.
//! - Overflow becomes infinity; in `F8E4M3`, which has no infinity, overflow and infinity become ±448, as in
//!   torch's cast.
//! - Subnormal numbers are kept and results are rounded to nearest even, even if the calling thread has set
//!   flush-to-zero or another rounding mode: its floating-point environment is replaced during the pass and
//!   restored.
//! - A result is NaN if any input is NaN (minimum and maximum too) or the arithmetic yields NaN. It is always
//!   the canonical NaN, positive and without a payload, because payloads depend on the processor: F32
//!   `0x7FC0_0000`, F64 `0x7FF8_0000_0000_0000`, Bf16 `0x7FC0`, F16 `0x7E00`, both 8-bit types `0x7F`.
//! - Minimum and maximum of values that compare equal (+0 and -0) keep the bits of the earlier input.
//! - Integer sums and products wrap.
//!
//! Partial results of the short types can stay in fp32 between passes ([`Pass`], [`Width`]).
//!
//! The instruction set is chosen once per process: the widest of the processor, or the one that `HFREDUCE_ISA`
//! (`scalar`, `avx2` or `avx512`) limits it to.

mod arch;
mod dtype;
mod environment;
mod pass;
mod reduce;
mod triad;

pub use arch::Isa;
pub use dtype::{Dtype, Op};
pub use pass::{Pass, Store, Width};
pub use reduce::{
    KernelError, copy_raw, reduce, reduce_raw, reduce_raw_with, scale, scale_raw, scale_raw_with,
};
pub use triad::triad;
