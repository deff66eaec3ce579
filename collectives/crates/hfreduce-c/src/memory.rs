//! Registered memory, which the ranks of a node read and write in place.

use std::ffi::c_void;
use std::sync::PoisonError;

use crate::comm::{Comm, open};
use crate::conversions::put;
use crate::error::{Failure, Status, guard};

/// See the header.
///
/// # Safety
/// `comm` is null or open; `memory` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hfr_alloc(
    comm: *mut Comm,
    bytes: usize,
    memory: *mut *mut c_void,
) -> Status {
    guard(|| {
        // SAFETY: guaranteed by the caller.
        let comm = unsafe { open(comm) }?;
        if memory.is_null() {
            return Err(Failure::invalid("memory is NULL"));
        }
        let block = comm.engine.allocate(bytes)?;
        let base = block.base();
        comm.blocks.lock().unwrap_or_else(PoisonError::into_inner).insert(base.addr(), block);
        // SAFETY: just checked, and guaranteed by the caller.
        unsafe { put("memory", memory, base.cast()) }
    })
}

/// See the header.
///
/// # Safety
/// `comm` is null or open; no operation uses the memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hfr_free(comm: *mut Comm, memory: *mut c_void) -> Status {
    guard(|| {
        // SAFETY: guaranteed by the caller.
        let comm = unsafe { open(comm) }?;
        if memory.is_null() {
            return Ok(());
        }
        let mut blocks = comm.blocks.lock().unwrap_or_else(PoisonError::into_inner);
        match blocks.remove(&memory.addr()) {
            Some(_) => Ok(()),
            None => Err(Failure::invalid("memory did not come from hfr_alloc of this comm")),
        }
    })
}
