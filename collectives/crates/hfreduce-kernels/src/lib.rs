//! Element-wise reductions of N inputs in one pass, the same bits on every processor.
//!
//! Every input is read once and the output is written once: reducing eight buffers moves nine buffers' worth of
//! memory, where seven pairwise additions move twenty-one.
//!
//! What holds on every instruction set, tested against the scalar code:
//! - Inputs are combined in the order 0, 1, … N-1, each element by itself. The order never depends on length,
//!   alignment, processor or arrival.
//! - `F32` and `F64` round after every step, as a loop of additions does. `Bf16`, `F16`, `F8E4M3` and `F8E5M2`
//!   are widened to fp32, combined (and divided) in fp32 and rounded once, to nearest even.
//! - Too large becomes infinity; in `F8E4M3`, which has none, ±448, infinity too, as torch's cast has it.
//! - Subnormal numbers are kept and results are rounded to nearest even, also where the calling thread has set
//!   flush-to-zero or another rounding: its floating-point environment is replaced for the pass and put back.
//! - NaN: a result is NaN where any input is NaN (minimum and maximum too) or the arithmetic makes one, and it
//!   is always the canonical one, positive and without a payload, as payloads depend on the processor: F32
//!   `0x7FC0_0000`, F64 `0x7FF8_0000_0000_0000`, Bf16 `0x7FC0`, F16 `0x7E00`, both 8-bit types `0x7F`.
//! - Minimum and maximum of values that compare equal (+0 and -0) keep the earlier input's bits.
//! - Integer sums and products wrap.
//!
//! Partial results of the short types can stay fp32 from pass to pass ([`Pass`], [`Width`]).
//!
//! The instruction set is chosen once per process from what the processor has; `HFREDUCE_ISA` = `scalar`,
//! `avx2` or `avx512` lowers it.

mod arch;
mod dtype;
mod environment;
mod reduce;
mod triad;

pub use arch::Isa;
pub use dtype::{Dtype, Op};
pub use reduce::{
    KernelError, Pass, Store, Width, copy_raw, reduce, reduce_into, reduce_raw, reduce_raw_with,
    scale, scale_raw, scale_raw_with,
};
pub use triad::triad;
