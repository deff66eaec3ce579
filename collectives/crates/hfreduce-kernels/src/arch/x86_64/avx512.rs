//! 512-bit vectors: AVX-512 F, BW, DQ and VL.
//!
//! The instructions of AVX512_BF16 are not used: its conversion and its dot products treat subnormal numbers as
//! zero. Those of AVX512_FP16 round after every step.

use std::arch::x86_64::*;

use super::avx512_formats::{Bf16, F16, F32, F64};
use crate::arch::generic;
use crate::arch::lanes::{Combine, Floats, Format, Lanes, Machine};
use crate::{Pass, Store};

struct Avx512;

/// # Safety
/// As for [`generic::reduce`]; the processor has AVX-512.
#[target_feature(enable = "avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
pub(crate) unsafe fn reduce(store: Store, pass: &Pass<'_>) {
    // SAFETY: guaranteed by the caller.
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

lanes! {
    __m512, 16, f32, 0x7FC0_0000, _mm512_set1_ps, _mm512_add_ps, _mm512_mul_ps, _mm512_div_ps, _mm512_min_ps,
    _mm512_max_ps, _mm512_cmp_ps_mask, blend_ps
}

lanes! {
    __m512d, 8, f64, 0x7FF8_0000_0000_0000, _mm512_set1_pd, _mm512_add_pd, _mm512_mul_pd, _mm512_div_pd,
    _mm512_min_pd, _mm512_max_pd, _mm512_cmp_pd_mask, blend_pd
}

/// `b` where the mask is set, else `a`, as AVX2's blends.
///
/// # Safety
/// The caller has AVX-512.
#[inline(always)]
unsafe fn blend_ps(a: __m512, b: __m512, mask: __mmask16) -> __m512 {
    // SAFETY: the caller has AVX-512.
    unsafe { _mm512_mask_blend_ps(mask, a, b) }
}

/// As [`blend_ps`].
///
/// # Safety
/// The caller has AVX-512.
#[inline(always)]
unsafe fn blend_pd(a: __m512d, b: __m512d, mask: __mmask8) -> __m512d {
    // SAFETY: the caller has AVX-512.
    unsafe { _mm512_mask_blend_pd(mask, a, b) }
}
