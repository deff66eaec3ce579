//! The reduction algorithm over [`Lanes`] and [`Format`]. Everything here is inlined into a function of an
//! instruction-set file that enables the processor's features.

use super::lanes::{
    Bytes, Combine, Floats, Format, Lanes, Machine, Max, Min, Product, STREAM_ALIGNMENT_BYTES, Sum,
};
use super::{integers, scalar_formats as scalar};
use crate::{Dtype, Op, Pass, Store, Width};

/// Reduces all types but those of [`reduce_bytes`].
///
/// # Safety
/// As for [`Pass::run`]; the pass has been checked, and the caller has `M`.
#[inline(always)]
pub(crate) unsafe fn reduce<M: Floats>(store: Store, pass: &Pass<'_>) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        match pass.dtype {
            Dtype::F32 => floats::<M, M::Single, M::F32, f32, scalar::F32>(store, pass),
            Dtype::Bf16 => floats::<M, M::Single, M::Bf16, f32, scalar::Bf16>(store, pass),
            Dtype::F16 => floats::<M, M::Single, M::F16, f32, scalar::F16>(store, pass),
            Dtype::F64 => floats::<M, M::Double, M::F64, f64, scalar::F64>(store, pass),
            _ => integers::reduce(pass),
        }
    }
}

/// Reduces the 8-bit floating-point types ([`Dtype::is_fp8`]).
///
/// # Safety
/// As for [`reduce`].
#[inline(always)]
pub(crate) unsafe fn reduce_bytes<M: Bytes>(store: Store, pass: &Pass<'_>) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        if pass.dtype == Dtype::F8E4M3 {
            floats::<M, M::Lanes, M::F8E4M3, f32, scalar::F8E4M3>(store, pass);
        } else {
            floats::<M, M::Lanes, M::F8E5M2, f32, scalar::F8E5M2>(store, pass);
        }
    }
}

/// # Safety
/// As for [`reduce`]: `V` and `F` are the vectors of `M`, `S` and `T` the same format one element at a time.
#[inline(always)]
unsafe fn floats<M: Machine, V: Lanes, F: Format<V>, S: Lanes, T: Format<S>>(
    store: Store,
    pass: &Pass<'_>,
) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        match pass.op {
            Op::Sum => M::streams::<V, F, S, T, Sum>(store, pass),
            Op::Product => M::streams::<V, F, S, T, Product>(store, pass),
            Op::Min => M::streams::<V, F, S, T, Min>(store, pass),
            Op::Max => M::streams::<V, F, S, T, Max>(store, pass),
            // Floats have no bitwise operations; the public functions refuse them.
            Op::BitAnd | Op::BitOr | Op::BitXor => {}
        }
    }
}

/// Processes whole blocks as vectors; the remainder, and elements before an aligned output, one by one.
///
/// # Safety
/// As for [`floats`].
#[inline(always)]
pub(super) unsafe fn streams<M: Machine, V: Lanes, F: Format<V>, S: Lanes, T: Format<S>, O>(
    store: Store,
    pass: &Pass<'_>,
) where
    O: Combine<V> + Combine<S>,
{
    let block = elements::<V, F>();
    let plain = pass.wide.is_empty() && pass.to == Width::Narrow;
    let head_bytes = pass.output.align_offset(STREAM_ALIGNMENT_BYTES);
    let streams = plain
        && store == Store::Streaming
        && block > 1
        && head_bytes.is_multiple_of(F::ELEMENT_BYTES);
    let head = if streams { (head_bytes / F::ELEMENT_BYTES).min(pass.numel) } else { 0 };
    let end = head + (pass.numel - head) / block * block;
    // SAFETY: the three ranges lie within the caller's elements; the middle one starts at an aligned output if
    // it streams. They run in ascending order, as `Pass` requires for outputs that are also inputs.
    unsafe {
        rest::<S, T, O>(pass, 0, head);
        if streams {
            blocks::<V, F, O, true>(pass, head, end);
            M::fence();
        } else if plain {
            blocks::<V, F, O, false>(pass, head, end);
        } else {
            mixed_blocks::<V, F, O>(pass, head, end);
        }
        rest::<S, T, O>(pass, end, pass.numel);
    }
}

/// Prefetch distance. Needed where conversions or partial results fill the processor's out-of-order window, so
/// that it does not prefetch this far by itself.
const AHEAD_BYTES: usize = 2048;
const LINE_BYTES: usize = 64;

/// Loads a block; prefetches a later one if `prefetches`.
///
/// # Safety
/// As for [`Format::load`].
#[inline(always)]
unsafe fn load<V: Lanes, F: Format<V>>(source: *const u8, prefetches: bool) -> F::Block {
    if prefetches {
        prefetch_ahead::<V, F>(source);
    }
    // SAFETY: guaranteed by the caller.
    unsafe { F::load(source) }
}

/// Prefetches the block `AHEAD_BYTES` behind this one. Any address is allowed: a prefetch never faults.
#[inline(always)]
fn prefetch_ahead<V: Lanes, F: Format<V>>(block: *const u8) {
    let bytes = if V::LANES > 1 { elements::<V, F>() * F::ELEMENT_BYTES } else { 0 };
    for line in (0..bytes).step_by(LINE_BYTES) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: every x86-64 processor has the instruction, and it accepts any address.
        unsafe {
            use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
            _mm_prefetch::<_MM_HINT_T1>(block.wrapping_add(AHEAD_BYTES + line).cast());
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = (block, line);
    }
}

/// Elements of one block.
#[inline(always)]
fn elements<V: Lanes, F: Format<V>>() -> usize {
    V::LANES * (size_of::<F::Block>() / size_of::<V>())
}

/// Processes elements `from..to` one by one: short ranges, so one copy serves all instruction sets.
///
/// # Safety
/// As for [`floats`], for these elements.
#[inline(never)]
unsafe fn rest<S: Lanes, T: Format<S>, O: Combine<S>>(pass: &Pass<'_>, from: usize, to: usize) {
    if from < to {
        // SAFETY: guaranteed by the caller.
        unsafe { mixed_blocks::<S, T, O>(pass, from, to) };
    }
}

/// Processes elements `from..to`, a whole number of blocks, of a pass with only narrow inputs and a narrow
/// output.
///
/// # Safety
/// As for [`floats`], for these elements.
#[inline(always)]
unsafe fn blocks<V: Lanes, F: Format<V>, O: Combine<V>, const STREAM: bool>(
    pass: &Pass<'_>,
    from: usize,
    to: usize,
) {
    let Some((&first, rest)) = pass.inputs.split_first() else { return };
    // SAFETY: the caller has the instruction set.
    let divisor = unsafe { V::splat(pass.divisor) };
    let block_bytes = elements::<V, F>() * F::ELEMENT_BYTES;
    let (from, to) = (from * F::ELEMENT_BYTES, to * F::ELEMENT_BYTES);
    for offset in (from..to).step_by(block_bytes) {
        // SAFETY: a block lies within `from..to`. All of its inputs are read before its output is written, so
        // the output may be an input.
        unsafe {
            let mut block = load::<V, F>(first.add(offset), F::ELEMENT_BYTES == 1);
            for &input in rest {
                let values = load::<V, F>(input.add(offset), F::ELEMENT_BYTES == 1);
                fold::<V, O>(block.as_mut(), values.as_ref());
            }
            finish(block.as_mut(), pass.divisor, divisor, !F::WRITES_ONE_NAN);
            if STREAM {
                F::stream(pass.output.add(offset), block);
            } else {
                F::store(pass.output.add(offset), block);
            }
        }
    }
}

/// Processes elements `from..to`, a whole number of blocks, of any pass.
///
/// # Safety
/// As for [`floats`], for these elements.
#[inline(always)]
unsafe fn mixed_blocks<V: Lanes, F: Format<V>, O: Combine<V>>(
    pass: &Pass<'_>,
    from: usize,
    to: usize,
) {
    // SAFETY: the caller has the instruction set.
    let divisor = unsafe { V::splat(pass.divisor) };
    let mut at = from;
    while at < to {
        let (narrow_offset, wide_offset) = (at * F::ELEMENT_BYTES, at * F::Wide::ELEMENT_BYTES);
        // SAFETY: as in `blocks`.
        unsafe {
            let (mut block, wide) = match (pass.inputs, pass.wide) {
                ([first, rest @ ..], wide) => {
                    let mut block = load::<V, F>(first.add(narrow_offset), true);
                    for input in rest {
                        let values = load::<V, F>(input.add(narrow_offset), true);
                        fold::<V, O>(block.as_mut(), values.as_ref());
                    }
                    (F::ordered(block), wide)
                }
                ([], [first, rest @ ..]) => (F::Wide::load(first.add(wide_offset)), rest),
                ([], []) => return,
            };
            for input in wide {
                fold::<V, O>(block.as_mut(), F::Wide::load(input.add(wide_offset)).as_ref());
            }
            finish(block.as_mut(), pass.divisor, divisor, true);
            match pass.to {
                Width::Wide => F::Wide::store(pass.output.add(wide_offset), block),
                Width::Narrow => {
                    F::store(pass.output.add(narrow_offset), F::shuffled(block));
                }
            }
        }
        at += elements::<V, F>();
    }
}

/// # Safety
/// The caller has the instruction set.
#[inline(always)]
unsafe fn fold<V: Lanes, O: Combine<V>>(block: &mut [V], values: &[V]) {
    for i in 0..block.len().min(values.len()) {
        // SAFETY: the caller has the instruction set.
        block[i] = unsafe { O::combine(block[i], values[i]) };
    }
}

/// # Safety
/// The caller has the instruction set.
#[inline(always)]
unsafe fn finish<V: Lanes>(block: &mut [V], divisor: u64, lanes: V, canonical: bool) {
    for vector in block {
        // SAFETY: the caller has the instruction set.
        unsafe {
            if divisor != 1 {
                *vector = vector.divide(lanes);
            }
            if canonical {
                *vector = vector.canonical();
            }
        }
    }
}
