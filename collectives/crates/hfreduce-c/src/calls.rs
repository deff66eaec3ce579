//! Collective and point-to-point operations: each function describes its operation as a [`Call`].
#![allow(missing_docs, clippy::missing_safety_doc)] // The header is the documentation.

use std::ffi::c_void;

use hfreduce_engine::{DType, Kind};

use crate::arguments::{Call, Memory};
use crate::comm::Comm;
use crate::error::Status;
use crate::work::Work;

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
    let memory = Memory::InPlace { buffer, count };
    let call = Call::new(comm, Kind::Allreduce, memory, dtype, timeout_seconds, work);
    // SAFETY: guaranteed by the caller.
    unsafe { Call { op, ..call }.start() }
}

#[unsafe(no_mangle)]
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
    let memory = Memory::Fused { buffers, counts, number };
    let call = Call::new(comm, Kind::Allreduce, memory, dtype, timeout_seconds, work);
    // SAFETY: guaranteed by the caller.
    unsafe { Call { op, ..call }.start() }
}

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
    let memory = Memory::InPlace { buffer, count };
    let call = Call::new(comm, Kind::Broadcast, memory, dtype, timeout_seconds, work);
    // SAFETY: guaranteed by the caller.
    unsafe { Call { root, ..call }.start() }
}

#[unsafe(no_mangle)]
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
    let memory = Memory::InPlace { buffer, count };
    let call = Call::new(comm, Kind::Reduce, memory, dtype, timeout_seconds, work);
    // SAFETY: guaranteed by the caller.
    unsafe { Call { op, root, ..call }.start() }
}

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
    let memory = Memory::Apart { input, output, count };
    // SAFETY: guaranteed by the caller.
    unsafe { Call::new(comm, Kind::Allgather, memory, dtype, timeout_seconds, work).start() }
}

#[unsafe(no_mangle)]
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
    let memory = Memory::Apart { input, output, count };
    let call = Call::new(comm, Kind::ReduceScatter, memory, dtype, timeout_seconds, work);
    // SAFETY: guaranteed by the caller.
    unsafe { Call { op, ..call }.start() }
}

#[unsafe(no_mangle)]
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
    let memory = Memory::Apart { input, output, count };
    let call = Call::new(comm, Kind::Gather, memory, dtype, timeout_seconds, work);
    // SAFETY: guaranteed by the caller.
    unsafe { Call { root, ..call }.start() }
}

#[unsafe(no_mangle)]
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
    let memory = Memory::Apart { input, output, count };
    let call = Call::new(comm, Kind::Scatter, memory, dtype, timeout_seconds, work);
    // SAFETY: guaranteed by the caller.
    unsafe { Call { root, ..call }.start() }
}

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
    let memory = Memory::Apart { input, output, count };
    // SAFETY: guaranteed by the caller.
    unsafe { Call::new(comm, Kind::Alltoall, memory, dtype, timeout_seconds, work).start() }
}

#[unsafe(no_mangle)]
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
    let memory = Memory::Split { input, input_counts, output, output_counts };
    // SAFETY: guaranteed by the caller.
    unsafe { Call::new(comm, Kind::Alltoall, memory, dtype, timeout_seconds, work).start() }
}

#[unsafe(no_mangle)]
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
    let memory = Memory::InPlace { buffer, count };
    let call = Call::new(comm, Kind::Send, memory, dtype, timeout_seconds, work);
    // SAFETY: guaranteed by the caller.
    unsafe { Call { peer, tag, ..call }.start() }
}

#[unsafe(no_mangle)]
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
    let memory = Memory::InPlace { buffer, count };
    let call = Call::new(comm, Kind::Recv, memory, dtype, timeout_seconds, work);
    // SAFETY: guaranteed by the caller.
    unsafe { Call { peer, tag, ..call }.start() }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hfr_barrier(
    comm: *mut Comm,
    timeout_seconds: f64,
    work: *mut *mut Work,
) -> Status {
    let (memory, dtype) = (Memory::Absent, i32::from(DType::U8.code()));
    // SAFETY: guaranteed by the caller.
    unsafe { Call::new(comm, Kind::Barrier, memory, dtype, timeout_seconds, work).start() }
}
