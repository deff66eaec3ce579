//! Integer kernels without intrinsics: the compiler vectorises a block of fixed length.

use super::lanes::{Combine, Max, Min, Product, Sum};
use crate::{Dtype, Op, Pass};

/// Elements of a block: 256 bytes of the widest type.
const BLOCK: usize = 32;

struct And;
struct Or;
struct Xor;

/// A wrapper, so that an integer's operations do not clash with those of lanes.
#[derive(Clone, Copy)]
#[repr(transparent)]
struct Integer<T>(T);

macro_rules! combine {
    ($($t:ty),*) => {$(
        combine!(@op $t, Sum, |a, b| a.wrapping_add(b));
        combine!(@op $t, Product, |a, b| a.wrapping_mul(b));
        combine!(@op $t, Min, |a, b| if b < a { b } else { a });
        combine!(@op $t, Max, |a, b| if b > a { b } else { a });
        combine!(@op $t, And, |a, b| a & b);
        combine!(@op $t, Or, |a, b| a | b);
        combine!(@op $t, Xor, |a, b| a ^ b);
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
combine!(i8, u8, i16, u16, i32, u32, i64, u64);

/// # Safety
/// As for [`super::generic::reduce`], for an integer type.
#[inline(always)]
pub(crate) unsafe fn reduce(pass: &Pass<'_>) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        match pass.dtype {
            Dtype::I8 => operation::<i8>(pass),
            Dtype::U8 => operation::<u8>(pass),
            Dtype::I16 => operation::<i16>(pass),
            Dtype::U16 => operation::<u16>(pass),
            Dtype::I32 => operation::<i32>(pass),
            Dtype::U32 => operation::<u32>(pass),
            Dtype::I64 => operation::<i64>(pass),
            Dtype::U64 => operation::<u64>(pass),
            // The caller handles these.
            Dtype::F32 | Dtype::Bf16 | Dtype::F16 | Dtype::F64 | Dtype::F8E4M3 | Dtype::F8E5M2 => {}
        }
    }
}

/// # Safety
/// As for [`reduce`].
#[inline(always)]
unsafe fn operation<T: Copy>(pass: &Pass<'_>)
where
    Sum: Combine<Integer<T>>,
    Product: Combine<Integer<T>>,
    Min: Combine<Integer<T>>,
    Max: Combine<Integer<T>>,
    And: Combine<Integer<T>>,
    Or: Combine<Integer<T>>,
    Xor: Combine<Integer<T>>,
{
    // SAFETY: guaranteed by the caller.
    unsafe {
        match pass.op {
            Op::Sum => stream::<T, Sum>(pass),
            Op::Product => stream::<T, Product>(pass),
            Op::Min => stream::<T, Min>(pass),
            Op::Max => stream::<T, Max>(pass),
            Op::BitAnd => stream::<T, And>(pass),
            Op::BitOr => stream::<T, Or>(pass),
            Op::BitXor => stream::<T, Xor>(pass),
        }
    }
}

/// # Safety
/// As for [`reduce`].
#[inline(always)]
unsafe fn stream<T: Copy, O: Combine<Integer<T>>>(pass: &Pass<'_>) {
    let whole = pass.numel / BLOCK * BLOCK;
    // SAFETY: guaranteed by the caller; the two ranges make up all elements.
    unsafe {
        blocks::<T, O, BLOCK>(pass, 0, whole);
        blocks::<T, O, 1>(pass, whole, pass.numel);
    }
}

/// # Safety
/// As for [`reduce`], for the elements `from..to`, a whole number of blocks.
#[inline(always)]
unsafe fn blocks<T: Copy, O: Combine<Integer<T>>, const COUNT: usize>(
    pass: &Pass<'_>,
    from: usize,
    to: usize,
) {
    // Partial results of an integer have the same type, so the two lists are one.
    let (first, narrow, wide) = match (pass.inputs, pass.wide) {
        ([first, narrow @ ..], wide) => (*first, narrow, wide),
        ([], [first, wide @ ..]) => (*first, &[][..], wide),
        ([], []) => return,
    };
    let mut at = from;
    while at < to {
        // SAFETY: a block lies within `from..to` and is read whole before it is written; no alignment is needed.
        unsafe {
            let mut block: [Integer<T>; COUNT] =
                first.cast::<T>().add(at).cast::<[Integer<T>; COUNT]>().read_unaligned();
            for &input in narrow.iter().chain(wide) {
                let value: [Integer<T>; COUNT] =
                    input.cast::<T>().add(at).cast::<[Integer<T>; COUNT]>().read_unaligned();
                for i in 0..COUNT {
                    block[i] = O::combine(block[i], value[i]);
                }
            }
            pass.output.cast::<T>().add(at).cast::<[Integer<T>; COUNT]>().write_unaligned(block);
        }
        at += COUNT;
    }
}
