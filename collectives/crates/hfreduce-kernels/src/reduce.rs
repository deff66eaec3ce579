//! The public functions: they check their arguments and run one kernel.

use thiserror::Error;

use crate::arch::{self, Isa};
use crate::environment::Environment;
use crate::pass::{Pass, Store, Width};
use crate::{Dtype, Op};

impl Pass<'_> {
    /// Runs the pass with the chosen instruction set.
    ///
    /// # Errors
    /// The pass has no inputs, or the type does not support the operation; nothing has been written.
    ///
    /// # Safety
    /// As for [`Pass::run_with`].
    pub unsafe fn run(&self, store: Store) -> Result<(), KernelError> {
        // SAFETY: guaranteed by the caller.
        unsafe { self.run_with(Isa::chosen(), store) }
    }

    /// Runs the pass with the given instruction set (one that the processor lacks is replaced by the best that
    /// it has) and kind of store. The bits of the result do not depend on either. A wide output is always
    /// [`Store::Cached`].
    ///
    /// # Errors
    /// As for [`Pass::run`].
    ///
    /// # Safety
    /// Every input must be readable and the output writable for `numel` elements of their types. The output may
    /// start where the first of `inputs` or the first of `wide` starts if its elements are not larger, and must
    /// overlap no input otherwise. No other thread or process may write the inputs, or access the output,
    /// during the call.
    pub unsafe fn run_with(&self, isa: Isa, store: Store) -> Result<(), KernelError> {
        let &Pass { dtype, op, .. } = self;
        if self.inputs.is_empty() && self.wide.is_empty() {
            return Err(KernelError::NoInput);
        }
        if !op.supports(dtype) {
            return Err(KernelError::Unsupported { op, dtype });
        }
        if self.divisor != 1 && !dtype.is_float() {
            return Err(KernelError::NoAverage { dtype });
        }
        let _standard = Environment::standard();
        // SAFETY: guaranteed by the caller; there is an input, and the type has the operation.
        unsafe { arch::reduce(isa.available(), store, self) };
        Ok(())
    }
}

/// The reason why a reduction was refused. Nothing has been written.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum KernelError {
    /// The list of inputs is empty.
    #[error("a reduction needs at least one input")]
    NoInput,
    /// Bitwise operations are for integers.
    #[error("{op} is not defined for {dtype}: use an integer type")]
    Unsupported {
        /// The operation.
        op: Op,
        /// The element type.
        dtype: Dtype,
    },
    /// Only floating-point elements can be scaled.
    #[error("an average of {dtype} is not defined: use a floating-point type, or a sum")]
    NoAverage {
        /// The element type.
        dtype: Dtype,
    },
    /// The inputs and the output have different sizes.
    #[error("input {input} has {actual_bytes} bytes and the output has {expected_bytes}")]
    Length {
        /// Index of the input.
        input: usize,
        /// Its size.
        actual_bytes: usize,
        /// The output's size.
        expected_bytes: usize,
    },
    /// The output's size is not a multiple of the element size.
    #[error("{bytes} bytes are not a whole number of {dtype} elements")]
    Ragged {
        /// The output's size.
        bytes: usize,
        /// The element type.
        dtype: Dtype,
    },
}

/// `output[i] = op(inputs[0][i], inputs[1][i], …)`. Slices of bytes; no alignment is needed.
pub fn reduce(
    dtype: Dtype,
    op: Op,
    inputs: &[&[u8]],
    output: &mut [u8],
) -> Result<(), KernelError> {
    let numel = check(dtype, op, inputs, output.len())?;
    let pointers: Vec<*const u8> = inputs.iter().map(|input| input.as_ptr()).collect();
    // SAFETY: every input and the output hold `numel` elements, and a borrow keeps them apart.
    unsafe { reduce_raw(dtype, op, &pointers, output.as_mut_ptr(), numel) }
}

/// Divides every element by `divisor` (the number of ranks, for an average), with fp32 arithmetic and one
/// rounding for the shorter types. If the sum is computed anyway, [`Pass::divisor`] saves a pass and a
/// rounding.
pub fn scale(dtype: Dtype, buffer: &mut [u8], divisor: u64) -> Result<(), KernelError> {
    let numel = whole(dtype, buffer.len())?;
    // SAFETY: the buffer holds `numel` elements and is borrowed mutably.
    unsafe { scale_raw(dtype, buffer.as_mut_ptr(), numel, divisor) }
}

/// [`reduce`] over pointers, for memory that other processes share.
///
/// # Safety
/// Every input must be readable and the output writable for `numel` elements. The output may be exactly input 0
/// and must overlap no input otherwise. No other thread or process may write the inputs, or access the output,
/// during the call.
pub unsafe fn reduce_raw(
    dtype: Dtype,
    op: Op,
    inputs: &[*const u8],
    output: *mut u8,
    numel: usize,
) -> Result<(), KernelError> {
    // SAFETY: guaranteed by the caller.
    unsafe { reduce_raw_with(Isa::chosen(), Store::Cached, dtype, op, inputs, output, numel) }
}

/// [`reduce_raw`] with the given instruction set (one that the processor lacks is replaced by the best that it
/// has) and kind of store. The bits of the result do not depend on either.
///
/// # Safety
/// As for [`reduce_raw`].
pub unsafe fn reduce_raw_with(
    isa: Isa,
    store: Store,
    dtype: Dtype,
    op: Op,
    inputs: &[*const u8],
    output: *mut u8,
    numel: usize,
) -> Result<(), KernelError> {
    let pass = Pass { dtype, op, inputs, wide: &[], output, to: Width::Narrow, numel, divisor: 1 };
    // SAFETY: guaranteed by the caller.
    unsafe { pass.run_with(isa, store) }
}

/// [`scale`] over a pointer.
///
/// # Safety
/// The buffer must be readable and writable for `numel` elements, and no other thread or process may access it
/// during the call.
pub unsafe fn scale_raw(
    dtype: Dtype,
    buffer: *mut u8,
    numel: usize,
    divisor: u64,
) -> Result<(), KernelError> {
    // SAFETY: guaranteed by the caller.
    unsafe { scale_raw_with(Isa::chosen(), dtype, buffer, numel, divisor) }
}

/// [`scale_raw`] with a given instruction set.
///
/// # Safety
/// As for [`scale_raw`].
pub unsafe fn scale_raw_with(
    isa: Isa,
    dtype: Dtype,
    buffer: *mut u8,
    numel: usize,
    divisor: u64,
) -> Result<(), KernelError> {
    if !dtype.is_float() {
        return Err(KernelError::NoAverage { dtype });
    }
    let inputs = [buffer.cast_const()];
    let (op, output, to) = (Op::Sum, buffer, Width::Narrow);
    let pass = Pass { dtype, op, inputs: &inputs, wide: &[], output, to, numel, divisor };
    // SAFETY: guaranteed by the caller.
    unsafe { pass.run_with(isa, Store::Cached) }
}

/// Copies `bytes` bytes; with [`Store::Streaming`], past the caches.
///
/// # Safety
/// `source` must be readable and `destination` writable for `bytes` bytes, and they must not overlap.
pub unsafe fn copy_raw(store: Store, source: *const u8, destination: *mut u8, bytes: usize) {
    // SAFETY: guaranteed by the caller.
    unsafe { arch::copy(Isa::chosen(), store, source, destination, bytes) }
}

fn whole(dtype: Dtype, bytes: usize) -> Result<usize, KernelError> {
    if !bytes.is_multiple_of(dtype.size_bytes()) {
        return Err(KernelError::Ragged { bytes, dtype });
    }
    Ok(bytes / dtype.size_bytes())
}

fn check(
    dtype: Dtype,
    op: Op,
    inputs: &[&[u8]],
    expected_bytes: usize,
) -> Result<usize, KernelError> {
    if !op.supports(dtype) {
        return Err(KernelError::Unsupported { op, dtype });
    }
    for (input, slice) in inputs.iter().enumerate() {
        if slice.len() != expected_bytes {
            let actual_bytes = slice.len();
            return Err(KernelError::Length { input, actual_bytes, expected_bytes });
        }
    }
    whole(dtype, expected_bytes)
}
