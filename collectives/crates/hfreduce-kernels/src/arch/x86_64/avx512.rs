//! 512-bit vectors: AVX-512 F, BW, DQ and VL.
//!
//! The instructions of AVX512_BF16 are not used: its conversion and its dot products treat subnormal numbers as
//! zero. Those of AVX512_FP16 round after every step.

use std::arch::x86_64::*;

use super::avx512_formats::{Bf16, F16, F32, F64};
use crate::arch::generic::{self, Combine, Floats, Format, Lanes, Machine};
use crate::{Pass, Store};

struct Avx512;

/// # Safety
/// As for [`generic::reduce`]; the processor has AVX-512.
#[target_feature(enable = "avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
pub(crate) unsafe fn reduce(store: Store, pass: &Pass<'_>) {
    // SAFETY: the caller's promise, handed on.
    unsafe { generic::reduce::<Avx512>(store, pass) }
}

impl Floats for Avx512 {
    type Single = __m512;
    type Double = __m512d;
    type F32 = F32;
    type Bf16 = Bf16;
    type F16 = F16;
    type F64 = F64;
}

machine!(Avx512, "avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl");
/// The operations of one vector type. `min` and `max` return their second operand unless the first one compares
/// less or greater, so that ties and a NaN in `self` keep `self`; a blend then inserts a NaN of `other`.
macro_rules! lanes {
    ($t:ty, $lanes:expr, $splat:expr, $nan:expr, $add:ident, $mul:ident, $div:ident, $min:ident, $max:ident,
     $cmp:ident, $blend:ident, $set1:ident) => {
        impl Lanes for $t {
            const LANES: usize = $lanes;
            #[inline(always)]
            unsafe fn splat(value: u64) -> Self {
                // SAFETY: the caller has AVX-512.
                unsafe { $set1($splat(value)) }
            }
            #[inline(always)]
            unsafe fn add(self, other: Self) -> Self {
                // SAFETY: the caller has AVX-512.
                unsafe { $add(self, other) }
            }
            #[inline(always)]
            unsafe fn multiply(self, other: Self) -> Self {
                // SAFETY: the caller has AVX-512.
                unsafe { $mul(self, other) }
            }
            #[inline(always)]
            unsafe fn divide(self, other: Self) -> Self {
                // SAFETY: the caller has AVX-512.
                unsafe { $div(self, other) }
            }
            #[inline(always)]
            unsafe fn minimum(self, other: Self) -> Self {
                // SAFETY: the caller has AVX-512.
                unsafe { $blend($cmp::<_CMP_UNORD_Q>(other, other), $min(other, self), other) }
            }
            #[inline(always)]
            unsafe fn maximum(self, other: Self) -> Self {
                // SAFETY: the caller has AVX-512.
                unsafe { $blend($cmp::<_CMP_UNORD_Q>(other, other), $max(other, self), other) }
            }
            #[inline(always)]
            unsafe fn canonical(self) -> Self {
                // SAFETY: the caller has AVX-512.
                unsafe { $blend($cmp::<_CMP_UNORD_Q>(self, self), self, $set1($nan)) }
            }
        }
    };
}
lanes!(
    __m512,
    16,
    |value: u64| value as f32,
    f32::from_bits(0x7FC0_0000),
    _mm512_add_ps,
    _mm512_mul_ps,
    _mm512_div_ps,
    _mm512_min_ps,
    _mm512_max_ps,
    _mm512_cmp_ps_mask,
    _mm512_mask_blend_ps,
    _mm512_set1_ps
);
lanes!(
    __m512d,
    8,
    |value: u64| value as f64,
    f64::from_bits(0x7FF8_0000_0000_0000),
    _mm512_add_pd,
    _mm512_mul_pd,
    _mm512_div_pd,
    _mm512_min_pd,
    _mm512_max_pd,
    _mm512_cmp_pd_mask,
    _mm512_mask_blend_pd,
    _mm512_set1_pd
);
