//! Collective and point-to-point operations.

use std::ffi::c_void;

use hfreduce_engine::DType;

use crate::arguments::{Call, reduction};
use crate::comm::Comm;
use crate::error::{Failure, Status, guard};
use crate::work::{Work, begun};

/// See the header.
///
/// # Safety
/// The header's: handles are live, and the memory is valid until the operation has ended.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hfr_allreduce(
    comm: *mut Comm,
    buffer: *mut c_void,
    count: usize,
    dtype: i32,
    op: i32,
    timeout_seconds: f64,
    work: *mut *mut Work,
) -> Status {
    // SAFETY: the caller's promises, handed on.
    guard(|| unsafe {
        let call = Call::new(comm, dtype, timeout_seconds, work)?;
        let buffer = call.buffer("buffer", buffer, count)?;
        let Call { engine, dtype, timeout, lazy } = call;
        begun(engine.allreduce(buffer, dtype, reduction(op)?, 0, timeout, lazy), work)
    })
}

/// See the header.
///
/// # Safety
/// As for [`hfr_allreduce`]; both lists have `number` entries.
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)] // The operation's own signature.
pub unsafe extern "C" fn hfr_allreduce_many(
    comm: *mut Comm,
    buffers: *const *mut c_void,
    counts: *const usize,
    number: usize,
    dtype: i32,
    op: i32,
    timeout_seconds: f64,
    work: *mut *mut Work,
) -> Status {
    // SAFETY: the caller's promises, handed on.
    guard(|| unsafe {
        let call = Call::new(comm, dtype, timeout_seconds, work)?;
        let (buffer, shape) = call.fused(buffers, counts, number)?;
        let Call { engine, dtype, timeout, lazy } = call;
        begun(engine.allreduce(buffer, dtype, reduction(op)?, shape, timeout, lazy), work)
    })
}

/// See the header.
///
/// # Safety
/// As for [`hfr_allreduce`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hfr_broadcast(
    comm: *mut Comm,
    buffer: *mut c_void,
    count: usize,
    dtype: i32,
    root: u32,
    timeout_seconds: f64,
    work: *mut *mut Work,
) -> Status {
    // SAFETY: the caller's promises, handed on.
    guard(|| unsafe {
        let call = Call::new(comm, dtype, timeout_seconds, work)?;
        let buffer = call.buffer("buffer", buffer, count)?;
        let Call { engine, dtype, timeout, lazy } = call;
        begun(engine.broadcast(buffer, dtype, root, timeout, lazy), work)
    })
}

/// See the header.
///
/// # Safety
/// As for [`hfr_allreduce`].
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)] // The operation's own signature.
pub unsafe extern "C" fn hfr_reduce(
    comm: *mut Comm,
    buffer: *mut c_void,
    count: usize,
    dtype: i32,
    op: i32,
    root: u32,
    timeout_seconds: f64,
    work: *mut *mut Work,
) -> Status {
    // SAFETY: the caller's promises, handed on.
    guard(|| unsafe {
        let call = Call::new(comm, dtype, timeout_seconds, work)?;
        let buffer = call.buffer("buffer", buffer, count)?;
        let Call { engine, dtype, timeout, lazy } = call;
        begun(engine.reduce(buffer, dtype, reduction(op)?, root, timeout, lazy), work)
    })
}

/// See the header.
///
/// # Safety
/// As for [`hfr_allreduce`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hfr_allgather(
    comm: *mut Comm,
    input: *const c_void,
    output: *mut c_void,
    count: usize,
    dtype: i32,
    timeout_seconds: f64,
    work: *mut *mut Work,
) -> Status {
    // SAFETY: the caller's promises, handed on.
    guard(|| unsafe {
        let call = Call::new(comm, dtype, timeout_seconds, work)?;
        let input = call.buffer("input", input, count)?;
        let output = call.buffer("output", output, call.all(count))?;
        let Call { engine, dtype, timeout, lazy } = call;
        begun(engine.allgather(input, output, dtype, timeout, lazy), work)
    })
}

/// See the header.
///
/// # Safety
/// As for [`hfr_allreduce`].
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)] // The operation's own signature.
pub unsafe extern "C" fn hfr_reduce_scatter(
    comm: *mut Comm,
    input: *const c_void,
    output: *mut c_void,
    count: usize,
    dtype: i32,
    op: i32,
    timeout_seconds: f64,
    work: *mut *mut Work,
) -> Status {
    // SAFETY: the caller's promises, handed on.
    guard(|| unsafe {
        let call = Call::new(comm, dtype, timeout_seconds, work)?;
        let input = call.buffer("input", input, call.all(count))?;
        let output = call.buffer("output", output, count)?;
        let Call { engine, dtype, timeout, lazy } = call;
        begun(engine.reduce_scatter(input, output, dtype, reduction(op)?, timeout, lazy), work)
    })
}

/// See the header.
///
/// # Safety
/// As for [`hfr_allreduce`].
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)] // The operation's own signature.
pub unsafe extern "C" fn hfr_gather(
    comm: *mut Comm,
    input: *const c_void,
    output: *mut c_void,
    count: usize,
    dtype: i32,
    root: u32,
    timeout_seconds: f64,
    work: *mut *mut Work,
) -> Status {
    // SAFETY: the caller's promises, handed on.
    guard(|| unsafe {
        let call = Call::new(comm, dtype, timeout_seconds, work)?;
        let input = call.buffer("input", input, count)?;
        let all = if call.engine.rank() == root { call.all(count) } else { 0 };
        let output = call.buffer("output", output, all)?;
        let Call { engine, dtype, timeout, lazy } = call;
        begun(engine.gather(input, output, dtype, root, timeout, lazy), work)
    })
}

/// See the header.
///
/// # Safety
/// As for [`hfr_allreduce`].
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)] // The operation's own signature.
pub unsafe extern "C" fn hfr_scatter(
    comm: *mut Comm,
    input: *const c_void,
    output: *mut c_void,
    count: usize,
    dtype: i32,
    root: u32,
    timeout_seconds: f64,
    work: *mut *mut Work,
) -> Status {
    // SAFETY: the caller's promises, handed on.
    guard(|| unsafe {
        let call = Call::new(comm, dtype, timeout_seconds, work)?;
        let all = if call.engine.rank() == root { call.all(count) } else { 0 };
        let input = call.buffer("input", input, all)?;
        let output = call.buffer("output", output, count)?;
        let Call { engine, dtype, timeout, lazy } = call;
        begun(engine.scatter(input, output, dtype, root, timeout, lazy), work)
    })
}

/// See the header.
///
/// # Safety
/// As for [`hfr_allreduce`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hfr_alltoall(
    comm: *mut Comm,
    input: *const c_void,
    output: *mut c_void,
    count: usize,
    dtype: i32,
    timeout_seconds: f64,
    work: *mut *mut Work,
) -> Status {
    // SAFETY: the caller's promises, handed on.
    guard(|| unsafe {
        let call = Call::new(comm, dtype, timeout_seconds, work)?;
        let input = call.buffer("input", input, call.all(count))?;
        let output = call.buffer("output", output, call.all(count))?;
        let Call { engine, dtype, timeout, lazy } = call;
        let each = vec![count; engine.world_size()];
        begun(engine.alltoall(input, output, &each, &each, dtype, timeout, lazy), work)
    })
}

/// See the header.
///
/// # Safety
/// As for [`hfr_allreduce`]; both lists have `world_size` entries.
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)] // The operation's own signature.
pub unsafe extern "C" fn hfr_alltoallv(
    comm: *mut Comm,
    input: *const c_void,
    input_counts: *const usize,
    output: *mut c_void,
    output_counts: *const usize,
    dtype: i32,
    timeout_seconds: f64,
    work: *mut *mut Work,
) -> Status {
    // SAFETY: the caller's promises, handed on.
    guard(|| unsafe {
        let call = Call::new(comm, dtype, timeout_seconds, work)?;
        if input_counts.is_null() || output_counts.is_null() {
            return Err(Failure::invalid("input_counts or output_counts is NULL"));
        }
        let ranks = call.engine.world_size();
        let gives = std::slice::from_raw_parts(input_counts, ranks);
        let takes = std::slice::from_raw_parts(output_counts, ranks);
        let total = |counts: &[usize]| counts.iter().fold(0_usize, |sum, n| sum.saturating_add(*n));
        let input = call.buffer("input", input, total(gives))?;
        let output = call.buffer("output", output, total(takes))?;
        let Call { engine, dtype, timeout, lazy } = call;
        begun(engine.alltoall(input, output, gives, takes, dtype, timeout, lazy), work)
    })
}

/// See the header.
///
/// # Safety
/// As for [`hfr_allreduce`].
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)] // The operation's own signature.
pub unsafe extern "C" fn hfr_send(
    comm: *mut Comm,
    buffer: *const c_void,
    count: usize,
    dtype: i32,
    peer: u32,
    tag: u64,
    timeout_seconds: f64,
    work: *mut *mut Work,
) -> Status {
    // SAFETY: the caller's promises, handed on.
    guard(|| unsafe {
        let call = Call::new(comm, dtype, timeout_seconds, work)?;
        let buffer = call.buffer("buffer", buffer, count)?;
        begun(call.engine.send(buffer, call.dtype, peer, tag, call.timeout), work)
    })
}

/// See the header.
///
/// # Safety
/// As for [`hfr_allreduce`].
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)] // The operation's own signature.
pub unsafe extern "C" fn hfr_recv(
    comm: *mut Comm,
    buffer: *mut c_void,
    count: usize,
    dtype: i32,
    peer: u32,
    tag: u64,
    timeout_seconds: f64,
    work: *mut *mut Work,
) -> Status {
    // SAFETY: the caller's promises, handed on.
    guard(|| unsafe {
        let call = Call::new(comm, dtype, timeout_seconds, work)?;
        let buffer = call.buffer("buffer", buffer, count)?;
        begun(call.engine.recv(buffer, call.dtype, peer, tag, call.timeout), work)
    })
}

/// See the header.
///
/// # Safety
/// As for [`hfr_allreduce`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hfr_barrier(
    comm: *mut Comm,
    timeout_seconds: f64,
    work: *mut *mut Work,
) -> Status {
    // SAFETY: the caller's promises, handed on.
    guard(|| unsafe {
        let call = Call::new(comm, i32::from(DType::U8.code()), timeout_seconds, work)?;
        begun(call.engine.barrier(call.timeout, call.lazy), work)
    })
}
