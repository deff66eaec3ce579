//! x86-64: what the processor has, and one file per instruction set.

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

/// What AVX-512 needs besides for the 8-bit formats.
pub(crate) fn has_vbmi() -> bool {
    is_x86_feature_detected!("avx512vbmi")
}
