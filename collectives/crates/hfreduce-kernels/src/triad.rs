//! STREAM's triad, a = b + s c, with the stores that the kernels use: what a machine's memory can do.

/// Goes through the three arrays once; they must have one length, a multiple of 256 bytes is best.
///
/// # Panics
/// If the lengths differ.
pub fn triad(b: &[u8], c: &[u8], a: &mut [u8]) {
    assert!(a.len() == b.len() && a.len() == c.len(), "three arrays of one length");
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: the processor has what is asked for, and all three have one length.
            return unsafe { triad_avx512(b, c, a) };
        }
        if is_x86_feature_detected!("avx") {
            // SAFETY: as above.
            return unsafe { triad_avx(b, c, a) };
        }
    }
    for (i, a) in a.chunks_exact_mut(4).enumerate() {
        let of =
            |x: &[u8]| f32::from_le_bytes([x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]]);
        a.copy_from_slice(&(of(b) + 3.0 * of(c)).to_le_bytes());
    }
}

/// # Safety
/// The three slices have one length, a multiple of four vectors.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn triad_avx512(b: &[u8], c: &[u8], a: &mut [u8]) {
    use std::arch::x86_64::*;
    let scale = _mm512_set1_ps(3.0);
    let (from, target) = ((b.as_ptr(), c.as_ptr()), a.as_mut_ptr());
    let head = target.align_offset(64);
    let end = head + (a.len() - head) / 256 * 256;
    for at in (head..end).step_by(64) {
        // SAFETY: within all three; the output is aligned.
        unsafe {
            let product = _mm512_mul_ps(_mm512_loadu_ps(from.1.add(at).cast()), scale);
            let sum = _mm512_add_ps(_mm512_loadu_ps(from.0.add(at).cast()), product);
            _mm512_stream_ps(target.add(at).cast(), sum);
        }
    }
    _mm_sfence();
}

/// # Safety
/// As for [`triad_avx512`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx")]
unsafe fn triad_avx(b: &[u8], c: &[u8], a: &mut [u8]) {
    use std::arch::x86_64::*;
    let scale = _mm256_set1_ps(3.0);
    let (from, target) = ((b.as_ptr(), c.as_ptr()), a.as_mut_ptr());
    let head = target.align_offset(32);
    let end = head + (a.len() - head) / 256 * 256;
    for at in (head..end).step_by(32) {
        // SAFETY: within all three; the output is aligned.
        unsafe {
            let product = _mm256_mul_ps(_mm256_loadu_ps(from.1.add(at).cast()), scale);
            let sum = _mm256_add_ps(_mm256_loadu_ps(from.0.add(at).cast()), product);
            _mm256_stream_ps(target.add(at).cast(), sum);
        }
    }
    _mm_sfence();
}
