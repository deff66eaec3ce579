//! Interface of an instruction set: vectors ([`Lanes`]), conversions of element types ([`Format`]) and
//! operations between vectors ([`Combine`]).

use crate::{Pass, Store};

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
    /// [`streams`](super::generic::streams) with the processor's features enabled: a separate function for each format and operation,
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
