//! The formats in 512-bit vectors. Two-byte types are loaded as their even and their odd elements, one-byte types
//! as the quarters that shifts give, so that no element crosses a lane until the result is written.

use std::arch::x86_64::*;

use crate::arch::fp8::{self, E4M3, E5M2, Fp8};
use crate::arch::generic::Format;

pub(super) struct F32;
pub(super) struct Bf16;
pub(super) struct F16;
pub(super) struct F64;
pub(super) struct F8E4M3;
pub(super) struct F8E5M2;

type Block = [__m512; 4];

/// Stores one line, past the caches if `STREAM`.
///
/// # Safety
/// The caller has AVX-512; the destination is good for 64 bytes, and aligned if `STREAM`.
#[inline(always)]
unsafe fn put<const STREAM: bool>(destination: *mut u8, line: __m512i) {
    // SAFETY: the caller's promise.
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
unsafe fn upper_half(line: __m512i) -> __m256i {
    // SAFETY: the caller has AVX-512.
    unsafe { _mm512_extracti64x4_epi64::<1>(line) }
}

/// # Safety
/// The caller has AVX-512.
#[inline(always)]
unsafe fn join(low: __m256i, high: __m256i) -> __m512i {
    // SAFETY: the caller has AVX-512.
    unsafe { _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high) }
}

/// Even and odd elements become the first and the second half.
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

/// The other way round.
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

/// The formats of whole vectors.
macro_rules! whole {
    ($format:ident, $lanes:ty, $bytes:expr, $load:ident, $bits:ident) => {
        impl $format {
            /// # Safety
            /// As for [`put`], for four lines.
            #[inline(always)]
            unsafe fn write<const STREAM: bool>(destination: *mut u8, [a, b, c, d]: [$lanes; 4]) {
                // SAFETY: the caller's promise.
                unsafe {
                    put::<STREAM>(destination, $bits(a));
                    put::<STREAM>(destination.add(64), $bits(b));
                    put::<STREAM>(destination.add(128), $bits(c));
                    put::<STREAM>(destination.add(192), $bits(d));
                }
            }
        }
        impl Format<$lanes> for $format {
            const ELEMENT_BYTES: usize = $bytes;
            type Block = [$lanes; 4];
            type Wide = Self;
            #[inline(always)]
            unsafe fn load(source: *const u8) -> [$lanes; 4] {
                // SAFETY: the caller's pointer is good for four lines.
                unsafe {
                    [
                        $load(source.cast()),
                        $load(source.add(64).cast()),
                        $load(source.add(128).cast()),
                        $load(source.add(192).cast()),
                    ]
                }
            }
            stores!([$lanes; 4]);
        }
    };
}
whole!(F32, __m512, 4, _mm512_loadu_ps, _mm512_castps_si512);
whole!(F64, __m512d, 8, _mm512_loadu_pd, _mm512_castpd_si512);

impl Bf16 {
    /// Adds what rounds the upper half to nearest even (see the scalar code).
    ///
    /// # Safety
    /// The caller has AVX-512.
    #[inline(always)]
    unsafe fn round(lanes: __m512) -> __m512i {
        // SAFETY: the caller has AVX-512.
        unsafe {
            let bits = _mm512_castps_si512(lanes);
            let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
            _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)))
        }
    }

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

    /// # Safety
    /// As for [`put`], for two lines.
    #[inline(always)]
    unsafe fn write<const STREAM: bool>(destination: *mut u8, [a, b, c, d]: Block) {
        // SAFETY: the caller's promise.
        unsafe {
            put::<STREAM>(destination, Self::pack(a, b));
            put::<STREAM>(destination.add(64), Self::pack(c, d));
        }
    }
}

impl Format<__m512> for Bf16 {
    const ELEMENT_BYTES: usize = 2;
    type Block = Block;
    type Wide = F32;
    #[inline(always)]
    unsafe fn load(source: *const u8) -> Block {
        // SAFETY: the caller's pointer is good for two lines.
        unsafe {
            let upper = _mm512_set1_epi32(0xFFFF_0000_u32 as i32);
            let a = _mm512_loadu_si512(source.cast());
            let b = _mm512_loadu_si512(source.add(64).cast());
            [
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(a)),
                _mm512_castsi512_ps(_mm512_and_si512(a, upper)),
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(b)),
                _mm512_castsi512_ps(_mm512_and_si512(b, upper)),
            ]
        }
    }
    stores!(Block);
    #[inline(always)]
    unsafe fn ordered([a, b, c, d]: Block) -> Block {
        // SAFETY: the caller has AVX-512.
        let ([a, b], [c, d]) = unsafe { (interleave(a, b), interleave(c, d)) };
        [a, b, c, d]
    }
    #[inline(always)]
    unsafe fn shuffled([a, b, c, d]: Block) -> Block {
        // SAFETY: the caller has AVX-512.
        let ([a, b], [c, d]) = unsafe { (separate(a, b), separate(c, d)) };
        [a, b, c, d]
    }
}

impl F16 {
    /// # Safety
    /// The caller has AVX-512.
    #[inline(always)]
    unsafe fn pack(low: __m512, high: __m512) -> __m512i {
        const EVEN: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
        // SAFETY: the caller has AVX-512.
        unsafe { join(_mm512_cvtps_ph::<EVEN>(low), _mm512_cvtps_ph::<EVEN>(high)) }
    }

    /// # Safety
    /// As for [`put`], for two lines.
    #[inline(always)]
    unsafe fn write<const STREAM: bool>(destination: *mut u8, [a, b, c, d]: Block) {
        // SAFETY: the caller's promise.
        unsafe {
            put::<STREAM>(destination, Self::pack(a, b));
            put::<STREAM>(destination.add(64), Self::pack(c, d));
        }
    }
}

impl Format<__m512> for F16 {
    const ELEMENT_BYTES: usize = 2;
    type Block = Block;
    type Wide = F32;
    #[inline(always)]
    unsafe fn load(source: *const u8) -> Block {
        // SAFETY: the caller's pointer is good for two lines.
        unsafe {
            [
                _mm512_cvtph_ps(_mm256_loadu_si256(source.cast())),
                _mm512_cvtph_ps(_mm256_loadu_si256(source.add(32).cast())),
                _mm512_cvtph_ps(_mm256_loadu_si256(source.add(64).cast())),
                _mm512_cvtph_ps(_mm256_loadu_si256(source.add(96).cast())),
            ]
        }
    }
    stores!(Block);
}

/// A line of bytes whose even and odd elements are binary16 by now, as [even low, even high, odd low, odd high].
///
/// # Safety
/// The caller has AVX-512.
#[inline(always)]
unsafe fn quarters(even: __m512i, odd: __m512i) -> Block {
    // SAFETY: the caller has AVX-512.
    unsafe {
        [
            _mm512_cvtph_ps(_mm512_castsi512_si256(even)),
            _mm512_cvtph_ps(upper_half(even)),
            _mm512_cvtph_ps(_mm512_castsi512_si256(odd)),
            _mm512_cvtph_ps(upper_half(odd)),
        ]
    }
}

/// Each lane's element in its lowest byte, rounded to nearest even (see the scalar code).
///
/// # Safety
/// The caller has AVX-512.
#[inline(always)]
unsafe fn narrow<F: Fp8>(lanes: __m512) -> __m512i {
    // SAFETY: the caller has AVX-512.
    unsafe {
        let bits = _mm512_castps_si512(lanes);
        let magnitude = _mm512_and_si512(bits, _mm512_set1_epi32(0x7FFF_FFFF));
        let shift = _mm512_set1_epi32(F::SHIFT as i32);
        let odd = _mm512_and_si512(_mm512_srlv_epi32(bits, shift), _mm512_set1_epi32(1));
        let half = _mm512_set1_epi32((1 << (F::SHIFT - 1)) - 1);
        let sum = _mm512_add_epi32(magnitude, _mm512_add_epi32(odd, half));
        let rebias = _mm512_set1_epi32(F::REBIAS as i32);
        let normal = _mm512_sub_epi32(_mm512_srlv_epi32(sum, shift), rebias);
        let magic = _mm512_set1_epi32(F::SUBNORMAL_MAGIC as i32);
        let sum = _mm512_add_ps(_mm512_castsi512_ps(magnitude), _mm512_castsi512_ps(magic));
        let subnormal = _mm512_sub_epi32(_mm512_castps_si512(sum), magic);
        let smallest = _mm512_set1_epi32(F::SMALLEST_NORMAL as i32);
        let small = _mm512_cmplt_epu32_mask(magnitude, smallest);
        let rounded = _mm512_mask_mov_epi32(normal, small, subnormal);
        let bounded = _mm512_min_epu32(rounded, _mm512_set1_epi32(F::TOP as i32));
        let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(lanes, lanes);
        let element = _mm512_mask_mov_epi32(bounded, nan, _mm512_set1_epi32(fp8::NAN as i32));
        let sign = _mm512_and_si512(_mm512_srli_epi32::<24>(bits), _mm512_set1_epi32(0x80));
        _mm512_or_si512(element, sign)
    }
}

/// # Safety
/// As for [`put`].
#[inline(always)]
unsafe fn write_bytes<F: Fp8, const STREAM: bool>(destination: *mut u8, [a, b, c, d]: Block) {
    // SAFETY: the caller's promise.
    unsafe {
        put::<STREAM>(destination, join(pack_bytes::<F>(a, c), pack_bytes::<F>(b, d)));
    }
}

/// # Safety
/// The caller has AVX-512.
#[inline(always)]
unsafe fn pack_bytes<F: Fp8>(even: __m512, odd: __m512) -> __m256i {
    // SAFETY: the caller has AVX-512.
    unsafe {
        let odd = _mm512_slli_epi32::<8>(narrow::<F>(odd));
        _mm512_cvtepi32_epi16(_mm512_or_si512(narrow::<F>(even), odd))
    }
}

/// # Safety
/// The caller has AVX-512.
#[inline(always)]
unsafe fn ordered_quarters([a, b, c, d]: Block) -> Block {
    // SAFETY: the caller has AVX-512.
    let ([a, b], [c, d]) = unsafe { (interleave(a, c), interleave(b, d)) };
    [a, b, c, d]
}

/// # Safety
/// The caller has AVX-512.
#[inline(always)]
unsafe fn shuffled_quarters([a, b, c, d]: Block) -> Block {
    // SAFETY: the caller has AVX-512.
    let ([a, c], [b, d]) = unsafe { (separate(a, b), separate(c, d)) };
    [a, b, c, d]
}

bytes!(__m512, _mm512_loadu_si512, F8E4M3, E4M3, widen_e4m3);
bytes!(__m512, _mm512_loadu_si512, F8E5M2, E5M2, widen_e5m2);

/// E5M2 is the upper half of a binary16.
///
/// # Safety
/// The caller has AVX-512.
#[inline(always)]
unsafe fn widen_e5m2(line: __m512i) -> Block {
    // SAFETY: the caller has AVX-512.
    unsafe {
        let upper = _mm512_set1_epi16(0xFF00_u16 as i16);
        quarters(_mm512_slli_epi16::<8>(line), _mm512_and_si512(line, upper))
    }
}

/// E4M3's exponent and fraction, one place lower, are those of a binary16 that is 256 times smaller, subnormal
/// numbers too. All ones would be a number there: it becomes a NaN. The element is each lane's upper byte.
///
/// # Safety
/// The caller has AVX-512.
#[inline(always)]
unsafe fn half_of_e4m3(line: __m512i) -> __m512i {
    // SAFETY: the caller has AVX-512.
    unsafe {
        let bits = _mm512_srai_epi16::<1>(line);
        let half = _mm512_and_si512(bits, _mm512_set1_epi16(0xBF80_u16 as i16));
        let magnitude = _mm512_and_si512(half, _mm512_set1_epi16(0x3F80));
        let nan = _mm512_cmpeq_epi16_mask(magnitude, _mm512_set1_epi16(0x3F80));
        _mm512_mask_mov_epi16(half, nan, _mm512_set1_epi16(0x7E00))
    }
}

/// # Safety
/// The caller has AVX-512.
#[inline(always)]
unsafe fn widen_e4m3(line: __m512i) -> Block {
    // SAFETY: the caller has AVX-512.
    unsafe {
        let scale = _mm512_set1_ps(256.0);
        let [a, b, c, d] = quarters(half_of_e4m3(_mm512_slli_epi16::<8>(line)), half_of_e4m3(line));
        [
            _mm512_mul_ps(a, scale),
            _mm512_mul_ps(b, scale),
            _mm512_mul_ps(c, scale),
            _mm512_mul_ps(d, scale),
        ]
    }
}
