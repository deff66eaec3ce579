//! Scalar kernels: the reference that every other instruction set must equal, and the ends of their loops.

use super::generic;
use super::lanes::{Bytes, Combine, Floats, Format, Lanes, Machine};
use super::scalar_formats::{Bf16, F8E4M3, F8E5M2, F16, F32, F64};
use crate::{Pass, Store};

pub(crate) struct Scalar;

impl Machine for Scalar {
    #[inline(always)]
    unsafe fn fence() {}
    #[inline(always)]
    unsafe fn streams<V: Lanes, F: Format<V>, S: Lanes, T: Format<S>, O>(
        store: Store,
        pass: &Pass<'_>,
    ) where
        O: Combine<V> + Combine<S>,
    {
        // SAFETY: guaranteed by the caller.
        unsafe { generic::streams::<Self, V, F, S, T, O>(store, pass) }
    }
}

impl Floats for Scalar {
    type Single = f32;
    type Double = f64;
    type F32 = F32;
    type Bf16 = Bf16;
    type F16 = F16;
    type F64 = F64;
}

impl Bytes for Scalar {
    type Lanes = f32;
    type F8E4M3 = F8E4M3;
    type F8E5M2 = F8E5M2;
}
