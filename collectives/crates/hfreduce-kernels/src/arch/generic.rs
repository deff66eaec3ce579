//! The algorithm, once, over [`Lanes`] and [`Format`]. Everything here is inlined into a function of the
//! instruction-set files that has the processor's features switched on.

use super::scalar;
use crate::{Dtype, Op, Store};

/// Vectors that are under way at once: enough to hide the latency of an addition.
const UNROLL: usize = 4;

/// Elements of an integer block: 256 bytes of the widest type.
const INTEGER_BLOCK: usize = 32;

/// A vector of floating-point numbers.
///
/// # Safety
/// Calling a method needs the instruction set that the type belongs to.
pub(crate) trait Lanes: Copy {
    /// How many numbers it holds.
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

/// How elements of one type become lanes and lanes become elements, rounded once.
///
/// # Safety
/// As for [`Lanes`], and the pointers must be good for `LANES` elements. [`Format::stream`] needs a
/// destination that is aligned to [`STREAM_ALIGNMENT_BYTES`].
pub(crate) trait Format<V: Lanes> {
    const ELEMENT_BYTES: usize;
    unsafe fn load(source: *const u8) -> V;
    /// The lanes hold no NaN but the canonical one.
    unsafe fn store(destination: *mut u8, lanes: V);
    unsafe fn stream(destination: *mut u8, lanes: V);
}

/// What the widest streaming store asks for.
pub(crate) const STREAM_ALIGNMENT_BYTES: usize = 64;

/// The four floating-point formats of one instruction set.
pub(crate) trait Machine {
    type Single: Lanes;
    type Double: Lanes;
    type F32: Format<Self::Single>;
    type Bf16: Format<Self::Single>;
    type F16: Format<Self::Single>;
    type F64: Format<Self::Double>;
    /// Makes streaming stores visible before whatever the caller does next.
    unsafe fn fence();
}

/// One of the binary operations, as a type so that each gets its own loop.
trait Combine<V> {
    unsafe fn combine(accumulator: V, value: V) -> V;
}

struct Sum;
struct Product;
struct Min;
struct Max;
struct And;
struct Or;
struct Xor;

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

/// An integer in a wrapper, so that its operations do not clash with those of lanes.
#[derive(Clone, Copy)]
#[repr(transparent)]
struct Integer<T>(T);

macro_rules! combine_integers {
    ($($t:ty),*) => {$(
        combine_integers!(@op $t, Sum, |a, b| a.wrapping_add(b));
        combine_integers!(@op $t, Product, |a, b| a.wrapping_mul(b));
        combine_integers!(@op $t, Min, |a, b| if b < a { b } else { a });
        combine_integers!(@op $t, Max, |a, b| if b > a { b } else { a });
        combine_integers!(@op $t, And, |a, b| a & b);
        combine_integers!(@op $t, Or, |a, b| a | b);
        combine_integers!(@op $t, Xor, |a, b| a ^ b);
    )*};
    (@op $t:ty, $op:ident, |$a:ident, $b:ident| $body:expr) => {
        impl Combine<Integer<$t>> for $op {
            #[inline(always)]
            unsafe fn combine(accumulator: Integer<$t>, value: Integer<$t>) -> Integer<$t> {
                let ($a, $b) = (accumulator.0, value.0);
                Integer($body)
            }
        }
    };
}
combine_integers!(i32, i64, u8, i8);

/// # Safety
/// As for [`crate::reduce_raw`]; there is an input, the type has the operation, and the caller has `M`.
#[inline(always)]
pub(crate) unsafe fn reduce<M: Machine>(
    store: Store,
    dtype: Dtype,
    op: Op,
    inputs: &[*const u8],
    output: *mut u8,
    numel: usize,
) {
    // SAFETY: the caller's promise, handed on.
    unsafe {
        match dtype {
            Dtype::F32 => {
                floats::<M, M::Single, M::F32, f32, scalar::F32>(store, op, inputs, output, numel)
            }
            Dtype::Bf16 => {
                floats::<M, M::Single, M::Bf16, f32, scalar::Bf16>(store, op, inputs, output, numel)
            }
            Dtype::F16 => {
                floats::<M, M::Single, M::F16, f32, scalar::F16>(store, op, inputs, output, numel)
            }
            Dtype::F64 => {
                floats::<M, M::Double, M::F64, f64, scalar::F64>(store, op, inputs, output, numel)
            }
            Dtype::I32 => integers::<i32>(op, inputs, output, numel),
            Dtype::I64 => integers::<i64>(op, inputs, output, numel),
            Dtype::U8 => integers::<u8>(op, inputs, output, numel),
            Dtype::I8 => integers::<i8>(op, inputs, output, numel),
        }
    }
}

/// # Safety
/// As for [`reduce`]: `V` and `F` are the vectors of `M`, `S` and `T` the same format one element at a time.
#[inline(always)]
unsafe fn floats<M: Machine, V: Lanes, F: Format<V>, S: Lanes, T: Format<S>>(
    store: Store,
    op: Op,
    inputs: &[*const u8],
    output: *mut u8,
    numel: usize,
) {
    // SAFETY: the caller's promise, handed on.
    unsafe {
        match op {
            Op::Sum => streams::<M, V, F, S, T, Sum>(store, inputs, output, numel),
            Op::Product => streams::<M, V, F, S, T, Product>(store, inputs, output, numel),
            Op::Min => streams::<M, V, F, S, T, Min>(store, inputs, output, numel),
            Op::Max => streams::<M, V, F, S, T, Max>(store, inputs, output, numel),
            // Floats have no bitwise operations; the public functions have refused them.
            Op::BitAnd | Op::BitOr | Op::BitXor => {}
        }
    }
}

/// Whole blocks as vectors; what is left over, and what precedes an aligned output, one by one.
///
/// # Safety
/// As for [`floats`].
#[inline(always)]
unsafe fn streams<M: Machine, V: Lanes, F: Format<V>, S: Lanes, T: Format<S>, O>(
    store: Store,
    inputs: &[*const u8],
    output: *mut u8,
    numel: usize,
) where
    O: Combine<V> + Combine<S>,
{
    let block = V::LANES * UNROLL;
    let head = output.align_offset(STREAM_ALIGNMENT_BYTES);
    let streaming = store == Store::Streaming && head.is_multiple_of(F::ELEMENT_BYTES);
    let head = if streaming { (head / F::ELEMENT_BYTES).min(numel) } else { 0 };
    let blocks_end = head + (numel - head) / block * block;
    // SAFETY: the three ranges lie within the elements that the caller promises; the middle one starts at an
    // aligned output where it streams.
    unsafe {
        blocks::<S, T, O, 1, false>(inputs, output, 0, head);
        if streaming {
            blocks::<V, F, O, UNROLL, true>(inputs, output, head, blocks_end);
            M::fence();
        } else {
            blocks::<V, F, O, UNROLL, false>(inputs, output, head, blocks_end);
        }
        blocks::<S, T, O, 1, false>(inputs, output, blocks_end, numel);
    }
}

/// Elements `from..to`, a whole number of blocks of `VECTORS` vectors.
///
/// # Safety
/// As for [`floats`], for these elements.
#[inline(always)]
unsafe fn blocks<
    V: Lanes,
    F: Format<V>,
    O: Combine<V>,
    const VECTORS: usize,
    const STREAM: bool,
>(
    inputs: &[*const u8],
    output: *mut u8,
    from: usize,
    to: usize,
) {
    let Some((&first, rest)) = inputs.split_first() else { return };
    let vector_bytes = V::LANES * F::ELEMENT_BYTES;
    let (mut offset, end) = (from * F::ELEMENT_BYTES, to * F::ELEMENT_BYTES);
    while offset < end {
        // SAFETY: a block lies within `from..to`. All of its inputs are read before its output is written, so
        // the output may be an input.
        unsafe {
            let mut accumulators: [V; VECTORS] =
                std::array::from_fn(|i| F::load(first.add(offset + i * vector_bytes)));
            for &input in rest {
                for (i, accumulator) in accumulators.iter_mut().enumerate() {
                    let value = F::load(input.add(offset + i * vector_bytes));
                    *accumulator = O::combine(*accumulator, value);
                }
            }
            for (i, accumulator) in accumulators.iter().enumerate() {
                let destination = output.add(offset + i * vector_bytes);
                if STREAM {
                    F::stream(destination, accumulator.canonical());
                } else {
                    F::store(destination, accumulator.canonical());
                }
            }
        }
        offset += VECTORS * vector_bytes;
    }
}

/// # Safety
/// As for [`reduce`].
#[inline(always)]
unsafe fn integers<T: Copy>(op: Op, inputs: &[*const u8], output: *mut u8, numel: usize)
where
    Sum: Combine<Integer<T>>,
    Product: Combine<Integer<T>>,
    Min: Combine<Integer<T>>,
    Max: Combine<Integer<T>>,
    And: Combine<Integer<T>>,
    Or: Combine<Integer<T>>,
    Xor: Combine<Integer<T>>,
{
    // SAFETY: the caller's promise, handed on.
    unsafe {
        match op {
            Op::Sum => integer_stream::<T, Sum>(inputs, output, numel),
            Op::Product => integer_stream::<T, Product>(inputs, output, numel),
            Op::Min => integer_stream::<T, Min>(inputs, output, numel),
            Op::Max => integer_stream::<T, Max>(inputs, output, numel),
            Op::BitAnd => integer_stream::<T, And>(inputs, output, numel),
            Op::BitOr => integer_stream::<T, Or>(inputs, output, numel),
            Op::BitXor => integer_stream::<T, Xor>(inputs, output, numel),
        }
    }
}

/// # Safety
/// As for [`reduce`].
#[inline(always)]
unsafe fn integer_stream<T: Copy, O: Combine<Integer<T>>>(
    inputs: &[*const u8],
    output: *mut u8,
    numel: usize,
) {
    let whole = numel / INTEGER_BLOCK * INTEGER_BLOCK;
    // SAFETY: the caller's promise; the two ranges make up all elements.
    unsafe {
        integer_blocks::<T, O, INTEGER_BLOCK>(inputs, output, 0, whole);
        integer_blocks::<T, O, 1>(inputs, output, whole, numel);
    }
}

/// Integers need no intrinsics: the compiler turns a block of fixed length into vectors by itself.
///
/// # Safety
/// As for [`reduce`], for the elements `from..to`, a whole number of blocks.
#[inline(always)]
unsafe fn integer_blocks<T: Copy, O: Combine<Integer<T>>, const BLOCK: usize>(
    inputs: &[*const u8],
    output: *mut u8,
    from: usize,
    to: usize,
) {
    let Some((&first, rest)) = inputs.split_first() else { return };
    let mut at = from;
    while at < to {
        // SAFETY: a block lies within `from..to` and is read whole before it is written; no alignment is needed.
        unsafe {
            let mut accumulator: [Integer<T>; BLOCK] =
                first.cast::<T>().add(at).cast::<[Integer<T>; BLOCK]>().read_unaligned();
            for &input in rest {
                let value: [Integer<T>; BLOCK] =
                    input.cast::<T>().add(at).cast::<[Integer<T>; BLOCK]>().read_unaligned();
                for i in 0..BLOCK {
                    accumulator[i] = O::combine(accumulator[i], value[i]);
                }
            }
            output.cast::<T>().add(at).cast::<[Integer<T>; BLOCK]>().write_unaligned(accumulator);
        }
        at += BLOCK;
    }
}

/// # Safety
/// As for [`crate::scale_raw`]; the type is a floating-point one and the caller has `M`.
#[inline(always)]
pub(crate) unsafe fn scale<M: Machine>(dtype: Dtype, buffer: *mut u8, numel: usize, divisor: u64) {
    // SAFETY: the caller's promise, handed on.
    unsafe {
        match dtype {
            Dtype::F32 => divide::<M::Single, M::F32, f32, scalar::F32>(buffer, numel, divisor),
            Dtype::Bf16 => divide::<M::Single, M::Bf16, f32, scalar::Bf16>(buffer, numel, divisor),
            Dtype::F16 => divide::<M::Single, M::F16, f32, scalar::F16>(buffer, numel, divisor),
            Dtype::F64 => divide::<M::Double, M::F64, f64, scalar::F64>(buffer, numel, divisor),
            // Integers have no average; the public functions have refused them.
            Dtype::I32 | Dtype::I64 | Dtype::U8 | Dtype::I8 => {}
        }
    }
}

/// # Safety
/// As for [`scale`].
#[inline(always)]
unsafe fn divide<V: Lanes, F: Format<V>, S: Lanes, T: Format<S>>(
    buffer: *mut u8,
    numel: usize,
    divisor: u64,
) {
    let whole = numel / V::LANES * V::LANES;
    // SAFETY: both loops stay within the elements that the caller promises.
    unsafe {
        let (many, one) = (V::splat(divisor), S::splat(divisor));
        for at in (0..whole).step_by(V::LANES) {
            let place = buffer.add(at * F::ELEMENT_BYTES);
            F::store(place, F::load(place).divide(many).canonical());
        }
        for at in whole..numel {
            let place = buffer.add(at * F::ELEMENT_BYTES);
            T::store(place, T::load(place).divide(one).canonical());
        }
    }
}
