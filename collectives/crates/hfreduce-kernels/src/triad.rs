//! STREAM's triad, a = b + s c, with the stores that the kernels use: a measure of memory bandwidth.

use std::ops::Range;

/// The widest vector, to which streaming stores are aligned.
const VECTOR_BYTES: usize = 64;

/// Computes the triad of three arrays, which must have the same length, and be aligned to their elements for
/// vectors to be used.
///
/// # Panics
/// If the lengths differ.
pub fn triad(b: &[u8], c: &[u8], a: &mut [u8]) {
    assert!(a.len() == b.len() && a.len() == c.len(), "three arrays of one length");
    let head = a.as_ptr().align_offset(VECTOR_BYTES).min(a.len());
    let end = head + (a.len() - head) / VECTOR_BYTES * VECTOR_BYTES;
    // The vectorised range starts at a whole element.
    let middle = if head.is_multiple_of(size_of::<f32>()) { head..end } else { 0..0 };
    let done = if vectors(b, c, a, middle.clone()) { middle } else { 0..0 };
    elements(&b[..done.start], &c[..done.start], &mut a[..done.start]);
    elements(&b[done.end..], &c[done.end..], &mut a[done.end..]);
}

fn elements(b: &[u8], c: &[u8], a: &mut [u8]) {
    for (i, a) in a.chunks_exact_mut(4).enumerate() {
        let of =
            |x: &[u8]| f32::from_le_bytes([x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]]);
        a.copy_from_slice(&(of(b) + 3.0 * of(c)).to_le_bytes());
    }
}

/// Returns false if the processor lacks both instruction sets.
fn vectors(b: &[u8], c: &[u8], a: &mut [u8], range: Range<usize>) -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: the processor has the feature; the range is whole aligned vectors of all arrays.
            unsafe { triad_avx512(b, c, a, range) };
            return true;
        }
        if is_x86_feature_detected!("avx") {
            // SAFETY: as above.
            unsafe { triad_avx(b, c, a, range) };
            return true;
        }
    }
    let _ = (b, c, a, range);
    false
}

/// # Safety
/// The range lies in all three slices, its length is a multiple of [`VECTOR_BYTES`], and it starts at an
/// address of `a` that is aligned to that.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn triad_avx512(b: &[u8], c: &[u8], a: &mut [u8], range: Range<usize>) {
    use std::arch::x86_64::*;
    let scale = _mm512_set1_ps(3.0);
    let (from, target) = ((b.as_ptr(), c.as_ptr()), a.as_mut_ptr());
    for at in range.step_by(64) {
        // SAFETY: within all three; the output is aligned.
        unsafe {
            let product = _mm512_mul_ps(_mm512_loadu_ps(from.1.add(at).cast()), scale);
            let sum = _mm512_add_ps(_mm512_loadu_ps(from.0.add(at).cast()), product);
            _mm512_stream_ps(target.add(at).cast(), sum);
        }
    }
    // SAFETY: every x86-64 processor has the instruction.
    #[allow(unused_unsafe, reason = "unsafe in Rust 1.89, safe in later versions")]
    unsafe {
        _mm_sfence();
    }
}

/// # Safety
/// As for [`triad_avx512`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx")]
unsafe fn triad_avx(b: &[u8], c: &[u8], a: &mut [u8], range: Range<usize>) {
    use std::arch::x86_64::*;
    let scale = _mm256_set1_ps(3.0);
    let (from, target) = ((b.as_ptr(), c.as_ptr()), a.as_mut_ptr());
    for at in range.step_by(32) {
        // SAFETY: within all three; the output is aligned.
        unsafe {
            let product = _mm256_mul_ps(_mm256_loadu_ps(from.1.add(at).cast()), scale);
            let sum = _mm256_add_ps(_mm256_loadu_ps(from.0.add(at).cast()), product);
            _mm256_stream_ps(target.add(at).cast(), sum);
        }
    }
    // SAFETY: every x86-64 processor has the instruction.
    #[allow(unused_unsafe, reason = "unsafe in Rust 1.89, safe in later versions")]
    unsafe {
        _mm_sfence();
    }
}
