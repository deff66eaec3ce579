//! 256-bit vectors: AVX2, with F16C for binary16.

use std::arch::x86_64::*;

use super::avx2_formats::{Bf16, F8E4M3, F8E5M2, F16, F32, F64};
use crate::arch::generic;
use crate::arch::lanes::{Bytes, Combine, Floats, Format, Lanes, Machine, STREAM_ALIGNMENT_BYTES};
use crate::{Pass, Store};

struct Avx2;

/// # Safety
/// As for [`generic::reduce`]; the processor has AVX2 and F16C.
#[target_feature(enable = "avx2,f16c")]
pub(crate) unsafe fn reduce(store: Store, pass: &Pass<'_>) {
    // SAFETY: guaranteed by the caller.
    unsafe { generic::reduce::<Avx2>(store, pass) }
}

/// # Safety
/// As for [`generic::reduce_bytes`]; the processor has AVX2 and F16C.
#[target_feature(enable = "avx2,f16c")]
pub(crate) unsafe fn reduce_bytes(store: Store, pass: &Pass<'_>) {
    // SAFETY: guaranteed by the caller.
    unsafe { generic::reduce_bytes::<Avx2>(store, pass) }
}

/// # Safety
/// As for [`crate::copy_raw`]; the processor has AVX2.
#[target_feature(enable = "avx2")]
pub(crate) unsafe fn copy<const STREAM: bool>(
    source: *const u8,
    destination: *mut u8,
    bytes: usize,
) {
    const BLOCK: usize = 128;
    let head = destination.align_offset(STREAM_ALIGNMENT_BYTES).min(bytes);
    let end = head + (bytes - head) / BLOCK * BLOCK;
    // SAFETY: three adjacent ranges within the caller's bytes; the middle one is aligned at its destination.
    unsafe {
        std::ptr::copy_nonoverlapping(source, destination, head);
        for at in (head..end).step_by(BLOCK) {
            let from = |i: usize| _mm256_loadu_si256(source.add(at + 32 * i).cast());
            let lines = [from(0), from(1), from(2), from(3)];
            for (i, line) in lines.into_iter().enumerate() {
                let place = destination.add(at + 32 * i).cast();
                if STREAM {
                    _mm256_stream_si256(place, line);
                } else {
                    _mm256_store_si256(place, line);
                }
            }
        }
        if STREAM {
            _mm_sfence();
        }
        std::ptr::copy_nonoverlapping(source.add(end), destination.add(end), bytes - end);
    }
}

impl Floats for Avx2 {
    type Single = __m256;
    type Double = __m256d;
    type F32 = F32;
    type Bf16 = Bf16;
    type F16 = F16;
    type F64 = F64;
}

impl Bytes for Avx2 {
    type Lanes = __m256;
    type F8E4M3 = F8E4M3;
    type F8E5M2 = F8E5M2;
}

machine!(Avx2, "avx2,f16c");

lanes! {
    __m256, 8, f32, 0x7FC0_0000, _mm256_set1_ps, _mm256_add_ps, _mm256_mul_ps, _mm256_div_ps, _mm256_min_ps,
    _mm256_max_ps, _mm256_cmp_ps, _mm256_blendv_ps
}

lanes! {
    __m256d, 4, f64, 0x7FF8_0000_0000_0000, _mm256_set1_pd, _mm256_add_pd, _mm256_mul_pd, _mm256_div_pd, _mm256_min_pd,
    _mm256_max_pd, _mm256_cmp_pd, _mm256_blendv_pd
}
