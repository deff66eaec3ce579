//! 512-bit vectors: AVX-512 F, BW, DQ and VL.

use std::arch::x86_64::*;

use crate::arch::generic::{self, Format, Lanes, Machine};
use crate::{Dtype, Op, Store};

struct Avx512;
struct F32;
struct Bf16;
struct F16;
struct F64;

/// # Safety
/// As for [`generic::reduce`]; the processor has AVX-512.
#[target_feature(enable = "avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
pub(crate) unsafe fn reduce(
    store: Store,
    dtype: Dtype,
    op: Op,
    inputs: &[*const u8],
    output: *mut u8,
    numel: usize,
) {
    // SAFETY: the caller's promise, handed on.
    unsafe { generic::reduce::<Avx512>(store, dtype, op, inputs, output, numel) }
}

/// # Safety
/// As for [`generic::scale`]; the processor has AVX-512.
#[target_feature(enable = "avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
pub(crate) unsafe fn scale(dtype: Dtype, buffer: *mut u8, numel: usize, divisor: u64) {
    // SAFETY: the caller's promise, handed on.
    unsafe { generic::scale::<Avx512>(dtype, buffer, numel, divisor) }
}

impl Machine for Avx512 {
    type Single = __m512;
    type Double = __m512d;
    type F32 = F32;
    type Bf16 = Bf16;
    type F16 = F16;
    type F64 = F64;
    #[inline(always)]
    unsafe fn fence() {
        // SAFETY: every x86-64 has it.
        unsafe { _mm_sfence() }
    }
}

/// The operations of one vector type. `min` and `max` give their second operand unless the first one wins, so
/// that ties and a NaN in `self` keep `self`; a NaN in `other` is put in afterwards.
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

impl Format<__m512> for F32 {
    const ELEMENT_BYTES: usize = 4;
    #[inline(always)]
    unsafe fn load(source: *const u8) -> __m512 {
        // SAFETY: the caller's pointer is good for 16 elements.
        unsafe { _mm512_loadu_ps(source.cast()) }
    }
    #[inline(always)]
    unsafe fn store(destination: *mut u8, lanes: __m512) {
        // SAFETY: the caller's pointer is good for 16 elements.
        unsafe { _mm512_storeu_ps(destination.cast(), lanes) }
    }
    #[inline(always)]
    unsafe fn stream(destination: *mut u8, lanes: __m512) {
        // SAFETY: as for `store`, and aligned.
        unsafe { _mm512_stream_ps(destination.cast(), lanes) }
    }
}

impl Format<__m512d> for F64 {
    const ELEMENT_BYTES: usize = 8;
    #[inline(always)]
    unsafe fn load(source: *const u8) -> __m512d {
        // SAFETY: the caller's pointer is good for 8 elements.
        unsafe { _mm512_loadu_pd(source.cast()) }
    }
    #[inline(always)]
    unsafe fn store(destination: *mut u8, lanes: __m512d) {
        // SAFETY: the caller's pointer is good for 8 elements.
        unsafe { _mm512_storeu_pd(destination.cast(), lanes) }
    }
    #[inline(always)]
    unsafe fn stream(destination: *mut u8, lanes: __m512d) {
        // SAFETY: as for `store`, and aligned.
        unsafe { _mm512_stream_pd(destination.cast(), lanes) }
    }
}

impl Bf16 {
    /// Rounds to nearest even in integers (see the scalar code) and packs the upper halves.
    ///
    /// # Safety
    /// The caller has AVX-512.
    #[inline(always)]
    unsafe fn pack(lanes: __m512) -> __m256i {
        // SAFETY: the caller has AVX-512.
        unsafe {
            let bits = _mm512_castps_si512(lanes);
            let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
            let half = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF));
            _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(_mm512_add_epi32(bits, half)))
        }
    }
}

impl Format<__m512> for Bf16 {
    const ELEMENT_BYTES: usize = 2;
    #[inline(always)]
    unsafe fn load(source: *const u8) -> __m512 {
        // SAFETY: the caller's pointer is good for 16 elements.
        unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(source.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        }
    }
    #[inline(always)]
    unsafe fn store(destination: *mut u8, lanes: __m512) {
        // SAFETY: the caller's pointer is good for 16 elements.
        unsafe { _mm256_storeu_si256(destination.cast(), Self::pack(lanes)) }
    }
    #[inline(always)]
    unsafe fn stream(destination: *mut u8, lanes: __m512) {
        // SAFETY: as for `store`, and aligned.
        unsafe { _mm256_stream_si256(destination.cast(), Self::pack(lanes)) }
    }
}

impl F16 {
    /// # Safety
    /// The caller has AVX-512.
    #[inline(always)]
    unsafe fn pack(lanes: __m512) -> __m256i {
        // SAFETY: the caller has AVX-512.
        unsafe { _mm512_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(lanes) }
    }
}

impl Format<__m512> for F16 {
    const ELEMENT_BYTES: usize = 2;
    #[inline(always)]
    unsafe fn load(source: *const u8) -> __m512 {
        // SAFETY: the caller's pointer is good for 16 elements.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(source.cast())) }
    }
    #[inline(always)]
    unsafe fn store(destination: *mut u8, lanes: __m512) {
        // SAFETY: the caller's pointer is good for 16 elements.
        unsafe { _mm256_storeu_si256(destination.cast(), Self::pack(lanes)) }
    }
    #[inline(always)]
    unsafe fn stream(destination: *mut u8, lanes: __m512) {
        // SAFETY: as for `store`, and aligned.
        unsafe { _mm256_stream_si256(destination.cast(), Self::pack(lanes)) }
    }
}
