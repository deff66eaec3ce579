//! x86-64: feature detection, and one file for each instruction set.

#[macro_use]
mod formats;

pub(crate) mod avx2;
mod avx2_formats;
pub(crate) mod avx512;
pub(crate) mod avx512_bytes;
mod avx512_formats;

pub(crate) fn has_avx2() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c")
}

pub(crate) fn has_avx512() -> bool {
    has_avx2()
        && is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
}

/// The feature that the 8-bit formats need in addition to AVX-512.
pub(crate) fn has_vbmi() -> bool {
    is_x86_feature_detected!("avx512vbmi")
}
