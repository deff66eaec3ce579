//! The two 8-bit floating-point formats: constants and conversions for all instruction sets.
//!
//! Values follow the "OCP 8-bit Floating Point Specification" and torch's casts: rounding to nearest even;
//! overflow becomes infinity in E5M2 and ±448 in E4M3, which has no infinity.

/// One of the formats.
pub(crate) trait Fp8 {
    /// Bits of a binary32's fraction that the format lacks.
    const SHIFT: u32;
    /// Difference of the exponents' biases, in units of the format's last place.
    const REBIAS: u32;
    /// Bits of the binary32 that is the smallest normal number.
    const SMALLEST_NORMAL: u32;
    /// Bits of the binary32 whose last place is that of the format's subnormal numbers.
    const SUBNORMAL_MAGIC: u32;
    /// Result of an overflow.
    const TOP: u32;
    /// True if [`Fp8::TOP`] is infinity.
    const TOP_IS_INFINITY: bool;
}

/// The only NaN that is written, in both formats.
pub(crate) const NAN: u32 = 0x7F;

pub(crate) struct E4M3;
pub(crate) struct E5M2;

impl Fp8 for E4M3 {
    const SHIFT: u32 = 20;
    const REBIAS: u32 = (127 - 7) << 3;
    const SMALLEST_NORMAL: u32 = (127 - 6) << 23;
    const SUBNORMAL_MAGIC: u32 = (127 + 23 - 9) << 23;
    const TOP: u32 = 0x7E;
    const TOP_IS_INFINITY: bool = false;
}

impl Fp8 for E5M2 {
    const SHIFT: u32 = 21;
    const REBIAS: u32 = (127 - 15) << 2;
    const SMALLEST_NORMAL: u32 = (127 - 14) << 23;
    const SUBNORMAL_MAGIC: u32 = (127 + 23 - 16) << 23;
    const TOP: u32 = 0x7C;
    const TOP_IS_INFINITY: bool = true;
}

/// One element of either format as a binary32, exactly. A NaN becomes the canonical one.
#[inline(always)]
pub(crate) const fn widen<F: Fp8>(bits: u8) -> f32 {
    let fraction_bits = 23 - F::SHIFT;
    let (magnitude, sign) = ((bits & 0x7F) as u32, ((bits & 0x80) as u32) << 24);
    if magnitude > F::TOP {
        return f32::from_bits(0x7FC0_0000);
    }
    if magnitude == F::TOP && F::TOP_IS_INFINITY {
        return f32::from_bits(0x7F80_0000 | sign);
    }
    if magnitude >> fraction_bits == 0 {
        // Multiples of the smallest number, which is the last place of the magic constant.
        let shifted = f32::from_bits(F::SUBNORMAL_MAGIC + magnitude);
        let subnormal = shifted - f32::from_bits(F::SUBNORMAL_MAGIC);
        return f32::from_bits(subnormal.to_bits() | sign);
    }
    f32::from_bits(((magnitude + F::REBIAS) << F::SHIFT) | sign)
}

/// A binary32 in either format, rounded once. A NaN becomes the canonical one.
#[inline(always)]
pub(crate) fn narrow<F: Fp8>(value: f32) -> u8 {
    let bits = value.to_bits();
    let magnitude = bits & 0x7FFF_FFFF;
    if value.is_nan() {
        return NAN as u8;
    }
    let rounded = if magnitude < F::SMALLEST_NORMAL {
        // The addition rounds to the format's last place; the remaining low bits are the element.
        let sum = f32::from_bits(magnitude) + f32::from_bits(F::SUBNORMAL_MAGIC);
        sum.to_bits() - F::SUBNORMAL_MAGIC
    } else {
        let odd = (magnitude >> F::SHIFT) & 1;
        ((magnitude + (1 << (F::SHIFT - 1)) - 1 + odd) >> F::SHIFT) - F::REBIAS
    };
    (rounded.min(F::TOP) | (bits >> 24 & 0x80)) as u8
}
