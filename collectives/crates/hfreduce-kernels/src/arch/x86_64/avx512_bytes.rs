//! The 8-bit formats in 512-bit vectors, with the byte permutations of AVX512_VBMI.
//!
//! A byte has 128 magnitudes, and two permutations look up 128 bytes at once: one for the upper and one for the
//! lower half of the bf16 number that equals the element (subnormal ones included). The halves are joined
//! within 128-bit lanes, where a shift and a mask turn the even and the odd bf16 elements into fp32.

use std::arch::x86_64::*;

use super::avx512_formats::{Block, F32, join, put};
use crate::arch::fp8::{self, E4M3, E5M2, Fp8};
use crate::arch::generic;
use crate::arch::lanes::{Bytes, Combine, Format, Lanes, Machine};
use crate::{Pass, Store};

/// Truth table of a ternary operation.
const A_OR_B_AND_C: i32 = 0xF8;

struct Vbmi;
struct F8E4M3;
struct F8E5M2;

/// # Safety
/// As for [`generic::reduce_bytes`]; the processor has AVX-512 with VBMI.
#[target_feature(enable = "avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
pub(crate) unsafe fn reduce(store: Store, pass: &Pass<'_>) {
    // SAFETY: guaranteed by the caller.
    unsafe { generic::reduce_bytes::<Vbmi>(store, pass) }
}

impl Bytes for Vbmi {
    type Lanes = __m512;
    type F8E4M3 = F8E4M3;
    type F8E5M2 = F8E5M2;
}

machine!(Vbmi, "avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi");

bytes!(__m512, _mm512_loadu_si512, F8E4M3, E4M3, widen::<E4M3>);
bytes!(__m512, _mm512_loadu_si512, F8E5M2, E5M2, widen::<E5M2>);

/// One byte of the bf16 number that equals each magnitude.
#[repr(align(64))]
struct Table([u8; 128]);

impl Table {
    const fn of<F: Fp8>(shift: u32) -> Self {
        let mut table = [0; 128];
        let mut magnitude = 0;
        while magnitude < table.len() {
            table[magnitude] = (fp8::widen::<F>(magnitude as u8).to_bits() >> shift) as u8;
            magnitude += 1;
        }
        Self(table)
    }

    /// Looks up each byte's magnitude; the sign is ignored.
    ///
    /// # Safety
    /// The caller has VBMI.
    #[inline(always)]
    unsafe fn look_up(&self, line: __m512i) -> __m512i {
        let table = self.0.as_ptr();
        // SAFETY: two lines of the table, and the caller has VBMI.
        unsafe {
            let low = _mm512_load_si512(table.cast());
            let high = _mm512_load_si512(table.add(64).cast());
            _mm512_permutex2var_epi8(low, line, high)
        }
    }
}

/// The differences between the two formats.
trait Byte: Fp8 + Sized {
    const UPPER: Table = Table::of::<Self>(24);
    const LOWER: Table = Table::of::<Self>(16);
    /// Scales the numbers so that the format's subnormal numbers become subnormal in binary16.
    ///
    /// # Safety
    /// The caller has AVX-512.
    unsafe fn scaled(lanes: __m512) -> __m512;
    /// The magnitude of such a binary16, with the format's last place at bit 8. An overflow becomes the top.
    ///
    /// # Safety
    /// The caller has AVX-512.
    unsafe fn magnitude(half: __m512i) -> __m512i;
}

/// The upper half of a binary16.
impl Byte for E5M2 {
    #[inline(always)]
    unsafe fn scaled(lanes: __m512) -> __m512 {
        lanes
    }
    #[inline(always)]
    unsafe fn magnitude(half: __m512i) -> __m512i {
        // SAFETY: the caller has AVX-512.
        unsafe { _mm512_and_si512(half, _mm512_set1_epi16(i16::MAX)) }
    }
}

/// A binary16 that is 256 times smaller, one place lower.
impl Byte for E4M3 {
    #[inline(always)]
    unsafe fn scaled(lanes: __m512) -> __m512 {
        // SAFETY: the caller has AVX-512.
        unsafe { _mm512_mul_ps(lanes, _mm512_set1_ps(1.0 / 256.0)) }
    }
    #[inline(always)]
    unsafe fn magnitude(half: __m512i) -> __m512i {
        // SAFETY: the caller has AVX-512.
        unsafe {
            let magnitude = _mm512_slli_epi16::<1>(half);
            _mm512_min_epu16(magnitude, _mm512_set1_epi16((Self::TOP << 8) as i16))
        }
    }
}

/// Even and odd elements of the lower halves of all 128-bit lanes, then those of the upper halves. The sign of
/// a NaN is unspecified.
///
/// # Safety
/// The caller has VBMI.
#[inline(always)]
unsafe fn widen<F: Byte>(line: __m512i) -> Block {
    // SAFETY: the caller has VBMI.
    unsafe {
        let (sign, even) = (_mm512_set1_epi8(i8::MIN), _mm512_set1_epi32(0xFFFF_0000_u32 as i32));
        let upper = const { &F::UPPER }.look_up(line);
        let upper = _mm512_ternarylogic_epi32::<A_OR_B_AND_C>(upper, line, sign);
        let lower = const { &F::LOWER }.look_up(line);
        let first = _mm512_unpacklo_epi8(lower, upper);
        let second = _mm512_unpackhi_epi8(lower, upper);
        [
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(first)),
            _mm512_castsi512_ps(_mm512_and_si512(first, even)),
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(second)),
            _mm512_castsi512_ps(_mm512_and_si512(second, even)),
        ]
    }
}

/// Index of each element in [`narrow`]'s two vectors, in the order of memory.
static ORDER: Line = order();

#[repr(align(64))]
struct Line([u8; 64]);

const fn order() -> Line {
    let mut order = [0; 64];
    let mut at = 0;
    while at < 64 {
        let (lane, upper, odd, pair) = (at / 16, at / 8 % 2, at % 2, at % 8 / 2);
        let word = 16 * odd + 4 * lane + pair;
        order[at] = (64 * upper + 2 * word + 1) as u8;
        at += 1;
    }
    Line(order)
}

/// # Safety
/// As for [`put`]; the caller has VBMI.
#[inline(always)]
unsafe fn write_bytes<F: Byte, const STREAM: bool>(destination: *mut u8, [a, b, c, d]: Block) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let order = _mm512_load_si512(ORDER.0.as_ptr().cast());
        let line = _mm512_permutex2var_epi8(narrow::<F>(a, b), order, narrow::<F>(c, d));
        put::<STREAM>(destination, line);
    }
}

/// Elements in the upper bytes of words, first the even and then the odd ones; rounded once, to nearest even.
///
/// # Safety
/// The caller has AVX-512.
#[inline(always)]
unsafe fn narrow<F: Byte>(even: __m512, odd: __m512) -> __m512i {
    // SAFETY: the caller has AVX-512.
    unsafe {
        let half = join(halves::<F>(even), halves::<F>(odd));
        let magnitude = F::magnitude(half);
        let last = _mm512_and_si512(_mm512_srli_epi16::<8>(magnitude), _mm512_set1_epi16(1));
        let sum = _mm512_add_epi16(magnitude, _mm512_add_epi16(last, _mm512_set1_epi16(0x7F)));
        let sign = _mm512_set1_epi16(i16::MIN);
        let element = _mm512_ternarylogic_epi32::<A_OR_B_AND_C>(sum, half, sign);
        let doubled = _mm512_slli_epi16::<1>(half);
        let nan = _mm512_cmpgt_epu16_mask(doubled, _mm512_set1_epi16(0xF800_u16 as i16));
        _mm512_mask_mov_epi16(element, nan, _mm512_set1_epi16((fp8::NAN << 8) as i16))
    }
}

/// Numbers truncated to binary16, with the seventh place set if any truncated bit was set: then the remainder
/// is not a tie, and rounding the result equals rounding once.
///
/// # Safety
/// The caller has AVX-512.
#[inline(always)]
unsafe fn halves<F: Byte>(lanes: __m512) -> __m256i {
    const CUT: i32 = _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC;
    // SAFETY: the caller has AVX-512.
    unsafe {
        let bits = _mm512_castps_si512(lanes);
        let inexact = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x0001_FFFF));
        let sticky = _mm512_mask_or_epi32(bits, inexact, bits, _mm512_set1_epi32(0x0002_0000));
        _mm512_cvtps_ph::<CUT>(F::scaled(_mm512_castsi512_ps(sticky)))
    }
}

/// Transposes the 128-bit lanes of four vectors as a matrix: its own inverse.
///
/// # Safety
/// The caller has AVX-512.
#[inline(always)]
unsafe fn transpose([a, b, c, d]: Block) -> Block {
    // SAFETY: the caller has AVX-512.
    unsafe {
        let ab_low = _mm512_shuffle_f32x4::<0b01_00_01_00>(a, b);
        let ab_high = _mm512_shuffle_f32x4::<0b11_10_11_10>(a, b);
        let cd_low = _mm512_shuffle_f32x4::<0b01_00_01_00>(c, d);
        let cd_high = _mm512_shuffle_f32x4::<0b11_10_11_10>(c, d);
        [
            _mm512_shuffle_f32x4::<0b10_00_10_00>(ab_low, cd_low),
            _mm512_shuffle_f32x4::<0b11_01_11_01>(ab_low, cd_low),
            _mm512_shuffle_f32x4::<0b10_00_10_00>(ab_high, cd_high),
            _mm512_shuffle_f32x4::<0b11_01_11_01>(ab_high, cd_high),
        ]
    }
}

/// # Safety
/// The caller has AVX-512.
#[inline(always)]
unsafe fn ordered_quarters([a, b, c, d]: Block) -> Block {
    // SAFETY: the caller has AVX-512.
    unsafe {
        transpose([
            _mm512_unpacklo_ps(a, b),
            _mm512_unpackhi_ps(a, b),
            _mm512_unpacklo_ps(c, d),
            _mm512_unpackhi_ps(c, d),
        ])
    }
}

/// # Safety
/// The caller has AVX-512.
#[inline(always)]
unsafe fn shuffled_quarters(block: Block) -> Block {
    // SAFETY: the caller has AVX-512.
    unsafe {
        let [ab_low, ab_high, cd_low, cd_high] = transpose(block);
        [
            _mm512_shuffle_ps::<0b10_00_10_00>(ab_low, ab_high),
            _mm512_shuffle_ps::<0b11_01_11_01>(ab_low, ab_high),
            _mm512_shuffle_ps::<0b10_00_10_00>(cd_low, cd_high),
            _mm512_shuffle_ps::<0b11_01_11_01>(cd_low, cd_high),
        ]
    }
}
