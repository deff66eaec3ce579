//! Formats in 256-bit vectors. Two-byte types are loaded as their even and their odd elements, one-byte types
//! as the quarters that shifts yield, so that no element crosses a lane until the result is written.

use std::arch::x86_64::*;
use std::arch::x86_64::{
    _mm256_add_epi32 as add_epi32, _mm256_and_si256 as and_si, _mm256_castps_si256 as castps_si,
    _mm256_castsi256_ps as castsi_ps, _mm256_loadu_si256 as loadu_si,
    _mm256_set1_epi32 as set1_epi32, _mm256_slli_epi32 as slli_epi32,
    _mm256_srli_epi32 as srli_epi32,
};

use crate::arch::fp8::{self, E4M3, E5M2, Fp8};
use crate::arch::lanes::Format;

pub(super) struct F32;
pub(super) struct Bf16;
pub(super) struct F16;
pub(super) struct F64;
pub(super) struct F8E4M3;
pub(super) struct F8E5M2;

type Block = [__m256; 4];

/// Stores one line, past the caches if `STREAM`.
///
/// # Safety
/// The caller has AVX2; the destination is good for 32 bytes, and aligned if `STREAM`.
#[inline(always)]
unsafe fn put<const STREAM: bool>(destination: *mut u8, line: __m256i) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        if STREAM {
            _mm256_stream_si256(destination.cast(), line);
        } else {
            _mm256_storeu_si256(destination.cast(), line);
        }
    }
}

/// # Safety
/// The caller has AVX2.
#[inline(always)]
unsafe fn upper_half(line: __m256i) -> __m128i {
    // SAFETY: the caller has AVX2.
    unsafe { _mm256_extracti128_si256::<1>(line) }
}

/// # Safety
/// The caller has AVX2.
#[inline(always)]
unsafe fn join(low: __m128i, high: __m128i) -> __m256i {
    // SAFETY: the caller has AVX2.
    unsafe { _mm256_set_m128i(high, low) }
}

/// Converts even and odd elements to the first and the second half.
///
/// # Safety
/// The caller has AVX2.
#[inline(always)]
unsafe fn interleave(even: __m256, odd: __m256) -> [__m256; 2] {
    // SAFETY: the caller has AVX2.
    unsafe {
        let (low, high) = (_mm256_unpacklo_ps(even, odd), _mm256_unpackhi_ps(even, odd));
        [_mm256_permute2f128_ps::<0x20>(low, high), _mm256_permute2f128_ps::<0x31>(low, high)]
    }
}

/// The inverse of [`interleave`].
///
/// # Safety
/// The caller has AVX2.
#[inline(always)]
unsafe fn separate(first: __m256, second: __m256) -> [__m256; 2] {
    // SAFETY: the caller has AVX2.
    unsafe {
        let even = _mm256_castps_pd(_mm256_shuffle_ps::<0b1000_1000>(first, second));
        let odd = _mm256_castps_pd(_mm256_shuffle_ps::<0b1101_1101>(first, second));
        [
            _mm256_castpd_ps(_mm256_permute4x64_pd::<0b1101_1000>(even)),
            _mm256_castpd_ps(_mm256_permute4x64_pd::<0b1101_1000>(odd)),
        ]
    }
}

whole!(F32, __m256, 4, 32, _mm256_loadu_ps, _mm256_castps_si256);
whole!(F64, __m256d, 8, 32, _mm256_loadu_pd, _mm256_castpd_si256);

bf16!(__m256, __m256i, 32);
f16! {
    __m256, __m256i, 32, _mm_loadu_si128, _mm256_cvtph_ps, _mm256_cvtps_ph, _MM_FROUND_TO_NEAREST_INT
}

impl Bf16 {
    /// # Safety
    /// The caller has AVX2.
    #[inline(always)]
    unsafe fn pack(even: __m256, odd: __m256) -> __m256i {
        // SAFETY: the caller has AVX2.
        unsafe {
            let even = _mm256_srli_epi32::<16>(Self::round(even));
            _mm256_blend_epi16::<0b1010_1010>(even, Self::round(odd))
        }
    }
}

/// Widens a line of bytes whose even and odd elements have been converted to binary16, as [even low, even high,
/// odd low, odd high].
///
/// # Safety
/// The caller has AVX2.
#[inline(always)]
unsafe fn quarters(even: __m256i, odd: __m256i) -> Block {
    // SAFETY: the caller has AVX2.
    unsafe {
        [
            _mm256_cvtph_ps(_mm256_castsi256_si128(even)),
            _mm256_cvtph_ps(upper_half(even)),
            _mm256_cvtph_ps(_mm256_castsi256_si128(odd)),
            _mm256_cvtph_ps(upper_half(odd)),
        ]
    }
}

/// Each lane's element in its lowest byte, rounded to nearest even (see the scalar code).
///
/// # Safety
/// The caller has AVX2.
#[inline(always)]
unsafe fn narrow<F: Fp8>(lanes: __m256) -> __m256i {
    // SAFETY: the caller has AVX2.
    unsafe {
        let bits = _mm256_castps_si256(lanes);
        let magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7FFF_FFFF));
        let shift = _mm256_set1_epi32(F::SHIFT as i32);
        let odd = _mm256_and_si256(_mm256_srlv_epi32(bits, shift), _mm256_set1_epi32(1));
        let half = _mm256_set1_epi32((1 << (F::SHIFT - 1)) - 1);
        let sum = _mm256_add_epi32(magnitude, _mm256_add_epi32(odd, half));
        let rebias = _mm256_set1_epi32(F::REBIAS as i32);
        let normal = _mm256_sub_epi32(_mm256_srlv_epi32(sum, shift), rebias);
        let magic = _mm256_set1_epi32(F::SUBNORMAL_MAGIC as i32);
        let sum = _mm256_add_ps(_mm256_castsi256_ps(magnitude), _mm256_castsi256_ps(magic));
        let subnormal = _mm256_sub_epi32(_mm256_castps_si256(sum), magic);
        let smallest = _mm256_set1_epi32(F::SMALLEST_NORMAL as i32);
        let small = _mm256_cmpgt_epi32(smallest, magnitude);
        let rounded = _mm256_blendv_epi8(normal, subnormal, small);
        let bounded = _mm256_min_epu32(rounded, _mm256_set1_epi32(F::TOP as i32));
        let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(lanes, lanes));
        let sign = _mm256_and_si256(_mm256_srli_epi32::<24>(bits), _mm256_set1_epi32(0x80));
        let element = _mm256_or_si256(bounded, sign);
        _mm256_blendv_epi8(element, _mm256_set1_epi32(fp8::NAN as i32), nan)
    }
}

/// # Safety
/// As for [`put`].
#[inline(always)]
unsafe fn write_bytes<F: Fp8, const STREAM: bool>(destination: *mut u8, [a, b, c, d]: Block) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let words = _mm256_packus_epi32(pack_bytes::<F>(a, c), pack_bytes::<F>(b, d));
        put::<STREAM>(destination, _mm256_permute4x64_epi64::<0b1101_1000>(words));
    }
}

/// # Safety
/// The caller has AVX2.
#[inline(always)]
unsafe fn pack_bytes<F: Fp8>(even: __m256, odd: __m256) -> __m256i {
    // SAFETY: the caller has AVX2.
    unsafe {
        let odd = _mm256_slli_epi32::<8>(narrow::<F>(odd));
        _mm256_or_si256(narrow::<F>(even), odd)
    }
}

/// # Safety
/// The caller has AVX2.
#[inline(always)]
unsafe fn ordered_quarters([a, b, c, d]: Block) -> Block {
    // SAFETY: the caller has AVX2.
    let ([a, b], [c, d]) = unsafe { (interleave(a, c), interleave(b, d)) };
    [a, b, c, d]
}

/// # Safety
/// The caller has AVX2.
#[inline(always)]
unsafe fn shuffled_quarters([a, b, c, d]: Block) -> Block {
    // SAFETY: the caller has AVX2.
    let ([a, c], [b, d]) = unsafe { (separate(a, b), separate(c, d)) };
    [a, b, c, d]
}

bytes!(__m256, _mm256_loadu_si256, F8E4M3, E4M3, widen_e4m3);
bytes!(__m256, _mm256_loadu_si256, F8E5M2, E5M2, widen_e5m2);

/// E5M2 is the upper half of a binary16.
///
/// # Safety
/// The caller has AVX2.
#[inline(always)]
unsafe fn widen_e5m2(line: __m256i) -> Block {
    // SAFETY: the caller has AVX2.
    unsafe {
        let upper = _mm256_set1_epi16(0xFF00_u16 as i16);
        quarters(_mm256_slli_epi16::<8>(line), _mm256_and_si256(line, upper))
    }
}

/// E4M3's exponent and fraction, one place lower, are those of a binary16 that is 256 times smaller, also for
/// subnormal numbers. All ones would be a number in binary16, so it is replaced by a NaN. The element is each
/// lane's upper byte.
///
/// # Safety
/// The caller has AVX2.
#[inline(always)]
unsafe fn half_of_e4m3(line: __m256i) -> __m256i {
    // SAFETY: the caller has AVX2.
    unsafe {
        let bits = _mm256_srai_epi16::<1>(line);
        let half = _mm256_and_si256(bits, _mm256_set1_epi16(0xBF80_u16 as i16));
        let magnitude = _mm256_and_si256(half, _mm256_set1_epi16(0x3F80));
        let nan = _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x3F80));
        _mm256_or_si256(half, nan)
    }
}

/// # Safety
/// The caller has AVX2.
#[inline(always)]
unsafe fn widen_e4m3(line: __m256i) -> Block {
    // SAFETY: the caller has AVX2.
    unsafe {
        let scale = _mm256_set1_ps(256.0);
        let [a, b, c, d] = quarters(half_of_e4m3(_mm256_slli_epi16::<8>(line)), half_of_e4m3(line));
        [
            _mm256_mul_ps(a, scale),
            _mm256_mul_ps(b, scale),
            _mm256_mul_ps(c, scale),
            _mm256_mul_ps(d, scale),
        ]
    }
}
