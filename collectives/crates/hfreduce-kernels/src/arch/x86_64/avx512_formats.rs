//! Formats of two bytes and more in 512-bit vectors. A line of bf16 is loaded as its even and its odd elements,
//! so that no element crosses a lane.

use std::arch::x86_64::*;
use std::arch::x86_64::{
    _mm512_add_epi32 as add_epi32, _mm512_and_si512 as and_si, _mm512_castps_si512 as castps_si,
    _mm512_castsi512_ps as castsi_ps, _mm512_loadu_si512 as loadu_si,
    _mm512_set1_epi32 as set1_epi32, _mm512_slli_epi32 as slli_epi32,
    _mm512_srli_epi32 as srli_epi32,
};

use crate::arch::lanes::Format;

pub(super) struct F32;
pub(super) struct Bf16;
pub(super) struct F16;
pub(super) struct F64;

pub(super) type Block = [__m512; 4];

/// Stores one line, past the caches if `STREAM`.
///
/// # Safety
/// The caller has AVX-512; the destination is good for 64 bytes, and aligned if `STREAM`.
#[inline(always)]
pub(super) unsafe fn put<const STREAM: bool>(destination: *mut u8, line: __m512i) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        if STREAM {
            _mm512_stream_si512(destination.cast(), line);
        } else {
            _mm512_storeu_si512(destination.cast(), line);
        }
    }
}

/// # Safety
/// The caller has AVX-512.
#[inline(always)]
pub(super) unsafe fn join(low: __m256i, high: __m256i) -> __m512i {
    // SAFETY: the caller has AVX-512.
    unsafe { _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high) }
}

/// Converts even and odd elements to the first and the second half.
///
/// # Safety
/// The caller has AVX-512.
#[inline(always)]
unsafe fn interleave(even: __m512, odd: __m512) -> [__m512; 2] {
    // SAFETY: the caller has AVX-512.
    unsafe {
        let first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        let second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
        [_mm512_permutex2var_ps(even, first, odd), _mm512_permutex2var_ps(even, second, odd)]
    }
}

/// The inverse of [`interleave`].
///
/// # Safety
/// The caller has AVX-512.
#[inline(always)]
unsafe fn separate(first: __m512, second: __m512) -> [__m512; 2] {
    // SAFETY: the caller has AVX-512.
    unsafe {
        let even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        let odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
        [_mm512_permutex2var_ps(first, even, second), _mm512_permutex2var_ps(first, odd, second)]
    }
}

whole!(F32, __m512, 4, 64, _mm512_loadu_ps, _mm512_castps_si512);
whole!(F64, __m512d, 8, 64, _mm512_loadu_pd, _mm512_castpd_si512);

bf16!(__m512, __m512i, 64);
f16! {
    __m512, __m512i, 64, _mm256_loadu_si256, _mm512_cvtph_ps, _mm512_cvtps_ph, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC
}

impl Bf16 {
    /// # Safety
    /// The caller has AVX-512.
    #[inline(always)]
    unsafe fn pack(even: __m512, odd: __m512) -> __m512i {
        // SAFETY: the caller has AVX-512.
        unsafe {
            let even = _mm512_srli_epi32::<16>(Self::round(even));
            _mm512_mask_blend_epi16(0xAAAA_AAAA, even, Self::round(odd))
        }
    }
}
