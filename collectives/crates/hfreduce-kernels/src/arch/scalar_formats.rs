//! Formats of single elements: the reference for those of every other instruction set.

use super::fp8::{self, E4M3, E5M2};
use super::lanes::{Format, Lanes};

pub(crate) struct F32;
pub(crate) struct Bf16;
pub(crate) struct F16;
pub(crate) struct F64;
pub(crate) struct F8E4M3;
pub(crate) struct F8E5M2;

macro_rules! lanes {
    ($t:ty, $nan:expr) => {
        impl Lanes for $t {
            const LANES: usize = 1;
            #[inline(always)]
            unsafe fn splat(value: u64) -> Self {
                value as $t
            }
            #[inline(always)]
            unsafe fn add(self, other: Self) -> Self {
                self + other
            }
            #[inline(always)]
            unsafe fn multiply(self, other: Self) -> Self {
                self * other
            }
            #[inline(always)]
            unsafe fn divide(self, other: Self) -> Self {
                self / other
            }
            #[inline(always)]
            unsafe fn minimum(self, other: Self) -> Self {
                if other < self || other.is_nan() { other } else { self }
            }
            #[inline(always)]
            unsafe fn maximum(self, other: Self) -> Self {
                if other > self || other.is_nan() { other } else { self }
            }
            #[inline(always)]
            unsafe fn canonical(self) -> Self {
                if self.is_nan() { $nan } else { self }
            }
        }
    };
}
lanes!(f32, f32::from_bits(0x7FC0_0000));
lanes!(f64, f64::from_bits(0x7FF8_0000_0000_0000));

/// A [`Format`] of single elements from a pair of conversions. Streaming stores are ordinary stores here.
macro_rules! format {
    ($format:ident, $lanes:ty, $wide:ty, $bits:ty, $load:expr, $store:expr) => {
        impl Format<$lanes> for $format {
            const ELEMENT_BYTES: usize = size_of::<$bits>();
            type Block = [$lanes; 1];
            type Wide = $wide;
            #[inline(always)]
            unsafe fn load(source: *const u8) -> [$lanes; 1] {
                // SAFETY: the caller's pointer is good for one element; no alignment is needed.
                let bits = unsafe { source.cast::<$bits>().read_unaligned() };
                [$load(bits)]
            }
            #[inline(always)]
            unsafe fn store(destination: *mut u8, [lane]: [$lanes; 1]) {
                // SAFETY: the caller's pointer is good for one element; no alignment is needed.
                unsafe { destination.cast::<$bits>().write_unaligned($store(lane)) }
            }
            #[inline(always)]
            unsafe fn stream(destination: *mut u8, block: [$lanes; 1]) {
                // SAFETY: as for `store`.
                unsafe { Self::store(destination, block) }
            }
        }
    };
}
format!(F32, f32, F32, u32, f32::from_bits, f32::to_bits);
format!(F64, f64, F64, u64, f64::from_bits, f64::to_bits);
format!(Bf16, f32, F32, u16, |bits: u16| f32::from_bits(u32::from(bits) << 16), round_to_bf16);
format!(F16, f32, F32, u16, |bits| half::f16::from_bits(bits).to_f32(), |lane| {
    half::f16::from_f32(lane).to_bits()
});
format!(F8E4M3, f32, F32, u8, fp8::widen::<E4M3>, fp8::narrow::<E4M3>);
format!(F8E5M2, f32, F32, u8, fp8::widen::<E5M2>, fp8::narrow::<E5M2>);

/// Rounds to nearest, ties to even: adds just under half of the last place, or half where the last place is
/// odd. The canonical NaN is unchanged; infinity has no fraction to round.
#[inline(always)]
fn round_to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) as u16
}
