//! The reduction algorithm over [`Lanes`] and [`Format`]. Everything here is inlined into a function of an
//! instruction-set file that enables the processor's features.

use super::{integers, scalar};
use crate::{Dtype, Op, Pass, Store, Width};

/// A vector of floating-point numbers.
///
/// # Safety
/// Calling a method needs the instruction set that the type belongs to.
pub(crate) trait Lanes: Copy {
    /// Numbers in a vector.
    const LANES: usize;
    /// All lanes equal to an integer.
    unsafe fn splat(value: u64) -> Self;
    unsafe fn add(self, other: Self) -> Self;
    unsafe fn multiply(self, other: Self) -> Self;
    unsafe fn divide(self, other: Self) -> Self;
    /// `other` where it is smaller or NaN, else `self`.
    unsafe fn minimum(self, other: Self) -> Self;
    /// `other` where it is larger or NaN, else `self`.
    unsafe fn maximum(self, other: Self) -> Self;
    /// The canonical quiet NaN in place of every NaN.
    unsafe fn canonical(self) -> Self;
}

/// Conversion of the elements of one type to a block of vectors and back, with one rounding.
///
/// A block is a few vectors, enough to hide the latency of an addition. Its elements are in whatever order is
/// cheapest to load, the same for every block of the format; [`Format::ordered`] and [`Format::shuffled`]
/// convert between that order and the order in memory, which blocks of the wide format use.
///
/// # Safety
/// As for [`Lanes`], and the pointers must be good for one block's elements. [`Format::stream`] needs a
/// destination that is aligned to [`STREAM_ALIGNMENT_BYTES`].
pub(crate) trait Format<V: Lanes>: Sized {
    const ELEMENT_BYTES: usize;
    /// An array `[V; n]`.
    type Block: Copy + AsRef<[V]> + AsMut<[V]>;
    /// The format of partial results.
    type Wide: Format<V, Block = Self::Block>;
    /// True if stores write every NaN as the canonical one; otherwise the caller canonicalises lanes before it
    /// stores them.
    const WRITES_ONE_NAN: bool = false;
    unsafe fn load(source: *const u8) -> Self::Block;
    unsafe fn store(destination: *mut u8, block: Self::Block);
    unsafe fn stream(destination: *mut u8, block: Self::Block);
    #[inline(always)]
    unsafe fn ordered(block: Self::Block) -> Self::Block {
        block
    }
    #[inline(always)]
    unsafe fn shuffled(block: Self::Block) -> Self::Block {
        block
    }
}

/// Alignment of the widest streaming store.
pub(crate) const STREAM_ALIGNMENT_BYTES: usize = 64;

/// One instruction set.
pub(crate) trait Machine {
    /// Makes streaming stores visible before any later access of the caller.
    unsafe fn fence();
    /// [`streams`] with the processor's features enabled: a separate function for each format and operation,
    /// because a single one takes the compiler much longer.
    unsafe fn streams<V: Lanes, F: Format<V>, S: Lanes, T: Format<S>, O>(
        store: Store,
        pass: &Pass<'_>,
    ) where
        O: Combine<V> + Combine<S>;
}

/// Floating-point formats of two bytes and more.
pub(crate) trait Floats: Machine {
    type Single: Lanes;
    type Double: Lanes;
    type F32: Format<Self::Single>;
    type Bf16: Format<Self::Single>;
    type F16: Format<Self::Single>;
    type F64: Format<Self::Double>;
}

/// Floating-point formats of one byte. Some processors support the wider formats but not these.
pub(crate) trait Bytes: Machine {
    type Lanes: Lanes;
    type F8E4M3: Format<Self::Lanes>;
    type F8E5M2: Format<Self::Lanes>;
}

/// A binary operation, as a type, so that each gets a separate loop.
pub(crate) trait Combine<V> {
    unsafe fn combine(accumulator: V, value: V) -> V;
}

pub(crate) struct Sum;
pub(crate) struct Product;
pub(crate) struct Min;
pub(crate) struct Max;

macro_rules! combine_lanes {
    ($($op:ident => $method:ident),*) => {$(
        impl<V: Lanes> Combine<V> for $op {
            #[inline(always)]
            unsafe fn combine(accumulator: V, value: V) -> V {
                // SAFETY: the caller has the instruction set.
                unsafe { accumulator.$method(value) }
            }
        }
    )*};
}
combine_lanes!(Sum => add, Product => multiply, Min => minimum, Max => maximum);

/// Reduces all types but those of [`reduce_bytes`].
///
/// # Safety
/// As for [`Pass::run`]; the pass has been checked, and the caller has `M`.
#[inline(always)]
pub(crate) unsafe fn reduce<M: Floats>(store: Store, pass: &Pass<'_>) {
    // SAFETY: the caller's promise, handed on.
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
    // SAFETY: the caller's promise, handed on.
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
    // SAFETY: the caller's promise, handed on.
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
    // SAFETY: the caller's promise, handed on.
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
        // SAFETY: the caller's promise, handed on.
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
