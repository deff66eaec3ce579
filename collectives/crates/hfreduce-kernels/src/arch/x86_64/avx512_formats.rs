//! Formats of two bytes and more in 512-bit vectors. A line of bf16 is loaded as its even and its odd elements,
//! so that no element crosses a lane.

use std::arch::x86_64::*;

use crate::arch::generic::Format;

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

/// Formats whose elements are whole lanes.
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
    /// Adds the rounding increment, so that the upper half is the value rounded to nearest even (see the scalar
    /// code).
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
