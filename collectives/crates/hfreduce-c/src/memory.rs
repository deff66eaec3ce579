//! Registered memory, which the ranks of a node read and write in place.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::{Mutex, PoisonError};

use hfreduce_engine::Block;

use crate::error::{Failure, Status, guard};
use crate::group::{Comm, open, put};

/// Blocks of `hfr_alloc` that have not been freed, by address.
pub(crate) type Blocks = Mutex<BTreeMap<usize, Block>>;

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
        // SAFETY: the caller's promise, handed on.
        let comm = unsafe { open(comm) }?;
        if memory.is_null() {
            return Err(Failure::invalid("memory is NULL"));
        }
        let block = comm.engine.allocate(bytes)?;
        let base = block.base();
        comm.blocks.lock().unwrap_or_else(PoisonError::into_inner).insert(base.addr(), block);
        // SAFETY: just checked, and the caller's promise.
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
        // SAFETY: the caller's promise, handed on.
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
