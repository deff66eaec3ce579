//! Calls of operations as C describes them, and their conversion to the engine's.

use std::ffi::c_void;

use hfreduce_engine::{Buffer, DType, Kind, ReduceOp, fused_shape};

use crate::comm::{Comm, open};
use crate::conversions::seconds;
use crate::error::{Failure, Status, guard};
use crate::work::{Work, deliver};

/// The arguments of an operation. Those that only some operations have are zero in the others.
pub(crate) struct Call {
    pub(crate) comm: *mut Comm,
    pub(crate) kind: Kind,
    pub(crate) memory: Memory,
    pub(crate) dtype: i32,
    pub(crate) timeout_seconds: f64,
    pub(crate) work: *mut *mut Work,
    pub(crate) op: i32,
    pub(crate) root: u32,
    pub(crate) peer: u32,
    pub(crate) tag: u64,
}

/// The arrays of an operation.
pub(crate) enum Memory {
    /// None: a barrier.
    Absent,
    /// One array of `count` elements.
    InPlace { buffer: *const c_void, count: usize },
    /// Blocks of `count` elements; [`Kind::blocks`] is their number in each array.
    Apart { input: *const c_void, output: *mut c_void, count: usize },
    /// Blocks of as many elements as the lists count, one of each rank.
    Split {
        input: *const c_void,
        input_counts: *const usize,
        output: *mut c_void,
        output_counts: *const usize,
    },
    /// Several arrays that form one buffer.
    Fused { buffers: *const *mut c_void, counts: *const usize, number: usize },
}

impl Call {
    pub(crate) fn new(
        comm: *mut Comm,
        kind: Kind,
        memory: Memory,
        dtype: i32,
        timeout_seconds: f64,
        work: *mut *mut Work,
    ) -> Self {
        Self { comm, kind, memory, dtype, timeout_seconds, work, op: 0, root: 0, peer: 0, tag: 0 }
    }

    /// Starts the operation and returns its handle, or waits if `work` is null.
    ///
    /// # Safety
    /// The header's: handles are live, and the memory is valid until the operation has ended.
    pub(crate) unsafe fn start(self) -> Status {
        // SAFETY: guaranteed by the caller.
        guard(|| unsafe { self.try_start() })
    }

    /// # Safety
    /// As for [`Call::start`].
    unsafe fn try_start(self) -> Result<(), Failure> {
        // SAFETY: guaranteed by the caller.
        let engine = unsafe { &open(self.comm)?.engine };
        let dtype = u8::try_from(self.dtype).ok().and_then(DType::from_code).ok_or_else(|| {
            let dtype = self.dtype;
            Failure::invalid(format!("dtype {dtype} does not exist; use HFR_FLOAT32 and its like"))
        })?;
        let op = u8::try_from(self.op).ok().and_then(ReduceOp::from_code).ok_or_else(|| {
            Failure::invalid(format!("op {} does not exist; use HFR_SUM and its like", self.op))
        })?;
        let timeout = seconds("timeout_seconds", self.timeout_seconds)?;
        let (root, ranks) = (self.root, engine.world_size());
        let equal_counts;
        let mut call = hfreduce_engine::Call {
            op,
            root,
            peer: Some(self.peer),
            tag: self.tag,
            ..hfreduce_engine::Call::new(self.kind, dtype, timeout, self.work.is_null())
        };
        // SAFETY: guaranteed by the caller; `alltoallv` has lists of `ranks` counts.
        unsafe {
            match self.memory {
                Memory::Absent => {}
                Memory::InPlace { buffer, count } => {
                    call.input = array("buffer", buffer, count, dtype)?;
                }
                Memory::Apart { input, output, count } => {
                    let (inputs, outputs) = self.kind.blocks(engine.rank() == root, ranks);
                    // Too many elements are refused where they become bytes.
                    call.input = array("input", input, count.saturating_mul(inputs), dtype)?;
                    call.output = array("output", output, count.saturating_mul(outputs), dtype)?;
                    if self.kind == Kind::Alltoall {
                        equal_counts = vec![count; ranks];
                        call.counts = [&equal_counts; 2];
                    }
                }
                Memory::Split { input, input_counts, output, output_counts } => {
                    if input_counts.is_null() || output_counts.is_null() {
                        return Err(Failure::invalid("input_counts or output_counts is NULL"));
                    }
                    call.counts = [input_counts, output_counts]
                        .map(|counts| std::slice::from_raw_parts(counts, ranks));
                    let [inputs, outputs] = call.counts.map(total);
                    call.input = array("input", input, inputs, dtype)?;
                    call.output = array("output", output, outputs, dtype)?;
                }
                Memory::Fused { buffers, counts, number } => {
                    (call.input, call.shape) = fused(buffers, counts, number, dtype)?;
                }
            }
            deliver(engine.call(call), self.work)
        }
    }
}

fn total(counts: &[usize]) -> usize {
    counts.iter().fold(0, |sum, count| sum.saturating_add(*count))
}

fn range(
    name: &str,
    memory: *const c_void,
    count: usize,
    dtype: DType,
) -> Result<(*mut u8, usize), Failure> {
    let bytes = count.checked_mul(dtype.size_bytes());
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
unsafe fn array(
    name: &str,
    memory: *const c_void,
    count: usize,
    dtype: DType,
) -> Result<Buffer, Failure> {
    // SAFETY: the header requires it. Inputs are only read: the engine writes into outputs alone.
    Ok(unsafe { Buffer::new([range(name, memory, count, dtype)?]) })
}

/// Several arrays as one buffer, and the digest of their sizes.
///
/// # Safety
/// Both lists are null or have `number` entries; the arrays are as in [`array`].
unsafe fn fused(
    buffers: *const *mut c_void,
    counts: *const usize,
    number: usize,
    dtype: DType,
) -> Result<(Buffer, u64), Failure> {
    if number == 0 {
        return Ok((Buffer::default(), fused_shape([])));
    }
    if buffers.is_null() || counts.is_null() {
        return Err(Failure::invalid(format!("buffers or counts is NULL for {number} arrays")));
    }
    // SAFETY: guaranteed by the caller.
    let (buffers, counts) = unsafe {
        (std::slice::from_raw_parts(buffers, number), std::slice::from_raw_parts(counts, number))
    };
    let range = |at: usize| range(&format!("buffers[{at}]"), buffers[at], counts[at], dtype);
    let ranges = (0..number).map(range).collect::<Result<Vec<_>, _>>()?;
    let all = ranges.iter().try_fold(0_usize, |sum, (_, bytes)| sum.checked_add(*bytes));
    if all.is_none_or(|bytes| bytes > isize::MAX as usize) {
        return Err(Failure::invalid(format!("the elements of {number} arrays are too many")));
    }
    // SAFETY: the header requires it.
    Ok((unsafe { Buffer::new(ranges) }, fused_shape(counts.iter().copied())))
}
