//! 256-bit vectors: AVX2, with F16C for binary16.

use std::arch::x86_64::*;

use crate::arch::generic::{self, Format, Lanes, Machine, STREAM_ALIGNMENT_BYTES};
use crate::{Dtype, Op, Store};

struct Avx2;
struct F32;
struct Bf16;
struct F16;
struct F64;

/// # Safety
/// As for [`generic::reduce`]; the processor has AVX2 and F16C.
#[target_feature(enable = "avx2,f16c")]
pub(crate) unsafe fn reduce(
    store: Store,
    dtype: Dtype,
    op: Op,
    inputs: &[*const u8],
    output: *mut u8,
    numel: usize,
) {
    // SAFETY: the caller's promise, handed on.
    unsafe { generic::reduce::<Avx2>(store, dtype, op, inputs, output, numel) }
}

/// # Safety
/// As for [`generic::scale`]; the processor has AVX2 and F16C.
#[target_feature(enable = "avx2,f16c")]
pub(crate) unsafe fn scale(dtype: Dtype, buffer: *mut u8, numel: usize, divisor: u64) {
    // SAFETY: the caller's promise, handed on.
    unsafe { generic::scale::<Avx2>(dtype, buffer, numel, divisor) }
}

/// # Safety
/// As for [`crate::copy_raw`]; the processor has AVX2.
#[target_feature(enable = "avx2")]
pub(crate) unsafe fn copy_streaming(source: *const u8, destination: *mut u8, bytes: usize) {
    const BLOCK: usize = 128;
    let head = destination.align_offset(STREAM_ALIGNMENT_BYTES).min(bytes);
    let end = head + (bytes - head) / BLOCK * BLOCK;
    // SAFETY: three adjoining ranges of what the caller promises; the middle one is aligned at its destination.
    unsafe {
        std::ptr::copy_nonoverlapping(source, destination, head);
        for at in (head..end).step_by(BLOCK) {
            let from = |i: usize| _mm256_loadu_si256(source.add(at + 32 * i).cast());
            let lines = [from(0), from(1), from(2), from(3)];
            for (i, line) in lines.into_iter().enumerate() {
                _mm256_stream_si256(destination.add(at + 32 * i).cast(), line);
            }
        }
        _mm_sfence();
        std::ptr::copy_nonoverlapping(source.add(end), destination.add(end), bytes - end);
    }
}

impl Machine for Avx2 {
    type Single = __m256;
    type Double = __m256d;
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
                // SAFETY: the caller has AVX2.
                unsafe { $set1($splat(value)) }
            }
            #[inline(always)]
            unsafe fn add(self, other: Self) -> Self {
                // SAFETY: the caller has AVX2.
                unsafe { $add(self, other) }
            }
            #[inline(always)]
            unsafe fn multiply(self, other: Self) -> Self {
                // SAFETY: the caller has AVX2.
                unsafe { $mul(self, other) }
            }
            #[inline(always)]
            unsafe fn divide(self, other: Self) -> Self {
                // SAFETY: the caller has AVX2.
                unsafe { $div(self, other) }
            }
            #[inline(always)]
            unsafe fn minimum(self, other: Self) -> Self {
                // SAFETY: the caller has AVX2.
                unsafe { $blend($min(other, self), other, $cmp::<_CMP_UNORD_Q>(other, other)) }
            }
            #[inline(always)]
            unsafe fn maximum(self, other: Self) -> Self {
                // SAFETY: the caller has AVX2.
                unsafe { $blend($max(other, self), other, $cmp::<_CMP_UNORD_Q>(other, other)) }
            }
            #[inline(always)]
            unsafe fn canonical(self) -> Self {
                // SAFETY: the caller has AVX2.
                unsafe { $blend(self, $set1($nan), $cmp::<_CMP_UNORD_Q>(self, self)) }
            }
        }
    };
}
lanes!(
    __m256,
    8,
    |value: u64| value as f32,
    f32::from_bits(0x7FC0_0000),
    _mm256_add_ps,
    _mm256_mul_ps,
    _mm256_div_ps,
    _mm256_min_ps,
    _mm256_max_ps,
    _mm256_cmp_ps,
    _mm256_blendv_ps,
    _mm256_set1_ps
);
lanes!(
    __m256d,
    4,
    |value: u64| value as f64,
    f64::from_bits(0x7FF8_0000_0000_0000),
    _mm256_add_pd,
    _mm256_mul_pd,
    _mm256_div_pd,
    _mm256_min_pd,
    _mm256_max_pd,
    _mm256_cmp_pd,
    _mm256_blendv_pd,
    _mm256_set1_pd
);

impl Format<__m256> for F32 {
    const ELEMENT_BYTES: usize = 4;
    #[inline(always)]
    unsafe fn load(source: *const u8) -> __m256 {
        // SAFETY: the caller's pointer is good for 8 elements.
        unsafe { _mm256_loadu_ps(source.cast()) }
    }
    #[inline(always)]
    unsafe fn store(destination: *mut u8, lanes: __m256) {
        // SAFETY: the caller's pointer is good for 8 elements.
        unsafe { _mm256_storeu_ps(destination.cast(), lanes) }
    }
    #[inline(always)]
    unsafe fn stream(destination: *mut u8, lanes: __m256) {
        // SAFETY: as for `store`, and aligned.
        unsafe { _mm256_stream_ps(destination.cast(), lanes) }
    }
}

impl Format<__m256d> for F64 {
    const ELEMENT_BYTES: usize = 8;
    #[inline(always)]
    unsafe fn load(source: *const u8) -> __m256d {
        // SAFETY: the caller's pointer is good for 4 elements.
        unsafe { _mm256_loadu_pd(source.cast()) }
    }
    #[inline(always)]
    unsafe fn store(destination: *mut u8, lanes: __m256d) {
        // SAFETY: the caller's pointer is good for 4 elements.
        unsafe { _mm256_storeu_pd(destination.cast(), lanes) }
    }
    #[inline(always)]
    unsafe fn stream(destination: *mut u8, lanes: __m256d) {
        // SAFETY: as for `store`, and aligned.
        unsafe { _mm256_stream_pd(destination.cast(), lanes) }
    }
}

impl Bf16 {
    /// Rounds to nearest even in integers (see the scalar code) and packs the upper halves.
    ///
    /// # Safety
    /// The caller has AVX2.
    #[inline(always)]
    unsafe fn pack(lanes: __m256) -> __m128i {
        // SAFETY: the caller has AVX2.
        unsafe {
            let bits = _mm256_castps_si256(lanes);
            let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
            let half = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF));
            let rounded = _mm256_srli_epi32::<16>(_mm256_add_epi32(bits, half));
            let packed = _mm256_packus_epi32(rounded, rounded);
            _mm256_castsi256_si128(_mm256_permute4x64_epi64::<0b1000>(packed))
        }
    }
}

impl Format<__m256> for Bf16 {
    const ELEMENT_BYTES: usize = 2;
    #[inline(always)]
    unsafe fn load(source: *const u8) -> __m256 {
        // SAFETY: the caller's pointer is good for 8 elements.
        unsafe {
            let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(source.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
        }
    }
    #[inline(always)]
    unsafe fn store(destination: *mut u8, lanes: __m256) {
        // SAFETY: the caller's pointer is good for 8 elements.
        unsafe { _mm_storeu_si128(destination.cast(), Self::pack(lanes)) }
    }
    #[inline(always)]
    unsafe fn stream(destination: *mut u8, lanes: __m256) {
        // SAFETY: as for `store`, and aligned.
        unsafe { _mm_stream_si128(destination.cast(), Self::pack(lanes)) }
    }
}

impl F16 {
    /// # Safety
    /// The caller has F16C.
    #[inline(always)]
    unsafe fn pack(lanes: __m256) -> __m128i {
        // SAFETY: the caller has F16C.
        unsafe { _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(lanes) }
    }
}

impl Format<__m256> for F16 {
    const ELEMENT_BYTES: usize = 2;
    #[inline(always)]
    unsafe fn load(source: *const u8) -> __m256 {
        // SAFETY: the caller's pointer is good for 8 elements.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(source.cast())) }
    }
    #[inline(always)]
    unsafe fn store(destination: *mut u8, lanes: __m256) {
        // SAFETY: the caller's pointer is good for 8 elements.
        unsafe { _mm_storeu_si128(destination.cast(), Self::pack(lanes)) }
    }
    #[inline(always)]
    unsafe fn stream(destination: *mut u8, lanes: __m256) {
        // SAFETY: as for `store`, and aligned.
        unsafe { _mm_stream_si128(destination.cast(), Self::pack(lanes)) }
    }
}
