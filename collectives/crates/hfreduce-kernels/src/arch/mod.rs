//! Instruction sets: one algorithm ([`generic`]) over a few traits of vector operations ([`lanes`]), and a
//! thin file for each set.
//!
//! ```text
//!   choose:   best that the processor has, once        per file: load / store of a block of each format, add,
//!   reduce:   for each block of two or four vectors    multiply, minimum, maximum, divide, canonical NaN
//!               acc = load(input 0)
//!               for input 1..N: acc = op(acc, load(input))
//!               store(canonical(acc / divisor))
//!             the rest, and what precedes an aligned output: the same with one lane
//! ```

pub(crate) mod fp8;
mod generic;
mod integers;
mod lanes;
mod scalar;
mod scalar_formats;

#[cfg(target_arch = "x86_64")]
mod x86_64;

use std::sync::OnceLock;

use crate::{Pass, Store};

/// An instruction set with kernels, from the narrowest to the widest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Isa {
    /// One element at a time: the reference for all others.
    Scalar,
    /// 256 bits: AVX2 and F16C.
    Avx2,
    /// 512 bits: AVX-512 F, BW, DQ and VL. The 8-bit types need VBMI too, and use AVX2 without it.
    Avx512,
}

impl Isa {
    /// Every instruction set.
    pub const ALL: [Self; 3] = [Self::Scalar, Self::Avx2, Self::Avx512];

    /// The widest instruction set of this processor.
    pub fn best() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            if x86_64::has_avx512() {
                return Self::Avx512;
            }
            if x86_64::has_avx2() {
                return Self::Avx2;
            }
        }
        Self::Scalar
    }

    /// The instruction set in use: the widest one, unless `HFREDUCE_ISA` selects a narrower one. Decided at the
    /// first call.
    pub fn chosen() -> Self {
        static CHOSEN: OnceLock<Isa> = OnceLock::new();
        *CHOSEN.get_or_init(|| {
            let name = std::env::var("HFREDUCE_ISA").ok();
            let requested = Self::ALL.into_iter().find(|isa| Some(isa.name()) == name.as_deref());
            requested.unwrap_or(Self::Avx512).available()
        })
    }

    /// This instruction set if the processor has it, otherwise the next narrower one that it has.
    pub fn available(self) -> Self {
        self.min(Self::best())
    }

    /// The name, as in `HFREDUCE_ISA`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Scalar => "scalar",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
        }
    }
}

/// # Safety
/// As for [`Pass::run`]; `isa` is available and the pass has been checked.
pub(crate) unsafe fn reduce(isa: Isa, store: Store, pass: &Pass<'_>) {
    // SAFETY: guaranteed by the caller, and the processor has the instruction set.
    unsafe {
        match (isa, pass.dtype.is_fp8()) {
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx512, false) => x86_64::avx512::reduce(store, pass),
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx512, true) if x86_64::has_vbmi() => x86_64::avx512_bytes::reduce(store, pass),
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx2, false) => x86_64::avx2::reduce(store, pass),
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx512 | Isa::Avx2, true) => x86_64::avx2::reduce_bytes(store, pass),
            (_, false) => generic::reduce::<scalar::Scalar>(store, pass),
            (_, true) => generic::reduce_bytes::<scalar::Scalar>(store, pass),
        }
    }
}

/// Size below which the standard copy is as fast.
#[cfg(target_arch = "x86_64")]
const LONG_FROM_BYTES: usize = 32 << 10;

/// # Safety
/// As for [`crate::copy_raw`]; `isa` is available.
pub(crate) unsafe fn copy(
    isa: Isa,
    store: Store,
    source: *const u8,
    destination: *mut u8,
    bytes: usize,
) {
    // SAFETY: guaranteed by the caller, and the processor has the instruction set.
    unsafe {
        match (isa, store) {
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx512 | Isa::Avx2, Store::Streaming) => {
                x86_64::avx2::copy::<true>(source, destination, bytes);
            }
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx512 | Isa::Avx2, Store::Cached) if bytes >= LONG_FROM_BYTES => {
                x86_64::avx2::copy::<false>(source, destination, bytes);
            }
            _ => std::ptr::copy_nonoverlapping(source, destination, bytes),
        }
    }
}
