//! The handle `hfr_comm`.

use std::collections::BTreeMap;
use std::sync::Mutex;

use hfreduce_engine::{Block, Communicator};

use crate::error::Failure;

/// `hfr_comm`.
pub struct Comm {
    pub(crate) engine: Communicator,
    /// Blocks of `hfr_alloc` that have not been freed, by address.
    pub(crate) blocks: Mutex<BTreeMap<usize, Block>>,
}

pub(crate) fn boxed(engine: Communicator) -> *mut Comm {
    Box::into_raw(Box::new(Comm { engine, blocks: Mutex::default() }))
}

/// # Safety
/// `comm` is null or open.
pub(crate) unsafe fn open<'a>(comm: *const Comm) -> Result<&'a Comm, Failure> {
    // SAFETY: guaranteed by the caller; it stays open as long as a call uses it.
    unsafe { comm.as_ref() }.ok_or_else(|| Failure::invalid("comm is NULL"))
}
