//! Validation of the C arguments of operations.

use std::ffi::c_void;

use hfreduce_engine::{Buffer, Communicator, DType, ReduceOp, fused_shape};

use crate::comm::{Comm, open};
use crate::error::Failure;
use crate::values::seconds;
use crate::work::Work;

/// What every operation is given; checked once.
pub(crate) struct Call<'a> {
    pub(crate) engine: &'a Communicator,
    pub(crate) dtype: DType,
    pub(crate) timeout: std::time::Duration,
    /// Without a handle the calling thread waits at once and moves the data itself.
    pub(crate) lazy: bool,
}

impl<'a> Call<'a> {
    /// # Safety
    /// `comm` is null or open.
    pub(crate) unsafe fn new(
        comm: *mut Comm,
        dtype: i32,
        timeout: f64,
        work: *mut *mut Work,
    ) -> Result<Self, Failure> {
        // SAFETY: the caller's promise, handed on.
        let engine = unsafe { &open::<'a>(comm)?.engine };
        let found = u8::try_from(dtype).ok().and_then(DType::from_code);
        let dtype = found.ok_or_else(|| {
            Failure::invalid(format!("dtype {dtype} does not exist; use HFR_FLOAT32 and its like"))
        })?;
        let timeout = seconds("timeout_seconds", timeout)?;
        Ok(Self { engine, dtype, timeout, lazy: work.is_null() })
    }

    fn range(
        &self,
        name: &str,
        memory: *const c_void,
        count: usize,
    ) -> Result<(*mut u8, usize), Failure> {
        let bytes = count.checked_mul(self.dtype.size_bytes());
        let Some(bytes) = bytes.filter(|bytes| *bytes <= isize::MAX as usize) else {
            return Err(Failure::invalid(format!("{name}: {count} elements are too many")));
        };
        if memory.is_null() && bytes > 0 {
            return Err(Failure::invalid(format!("{name} is NULL for {count} elements")));
        }
        Ok((memory.cast_mut().cast(), bytes))
    }

    /// # Safety
    /// `memory` is null or holds `count` elements until the operation has ended.
    pub(crate) unsafe fn buffer(
        &self,
        name: &str,
        memory: *const c_void,
        count: usize,
    ) -> Result<Buffer, Failure> {
        // SAFETY: the header's promise. Inputs are only read: the engine writes into outputs alone.
        Ok(unsafe { Buffer::new([self.range(name, memory, count)?]) })
    }

    /// Several as one.
    ///
    /// # Safety
    /// Both lists are null or have `number` entries; the arrays are as in [`Call::buffer`].
    pub(crate) unsafe fn fused(
        &self,
        buffers: *const *mut c_void,
        counts: *const usize,
        number: usize,
    ) -> Result<(Buffer, u64), Failure> {
        if number == 0 {
            return Ok((Buffer::default(), fused_shape([])));
        }
        if buffers.is_null() || counts.is_null() {
            return Err(Failure::invalid(format!("buffers or counts is NULL for {number} arrays")));
        }
        // SAFETY: the caller's promise.
        let (buffers, counts) = unsafe {
            (
                std::slice::from_raw_parts(buffers, number),
                std::slice::from_raw_parts(counts, number),
            )
        };
        let range = |at: usize| self.range(&format!("buffers[{at}]"), buffers[at], counts[at]);
        let ranges = (0..number).map(range).collect::<Result<Vec<_>, _>>()?;
        let all = ranges.iter().try_fold(0_usize, |sum, (_, bytes)| sum.checked_add(*bytes));
        if all.is_none_or(|bytes| bytes > isize::MAX as usize) {
            return Err(Failure::invalid(format!("the elements of {number} arrays are too many")));
        }
        // SAFETY: the header's promise.
        Ok((unsafe { Buffer::new(ranges) }, fused_shape(counts.iter().copied())))
    }

    /// Every rank's `count` elements. What is too many is refused where it becomes bytes.
    pub(crate) fn all(&self, count: usize) -> usize {
        count.saturating_mul(self.engine.world_size())
    }
}

pub(crate) fn reduction(op: i32) -> Result<ReduceOp, Failure> {
    let found = u8::try_from(op).ok().and_then(ReduceOp::from_code);
    found.ok_or_else(|| {
        Failure::invalid(format!("op {op} does not exist; use HFR_SUM and its like"))
    })
}
